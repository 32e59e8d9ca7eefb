"""The options of the data source: what they are called, what they mean, and one clear line for each that is wrong.

Owns parsing and checking. Spark hands all options over as text with keys in any case. A password is never part of a message,
of ``repr`` or of anything Spark shows.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from nearcast.client.endpoints import TlsOptions
from nearcast.errors import PipelineError
from nearcast.mqtt.topics import filter_fault

Position = int | Literal["earliest", "latest"]

DEFAULT_RECONNECT_SECONDS = 60.0
SCHEMES = ("nearcast", "nearcasts")
DEFAULT_PORTS = {"nearcast": 7883, "nearcasts": 7884}
MAX_FILTERS = 64
"""What the bulk port takes in one request."""

CONNECTION_OPTIONS = (
    "url",
    "username",
    "password",
    "caFile",
    "certificateFile",
    "keyFile",
    "reconnectSeconds",
)
READ_OPTIONS = (
    *CONNECTION_OPTIONS,
    "topics",
    "path",
    "startingOffsets",
    "endingOffsets",
    "startingTime",
    "endingTime",
    "minPartitions",
    "rowsPerPartition",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "failOnDataLoss",
)
BATCH_ONLY = ("endingOffsets", "endingTime")
STREAM_ONLY = ("maxRecordsPerTrigger", "maxBytesPerTrigger")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TRUE = ("true", "1", "yes")
_FALSE = ("false", "0", "no")


@dataclass(frozen=True)
class Connection:
    """Where the broker is, and who we are. Shown without credentials."""

    url: str
    """Without credentials."""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: TlsOptions | None = field(default=None, repr=False)
    reconnect_seconds: float = DEFAULT_RECONNECT_SECONDS

    @property
    def full_url(self) -> str:
        """With credentials: for connecting, and for nothing else."""
        if self.username is None and self.password is None:
            return self.url
        scheme, _, rest = self.url.partition("://")
        secret = f":{quote(self.password, safe='')}" if self.password is not None else ""
        return f"{scheme}://{quote(self.username or '', safe='')}{secret}@{rest}"


@dataclass(frozen=True)
class Positions:
    """Where to begin, or to end: by default, for single topics, and by time (which then counts for all)."""

    default: Literal["earliest", "latest"]
    topics: Mapping[str, Position] = field(default_factory=dict)
    time_us: int | None = None


@dataclass(frozen=True)
class ReadOptions:
    """All options of reading."""

    connection: Connection
    filters: tuple[str, ...]
    start: Positions
    end: Positions
    min_partitions: int | None = None
    rows_per_partition: int | None = None
    max_records_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True


def parse_read(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """The options of ``spark.read`` or, ``streaming``, of ``spark.readStream``."""
    given = known_options(options, READ_OPTIONS, "reading")
    for name in BATCH_ONLY if streaming else STREAM_ONLY:
        if name in given:
            where = "spark.read, which has an end" if streaming else "spark.readStream, which has triggers"
            raise PipelineError(f"option {name} is for {where}")
    start = _positions(given, "starting", "latest" if streaming else "earliest")
    end = _positions(given, "ending", "latest")
    if start.time_us is not None and end.time_us is not None and start.time_us > end.time_us:
        raise PipelineError("option startingTime is after endingTime: nothing can lie between them")
    return ReadOptions(
        connection=parse_connection(options),
        filters=_filters(given),
        start=start,
        end=end,
        min_partitions=_count(given, "minPartitions"),
        rows_per_partition=_count(given, "rowsPerPartition"),
        max_records_per_trigger=_count(given, "maxRecordsPerTrigger"),
        max_bytes_per_trigger=_bytes(given, "maxBytesPerTrigger"),
        fail_on_data_loss=_flag(given, "failOnDataLoss", default=True),
    )


def parse_connection(options: Mapping[str, str]) -> Connection:
    """The options that say where the broker is; the sink has the same."""
    given = {name: options[name] for name in CONNECTION_OPTIONS if name in options}
    if not given.get("url"):
        raise PipelineError('option url is missing: .option("url", "nearcast://HOST:7883"), the broker\'s bulk port')
    try:
        parts = urlsplit(given["url"] if "://" in given["url"] else f"nearcast://{given['url']}")
        port = parts.port
    except ValueError:
        raise PipelineError("option url is not a URL: write nearcast://HOST:PORT") from None
    if parts.scheme not in SCHEMES:
        raise PipelineError(f"option url begins with {parts.scheme}://: Spark reads from the bulk port, nearcast://HOST:7883")
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise PipelineError(f"option url must be {parts.scheme}://HOST:PORT and no more; topics are given separately")
    username = given.get("username", unquote(parts.username) if parts.username is not None else None)
    password = given.get("password", unquote(parts.password) if parts.password is not None else None)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    tls = None
    if parts.scheme == "nearcasts":
        tls = TlsOptions(given.get("caFile"), given.get("certificateFile"), given.get("keyFile"))
    else:
        for name in ("caFile", "certificateFile", "keyFile"):
            if name in given:
                raise PipelineError(f"option {name} is for encrypted connections: give the url as nearcasts://")
    seconds = _number(given, "reconnectSeconds", DEFAULT_RECONNECT_SECONDS)
    return Connection(f"{parts.scheme}://{host}:{port or DEFAULT_PORTS[parts.scheme]}", username, password, tls, seconds)


def microseconds(moment: datetime) -> int:
    """Since 1970, exactly; a moment without a zone is UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def known_options(options: Mapping[str, str], names: tuple[str, ...], what: str) -> dict[str, str]:
    """The options under their proper names; a name nobody knows is a mistake, mostly of spelling."""
    proper = {name.lower(): name for name in names}
    given = {}
    for key in options:
        name = proper.get(key.lower())
        if name is None:
            close = difflib.get_close_matches(key.lower(), proper, n=1)
            hint = f": did you mean {proper[close[0]]}?" if close else f"; there are {', '.join(sorted(names))}"
            raise PipelineError(f"unknown option {key} for {what}{hint}")
        given[name] = options[key]
    return given


