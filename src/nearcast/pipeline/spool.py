"""Arrow batches that can be gone through again: what was read stays, in memory and beyond some size in a temporary file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from types import TracebackType

import pyarrow as pa

from nearcast.errors import PipelineError

MEMORY_BYTES = 33_554_432
"""Of one task. A micro-batch mostly stays below; what does not goes to the directory for temporary files."""


class Spool:
    """Remembers the batches of an iterator; use it with ``with``."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115 - closed by __exit__
        self._schema: pa.Schema | None = None
        self._places: list[tuple[int, int]] = []
        self._end = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All batches: those that were read before, then the rest. May be asked for again at any point."""
        for offset, size in list(self._places):
            self._file.seek(offset)
            yield pa.ipc.read_record_batch(pa.py_buffer(self._file.read(size)), self._schema)
        for batch in self._batches:
            self._remember(batch)
            yield batch

    def _remember(self, batch: pa.RecordBatch) -> None:
        self._schema = batch.schema
        data = batch.serialize()
        try:
            self._file.seek(self._end)
            self._file.write(data)
        except OSError as error:
            place = tempfile.gettempdir()
            raise PipelineError(
                f"rows on their way to the broker cannot be kept in {place}: {error.strerror or error}"
            ) from error
        self._places.append((self._end, data.size))
        self._end += data.size
