"""The answers of the server: the shapes of its JSON, shared by server, client and dashboard.

Non-finite numbers are the strings "NaN", "Infinity" and "-Infinity" in JSON (the rule of protobuf's JSON mapping): JSON
has no number for them, and null would turn our main alert into a gap. `to_json` and `from_json` apply that rule. Times
in JSON are RFC 3339 UTC; sample times are Unix seconds.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec

from perfagent.errors import WireError

__all__ = [
    "BAD_ENDS", "ENDED", "OUTCOMES", "SEVERITIES", "STATES", "STATE_SHAPES", "Alert", "Finding", "Latest", "LogRow",
    "Quantiles", "RankMatrix", "RunSummary", "Series", "Severity", "Spent", "State", "StepWindow", "Timing", "from_json",
    "healthy", "outcome_of", "plain", "to_json",
]  # fmt: skip

Severity = Literal["info", "warning", "critical"]
State = Literal["starting", "running", "lost", "finished", "failed", "oom", "killed", "preempted"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
STATES: tuple[State, ...] = get_args(State)
OUTCOMES = ("healthy", "unknown", *SEVERITIES)
"""Names of a run by its verdict, from the best to the worst; `unknown`: no rule has judged it."""
BAD_ENDS = ("failed", "oom", "killed", "preempted", "lost")
"""A lost run may come back, but whoever waits for it must not wait for ever."""
ENDED = ("finished", *BAD_ENDS[:-1])
STATE_SHAPES = {
    "starting": "◌", "running": "●", "lost": "?", "finished": "✓", "failed": "✕", "oom": "✕", "killed": "■", "preempted": "‖",
}  # fmt: skip
"""A state can be read without its color."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """Result of a rule for a run. evidence: the numbers it is based on; fix: what to do, in words; gain_pct: how much
    less time a step would take without it. message: one sentence with the figures in it; since: RFC 3339 UTC. title:
    the same in at most 90 characters; cause: which of the rule's causes it is, "" for the usual one; cost: what it
    costs, in words, "" where that cannot be said; money_per_hour: the same in money, in `currency`, where the run's project
    has a price."""

    rule: str
    severity: Severity
    message: str
    since_step: int | None = None
    since: str | None = None
    ranks: list[int] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    gain_pct: float | None = None
    title: str = ""
    cause: str = ""
    cost: str = ""
    money_per_hour: float | None = None
    currency: str = ""

    def __str__(self) -> str:
        """For print: the sentence, and what to do. repr() shows the evidence too."""
        return f"{self._heading()}: {self.message}" + (f"\n  fix: {self.fix}" if self.fix else "")

    def _repr_html_(self) -> str:
        """For notebooks."""
        from perfagent.wire.notebook_html import finding_html  # not with the training

        kind = self.severity if self.rule != "healthy" else self._heading()
        return finding_html(self._heading(), kind, self.message, self.fix, self.evidence)

    @property
    def is_judged(self) -> bool:
        """Whether it says something of the run: a healthy verdict before enough steps were seen does not."""
        return self.rule != "healthy" or bool(self.evidence.get("step") and self.evidence.get("judged", True))

    def _heading(self) -> str:
        if self.rule == "healthy":
            return self.rule if self.is_judged else "unknown"
        return f"{self.rule} ({self.severity}" + (
            f", since step {self.since_step:,})" if self.since_step is not None else ")"
        )


@dataclass(slots=True, kw_only=True)
class Alert:
    """A finding with a life of its own. state: pending, firing, resolved. run_name: "" where the run has none; project:
    that of the run.
    acknowledged_by, note: who acknowledged it, and what they wrote. muted_until: of the rule in the run; snoozed_until: of
    this alert; silenced_until: by silences. The year 9999 is "until somebody undoes it", and for a snooze "until it is
    resolved"."""

    id: str
    state: Literal["pending", "firing", "resolved"]
    run: str
    run_name: str = ""
    project: str = ""
    rule: str
    severity: Severity
    message: str
    since: str
    since_step: int | None = None
    last_step: int | None = None
    ranks: list[int] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    gain_pct: float | None = None
    resolved: str | None = None
    acknowledged: str | None = None
    acknowledged_by: str = ""
    note: str = ""
    muted_until: str | None = None
    snoozed_until: str | None = None
    silenced_until: str | None = None
    title: str = ""
    cause: str = ""
    cost: str = ""
    money_per_hour: float | None = None
    currency: str = ""


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """One run as in GET /api/v1/runs. step: the last completed one; started, updated, ended: RFC 3339 UTC. started is the
    earliest time in its frames, ended is reported by its process; both are corrected if the sender's clock is wrong by
    more than a minute. rules_off: rules that do not judge it; left_out: `{"names": {"count", "limit", "exact"?}, "tags":
    {...}}`, for how many names of metrics and tags, or more where `exact` is missing, there was no room; severity: of
    OUTCOMES, "" where an older server does not say it."""

    run: str
    project: str
    name: str
    state: State
    step: int
    started: str
    updated: str
    ended: str | None = None
    reason: str = ""
    world_size: int = 1
    attempts: int = 1
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    host: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    rules_off: list[str] = field(default_factory=list)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    severity: str = ""


@dataclass(slots=True, kw_only=True)
class Latest:
    """The newest sample of a series. rank: the rank it is from, or the string "all" where ranks were put together."""

    value: float
    step: int
    time: float
    rank: int | str


