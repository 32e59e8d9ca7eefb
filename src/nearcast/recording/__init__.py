"""Message events as Parquet: one documented schema, a writer that leaves only whole files, a reader that checks.

docs/reference/recording.md describes the schema for whoever reads the files with something else.
"""

from nearcast.recording.reader import Check, Recorded, check, describe, files, read_events, read_table
from nearcast.recording.schema import COLUMNS, KINDS, VERSION, Column, Kind, MessageEvent, arrow_schema, message_id
from nearcast.recording.writer import EventWriter

__all__ = [
    "COLUMNS",
    "KINDS",
    "VERSION",
    "Check",
    "Column",
    "EventWriter",
    "Kind",
    "MessageEvent",
    "Recorded",
    "arrow_schema",
    "check",
    "describe",
    "files",
    "message_id",
    "read_events",
    "read_table",
]
