"""From the server's JSON to the shapes of perfagent.wire; non-finite numbers arrive as text and leave as floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import msgspec

from perfagent import wire
from perfagent.errors import WireError
from perfagent.wire import RunSummary, Spent
from perfagent_client.data_frame import Kind, Library, data_frame

__all__ = ["Comparison", "RunDetails", "Series", "parse"]

T = TypeVar("T")


class Series(wire.Series):
    """One series of a run, in buckets of steps. All lists have the same length; empty buckets are left out.

    Attributes:
        name: The name.
        rank: A rank, or "all".
        unit: The unit.
        exact: True if each bucket is one sample.
        step: The first step of each bucket.
        min: The smallest finite value; NaN without one.
        max: The largest finite value.
        mean: The mean of the finite values.
        count: Samples.
        nonfinite: How many of them are NaN or infinite.
        time: When the last sample was measured, in seconds since 1970.
        bucket_steps: The steps of a bucket.
        ranks: How many ranks have sent this series.
    """

    __slots__ = ()

    def to_frame(self, library: Library | None = None) -> Any:
        """A DataFrame with one row for each bucket: step, time (UTC), mean, min, max, count, nonfinite.

        Means leave infinities out. For exact samples use `Client.frame`.

        Args:
            library: "pandas" or "polars"; by default pandas if it is installed, else polars.

        Raises:
            ResourceError: The library is not installed.
        """
        kinds: dict[str, Kind] = {
            "step": "int", "time": "time", "mean": "float", "min": "float", "max": "float", "count": "int", "nonfinite": "int",
        }  # fmt: skip
        columns = {name: getattr(self, name) for name in kinds}
        return data_frame(kinds, {**columns, "time": self.time or [math.nan] * len(self.step)}, library)


@dataclass(slots=True, kw_only=True)
class _Details(RunSummary):
    notes: str = field(default="")
    spent: Spent = field(default_factory=Spent)


class RunDetails(_Details):
    """One run with its notes and its cost. In a notebook it shows its verdict and curves.

    Attributes:
        run: The id.
        project: The project.
        name: The name.
        state: "starting", "running", "lost", "finished", "failed", "oom", "killed" or "preempted".
        step: The last completed step.
        started: RFC 3339, UTC.
        updated: When the server last received something from it, RFC 3339, UTC.
        ended: RFC 3339, UTC; None while it runs.
        reason: Why it ended, such as the exception.
        world_size: The number of ranks.
        attempts: How often it was started.
        tags: Its tags.
        group: Its group, or None.
        host: The host of rank 0.
        config: Hyperparameters.
        meta: Environment: versions, git, hardware, launcher.
        rules_off: Rules that do not judge it.
        left_out: Names of metrics and tags above the server's limits, counted.
        severity: That of its verdict: "healthy", "unknown", "info", "warning" or "critical".
        notes: Text for people.
        spent: Hours, GPU hours, energy in kWh, and money where the project has a price.
    """

    __slots__ = ("_html",)

    def shown_as(self, html: Callable[[RunDetails], str]) -> RunDetails:
        self._html = html
        return self

    def _repr_html_(self) -> str | None:
        html: Callable[[RunDetails], str] | None = getattr(self, "_html", None)
        return html(self) if html is not None else None


class Comparison(dict[str, Any]):
    """The answer of GET /api/v1/compare, which a notebook shows as `perfagent compare` does, with the curves of the loss."""

    html: Callable[[Comparison], str] | None = None

    def _repr_html_(self) -> str | None:
        return self.html(self) if self.html is not None else None


def parse(kind: type[T], data: Any) -> T:
    """A wire dataclass from JSON. Unknown fields and words (a state, a severity) are accepted, so that an older client
    reads a newer server's answers.

    Raises WireError when a field that is needed is missing or has another type.
    """
    try:
        # Not strict: "NaN", "Infinity" and "-Infinity" are numbers.
        read = msgspec.convert(data, _shape(kind), strict=False)  # type: ignore[arg-type] # a class can be a key
    except msgspec.ValidationError as error:
        raise WireError(f"the server's answer is no {kind.__name__}: {error}") from error
    given = msgspec.structs.asdict(read)
    return kind(**{name: value for name, value in given.items() if value is not msgspec.UNSET})


@cache
def _shape(kind: type[Any]) -> type[msgspec.Struct]:
    """The fields of a wire dataclass for msgspec, whose dataclasses accept only the words that a Literal of this
    version knows."""
    hints = get_type_hints(kind)
    shape: list[Any] = []
    for item in fields(kind):
        hint = str if get_origin(hints[item.name]) is Literal else hints[item.name]
        needed = item.default is MISSING and item.default_factory is MISSING
        shape.append((item.name, hint) if needed else (item.name, hint | msgspec.UnsetType, msgspec.UNSET))
    return msgspec.defstruct(kind.__name__, shape, kw_only=True)