@dataclass(slots=True, kw_only=True)
class Series:
    """At most `points` buckets of one series; empty buckets are left out.

    All lists have equal length. step: first step of each bucket; min, max, mean: over finite values, NaN where there is
    none; count: samples; nonfinite: how many of them are NaN or infinite; exact: each bucket is one sample; ranks: how
    many have sent this series.
    """

    name: str
    rank: int | str
    unit: str
    exact: bool
    step: list[int]
    min: list[float]
    max: list[float]
    mean: list[float]
    count: list[int]
    nonfinite: list[int]
    time: list[float] = field(default_factory=list)
    bucket_steps: int = 1
    ranks: int = 1

    def __repr__(self) -> str:
        """Short: the lists may have thousands of numbers."""
        values = f", {self.mean[0]:.6g} to {self.mean[-1]:.6g}" if self.mean else ""
        steps = f"steps {self.step[0]:,} to {self.step[-1]:,}" if self.step else "empty"
        return f"<Series {self.name!r}, rank {self.rank}, {steps} in {len(self.step):,} points{values}>"


@dataclass(slots=True, kw_only=True)
class RankMatrix:
    """One series over ranks: `mean[i][j]` belongs to ranks[i] and to the bucket that begins at step[j]; NaN where
    empty."""

    name: str
    unit: str
    ranks: list[int]
    step: list[int]
    mean: list[list[float]]


@dataclass(slots=True, kw_only=True)
class Quantiles:
    """Quantiles of one series over a window of steps, in its unit. count: steps that have a value."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int


@dataclass(slots=True, kw_only=True)
class StepWindow:
    """The steps that figures are about: `steps` of them. whole_run: the run has ended, and these are all its steps.
    bucket_steps: 1 where each step counts alone; else the figures come from means of so many steps."""

    from_step: int
    to_step: int
    steps: int
    whole_run: bool = False
    bucket_steps: int = 1

    def __str__(self) -> str:
        """As in "median of ...": the whole run, the newest 100 steps."""
        if self.whole_run:
            return "the whole run"
        return f"the newest {self.steps:,} steps" if self.steps > 1 else "the newest step"


@dataclass(slots=True, kw_only=True)
class Timing:
    """Where the time of the steps from_step..to_step went, and how fast they were.

    window: those steps, by name; None where the run has none. series: step_time_s and the phases that were measured.
    rates: samples, tokens and FLOP a second and MFU, as far as they are known. shares: of all the step time, what went
    into data, transfer, compute (forward, backward, optimizer), communication, checkpoint, evaluation and other; absent
    where it was not measured. phase_shares: the same, by phase. Page, command line and a healthy verdict show the
    medians of step_time_s and rates, and the shares.
    """

    from_step: int
    to_step: int
    series: dict[str, Quantiles]
    shares: dict[str, float]
    window: StepWindow | None = None
    rates: dict[str, Quantiles] = field(default_factory=dict)
    phase_shares: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Spent:
    """Cost of a run over all its attempts; None: not known.

    gpu_hours, cpu_core_hours: what its processes had, used or not, while they ran: a GPU for each rank that has one, and the
    cores of each host that the run may use. gpu_energy_kwh: of those GPUs. gpu_energy_per_token_j: of the newest steps.
    money, money_per_hour: at the price of its project, in `currency`; per hour: now, or on average once the run has ended.
    """

    hours: float = 0.0
    gpu_hours: float | None = None
    cpu_core_hours: float | None = None
    gpu_energy_kwh: float | None = None
    gpu_energy_per_token_j: float | None = None
    money: float | None = None
    money_per_hour: float | None = None
    currency: str = ""


@dataclass(slots=True, kw_only=True)
class LogRow:
    """One exported sample, and one row of POST /api/v1/log."""

    name: str
    rank: int
    step: int
    time: float
    value: float


def healthy(message: str = "Nothing holds this run back.") -> Finding:
    """The verdict of a run in which no rule found anything."""
    return Finding(rule="healthy", severity="info", message=message)


def outcome_of(verdict: Finding, state: str) -> str:
    """Returns the one of OUTCOMES for a verdict and a state. A run that ended badly is never healthy."""
    if verdict.rule != "healthy":
        return verdict.severity
    if state in BAD_ENDS:
        return "info"
    return "healthy" if verdict.evidence.get("step") else "unknown"


def plain(value: Any) -> Any:
    """The value with dataclasses as dicts and non-finite floats as strings, ready for any JSON encoder. What
    MessagePack has and JSON has not becomes text: bytes in base64, moments in ISO 8601."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _spell(value)
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, msgspec.msgpack.Ext):
        return plain(value.data)
    if isinstance(value, datetime):
        return value.isoformat()
    raise WireError(
        f"{type(value).__name__} has no form in JSON; numbers, text, bytes, lists, dicts and dataclasses have"
    )


def to_json(value: Any) -> bytes:
    """UTF-8 JSON with non-finite numbers spelled out."""
    return msgspec.json.encode(plain(value))


def from_json(value: Any) -> float:
    """A number from JSON: a number, or one of "NaN", "Infinity", "-Infinity". Raises WireError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise WireError(f'a value must be a number or one of "NaN", "Infinity", "-Infinity", not {value!r:.80}')
    if isinstance(value, str):
        if value not in _SPELLED:
            raise WireError(f'a value must be a number or one of "NaN", "Infinity", "-Infinity", not {value[:80]!r}')
        return _SPELLED[value]
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _spell(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
