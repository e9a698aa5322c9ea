"""Reads Parquet files: column names without a library, rows with pyarrow (https://parquet.apache.org/docs/file-format)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from perfagent.errors import ResourceError, how_to_install

__all__ = ["batches", "columns"]

_MAGIC = b"PAR1"
_LARGEST_FOOTER = 1 << 24


def columns(path: Path) -> set[str]:
    """Words in its footer, names of columns among them. Empty for what is cut, and for other files."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                return set()
            size = path.stat().st_size
            file.seek(max(0, size - 8))
            end = file.read(8)
            length = int.from_bytes(end[:4], "little")
            if end[4:] != _MAGIC or length > min(size, _LARGEST_FOOTER):
                return set()
            file.seek(size - 8 - length)
            return {word.decode() for word in re.findall(rb"[a-z_]{4,}", file.read(length))}
    except OSError:
        return set()


def batches(path: Path, left_out: list[str], wanted: Sequence[str] | None = None) -> Iterator[dict[str, list[Any]]]:
    """Columns of as many rows as are whole: times as milliseconds since 1970, decimals in millionths. Raises ResourceError
    where pyarrow is missing."""
    try:
        from pyarrow.lib import ArrowException  # type: ignore[import-untyped,unused-ignore]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped,unused-ignore]
    except ModuleNotFoundError as error:
        raise ResourceError(f"reading {path.name} needs pyarrow; {how_to_install('history')}") from error
    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            if missing := set(wanted or ()).difference(file.schema_arrow.names):
                raise ValueError(f"it has no column {min(missing)}")
            for batch in file.iter_batches(columns=wanted):
                yield {name: _values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        reason, _, _ = str(error).strip().partition("\n")
        left_out.append(f"the rest of {path.name} cannot be read: {reason}")


def _values(column: Any) -> list[Any]:
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    from pyarrow import compute

    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    elif pa.types.is_decimal(column.type):
        column = compute.multiply(column, pa.scalar(Decimal(1_000_000), pa.decimal128(7, 0))).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values