def _filters(given: Mapping[str, str]) -> tuple[str, ...]:
    """``a/#,b/+/c``, or a JSON list where a topic has a comma in it. ``load("a/#")`` says the same."""
    text = given.get("topics", given.get("path", "")).strip()
    if not text:
        raise PipelineError('option topics is missing: .option("topics", "sensors/#,alerts"), or "#" for all')
    if text.startswith("["):
        try:
            filters = json.loads(text)
        except ValueError:
            filters = None
        if not isinstance(filters, list) or not all(isinstance(each, str) for each in filters):
            raise PipelineError('option topics begins like a JSON list and is none: ["sensors/#", "alerts"]')
    else:
        filters = [each.strip() for each in text.split(",")]
    for each in filters:
        fault = filter_fault(each, 1 << 16)
        if not fault and each.startswith("$share/"):
            fault = "a shared subscription cannot be read, only topics"
        if fault:
            raise PipelineError(f"option topics: {each!r}: {fault}")
    distinct = tuple(dict.fromkeys(filters))
    if len(distinct) > MAX_FILTERS:
        raise PipelineError(
            f"option topics has {len(distinct)} filters and may have {MAX_FILTERS}: use wider ones, and .where on column topic"
        )
    return distinct


def _positions(given: Mapping[str, str], kind: str, default: Literal["earliest", "latest"]) -> Positions:
    offsets_name, time_name = f"{kind}Offsets", f"{kind}Time"
    if offsets_name in given and time_name in given:
        raise PipelineError(f"options {offsets_name} and {time_name} exclude each other")
    if time_name in given:
        return Positions(default, time_us=_moment(time_name, given[time_name]))
    text = given.get(offsets_name, default).strip()
    if text.lower() in ("earliest", "latest"):
        return Positions("earliest" if text.lower() == "earliest" else "latest")
    example = f'"earliest", "latest" or JSON such as {{"sensors/a": 17, "sensors/b": "{default}"}}'
    try:
        topics = json.loads(text)
    except ValueError:
        raise PipelineError(f"option {offsets_name} must be {example}") from None
    if not isinstance(topics, dict):
        raise PipelineError(f"option {offsets_name} must be {example}")
    for topic, position in topics.items():
        if "+" in topic or "#" in topic:
            raise PipelineError(f"option {offsets_name}: {topic!r} is a filter; indexes belong to single topics")
        if position in ("earliest", "latest"):
            continue
        if isinstance(position, bool) or not isinstance(position, int) or position < 1:
            raise PipelineError(f'option {offsets_name}: {topic!r} must have an index (from 1 on), "earliest" or "latest"')
    # Topics that are not named: all of them, whichever end this is about.
    return Positions("earliest" if kind == "starting" else "latest", topics)


def _moment(name: str, text: str) -> int:
    try:
        return microseconds(datetime.fromisoformat(text.strip()))
    except ValueError:
        raise PipelineError(
            f"option {name} must be a time such as 2026-05-01T12:00:00Z (UTC where no zone is given), not {text!r}"
        ) from None


def _count(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    text = given[name].strip().replace("_", "").replace(",", "")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise PipelineError(f"option {name} must be a whole number above 0, not {given[name]!r}")
    return int(text)


def _bytes(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    text = given[name].strip().lower()
    factor = 1
    for suffix, value in (("k", 1 << 10), ("m", 1 << 20), ("g", 1 << 30)):
        if text.endswith(suffix):
            text, factor = text[:-1], value
    number = _count({name: text}, name)
    return None if number is None else number * factor


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    if name not in given:
        return default
    try:
        number = float(given[name])
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise PipelineError(f"option {name} must be a number, 0 or more, not {given[name]!r}")
    return number


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in _TRUE + _FALSE:
        raise PipelineError(f"option {name} must be true or false, not {given[name]!r}")
    return text in _TRUE
