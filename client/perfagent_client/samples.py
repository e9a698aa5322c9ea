"""Reads the exported samples of runs into columns, exactly as they were logged."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from perfagent.errors import WireError
from perfagent_client.data_frame import Kind, Library, data_frame
from perfagent_client.models import RunDetails

__all__ = ["Samples", "listed"]

_KINDS: dict[str, Kind] = {
    "run": "text", "run_name": "text", "name": "text", "rank": "int", "step": "int", "time": "time", "value": "float",
}  # fmt: skip


class _Sample(msgspec.Struct):
    name: str
    rank: int
    step: int
    time: float
    value: float


class Samples:
    """add() every line, then frame(). wanted: names of series; empty for all."""

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted
        self._texts: dict[str, list[str]] = {"run": [], "run_name": [], "name": []}
        self._whole = {"rank": array("q"), "step": array("q")}
        self._numbers = {"time": array("d"), "value": array("d")}
        # Not strict: "NaN", "Infinity" and "-Infinity" are numbers.
        self._decode = msgspec.json.Decoder(_Sample, strict=False).decode

    def add(self, run: RunDetails, line: str) -> None:
        try:
            one = self._decode(line)
        except msgspec.DecodeError as error:
            raise WireError(f"the server's export of run {run.run} has a line that is no sample: {error}") from error
        for name, text in (("run", run.run), ("run_name", run.name), ("name", one.name)):
            self._texts[name].append(text)
        self._whole["rank"].append(one.rank)
        self._whole["step"].append(one.step)
        self._numbers["time"].append(one.time)
        self._numbers["value"].append(one.value)

    def missing(self) -> set[str]:
        return set(self.wanted).difference(self._texts["name"])

    def frame(self, library: Library | None) -> Any:
        return data_frame(_KINDS, {**self._texts, **self._whole, **self._numbers}, library)


def listed(words: str | Sequence[str] | None) -> list[str]:
    """One word, several of them, or none."""
    return [words] if isinstance(words, str) else list(words or ())
