"""Writes samples as a Parquet file while they are read: memory holds one row group, whatever the run's length."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from perfagent.wire import LogRow

__all__ = ["write"]

_GROUP_ROWS = 65_536


class _Sink:
    """What the writer wants of a file, holding only what was not sent yet."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing waits here but for take()."""

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        held, self._pieces = b"".join(self._pieces), []
        return held


def write(chunks: Iterable[list[LogRow]]) -> Iterator[bytes]:
    """The file in pieces: columns name, rank (int32), step (int64), time and value (float64; NaN is a value, never
    null)."""
    import pyarrow  # type: ignore[import-untyped,unused-ignore]  # loaded only when asked for
    from pyarrow import parquet  # type: ignore[import-untyped,unused-ignore]

    schema = pyarrow.schema(
        [
            ("name", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())), ("rank", pyarrow.int32()), ("step", pyarrow.int64()),
            ("time", pyarrow.float64()), ("value", pyarrow.float64()),
        ]
    )  # fmt: skip
    sink = _Sink()
    with parquet.ParquetWriter(pyarrow.PythonFile(sink, mode="w"), schema, compression="zstd") as writer:
        for rows in _groups(chunks):
            columns = [
                pyarrow.array([row.name for row in rows], pyarrow.string()).dictionary_encode(),
                *(
                    pyarrow.array(array(code, [getattr(row, column) for row in rows]), kind)
                    for column, code, kind in (
                        ("rank", "i", pyarrow.int32()), ("step", "q", pyarrow.int64()), ("time", "d", pyarrow.float64()),
                        ("value", "d", pyarrow.float64()),
                    )
                ),
            ]  # fmt: skip
            writer.write_table(pyarrow.table(columns, schema=schema))
            yield sink.take()
    yield sink.take()


def _groups(chunks: Iterable[list[LogRow]]) -> Iterator[list[LogRow]]:
    group: list[LogRow] = []
    for chunk in chunks:
        group += chunk
        if len(group) >= _GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group
