"""Columns as a data frame of whichever library the caller has: pandas or polars. Neither is a dependency, and neither is imported
before it is asked for. No Arrow stream: pandas reads one by pyarrow alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from perfagent.errors import ConfigError, ResourceError

__all__ = ["Kind", "Library", "data_frame"]

Library = Literal["pandas", "polars"]
Kind = Literal["text", "int", "float", "time"]
_LIBRARIES: tuple[Library, ...] = ("pandas", "polars")
_NOT_A_TIME = -(2**63)  # numpy's NaT
_MOST_S = 9.2e9  # nanoseconds in 64 bits: the year 2261


def data_frame(kinds: Mapping[str, Kind], columns: Mapping[str, Sequence[Any]], library: Library | None = None) -> Any:
    """A pandas or polars DataFrame with the columns of `kinds`, in its order: text, int64, float64 with NaN and infinities as
    they are, and times, from Unix seconds to UTC in nanoseconds (missing where they are not finite). library: None for pandas
    where it is installed, else polars.

    Raises ConfigError for another library, ResourceError where it is not installed.
    """
    if library is not None and library not in _LIBRARIES:
        raise ConfigError(f"library is {library!r}; allowed are 'pandas' and 'polars'")
    wanted = _LIBRARIES if library is None else (library,)
    found = next((name for name in wanted if find_spec(name) is not None), None)
    if found is None:
        raise ResourceError(
            f"a data frame needs {' or '.join(wanted)}, which is not installed: `pip install {wanted[0]}`"
        )
    return (_pandas if found == "pandas" else _polars)(kinds, columns)


def _pandas(kinds: Mapping[str, Kind], columns: Mapping[str, Sequence[Any]]) -> Any:
    import numpy
    import pandas

    def column(kind: Kind, values: Sequence[Any]) -> Any:
        if kind == "text":
            return pandas.Series(values, dtype="str")
        if kind == "time":
            moments = numpy.array([_NOT_A_TIME if ns is None else ns for ns in map(_ns, values)], "int64")
            return pandas.DatetimeIndex(moments.view("datetime64[ns]"), tz="UTC")
        return numpy.array(values, "int64" if kind == "int" else "float64")

    return pandas.DataFrame({name: column(kind, columns[name]) for name, kind in kinds.items()})


def _polars(kinds: Mapping[str, Kind], columns: Mapping[str, Sequence[Any]]) -> Any:
    import polars

    types = {"text": polars.String, "int": polars.Int64, "float": polars.Float64, "time": polars.Int64}

    def column(name: str, kind: Kind) -> Any:
        values = columns[name]
        made = polars.Series(name, [_ns(one) for one in values] if kind == "time" else list(values), types[kind])
        return made.cast(polars.Datetime("ns", "UTC")) if kind == "time" else made

    return polars.DataFrame([column(name, kind) for name, kind in kinds.items()])


def _ns(seconds: float) -> int | None:
    """Unix seconds in whole nanoseconds; as one product they would lose their last digits."""
    if not abs(seconds) < _MOST_S:  # NaN, too
        return None
    fraction, whole = math.modf(seconds)
    return int(whole) * 1_000_000_000 + round(fraction * 1e9)
