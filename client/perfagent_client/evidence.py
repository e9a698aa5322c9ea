"""What a finding rests on, in lines that a person reads: the batch with its fingerprint and range, tensors that are not
finite, memory by what it is for, the figures before. Pure. Evidence is of an agent or server of any version: what is
not of the expected kind is written as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfagent.wire import Finding, from_json
from perfagent.wire.quantities import quantity

__all__ = ["evidence_lines", "traceback_lines"]

_NEWEST = 5
"""Of the values before."""
_SUFFIXES = {"_s": "s", "_bytes": "B", "_pct": "%"}
_BYTES = ("categories", "allocator")
"""Tables whose values are bytes, without saying so in their names."""
_WHOLE_RUN = {
    "wall_time_pct": "time", "comm_to_compute": "communication to compute", "scaling_efficiency_pct": "scaling efficiency",
}  # fmt: skip
"""Figures of all steps, beside those of the newest steps that a rule looks at."""
_ELSEWHERE = (
    "wall_time_rank", "traceback", "message", "history", "last_steps", "explains", "causes", "reason", "reason_facts", "state",
    "number", "remedies", "where", "world_size", "ranks", "on_rank", "memory", "troubles", "open_alerts",
    "at_risk", "doubt", "trend", "when",
    "functions", "gave_up_on", "more_given_up", "compiling_pct", "more_slow", "stage_number", "meanwhile", "own_phase",
    "bound_by", "bound_share_pct", "why", "began_step", "gradient_step",
)  # fmt: skip
"""In the message or the advice already, or too long for a line."""
_SPELLED = ("NaN", "Infinity", "-Infinity")


def evidence_lines(finding: Finding, *, everything: bool = False) -> list[str]:
    """A line each, the cause that an agent found first. everything: also the batch of a later step."""
    said = f"{finding.message} {finding.fix}"
    lines: list[str] = []
    causes = _tables(finding.evidence.get("causes"))
    for cause in causes:
        front = f"rank {cause.get('rank')}: " if len(causes) > 1 else ""
        lines += [front + line for line in _of_cause(cause, everything=everything)]
    lines += _groups(finding.evidence.get("groups"))
    seen = {"groups", "absent", "judged", *(("step", "since_step") if finding.since_step is not None else ())}
    lines += list(_plain_lines(finding.evidence, leave=seen))
    return [line for line in lines if line.partition(": ")[2] not in said or len(line) < 4]


def _groups(groups: Any) -> Iterator[str]:
    """Where the ranks of a run that hangs stand, a line for each place; what they did not join is in the message."""
    for group in _tables(groups):
        if isinstance(group.get("ranks"), list):
            ranks = ", ".join(map(str, group["ranks"][:8])) + (", ..." if len(group["ranks"]) > 8 else "")
            waits = " (waits for other ranks)" if group.get("waits") is True else ""
            yield f"rank {ranks}: {group.get('at')}{waits}"


def traceback_lines(finding: Finding, most: int | None) -> list[str]:
    """The end of a traceback says most."""
    text = finding.evidence.get("traceback")
    lines = text.splitlines() if isinstance(text, str) else []
    return lines if most is None else lines[-most:]


def _of_cause(cause: Mapping[str, Any], *, everything: bool) -> Iterator[str]:
    own = {
        "batch", "later_batch", "gradients", "gradients_began", "parameters_before", "parameters_after", "first_module",
        "operator", "began", "optimizer_state",
    }  # fmt: skip
    for name in ("batch", "later_batch") if everything else ("batch",):
        if isinstance(cause.get(name), Mapping):
            yield from _batch(cause[name], "batch" if name == "batch" else "later batch")
    for name, what in (
        ("gradients_began", "gradients of the step in which it began"),
        ("gradients", "gradients"),
        ("parameters_before", "parameters before"),
        ("parameters_after", "parameters after"),
    ):
        if isinstance(cause.get(name), Mapping):
            yield f"{what}: {_tensors(cause[name])}"
    module = cause.get("first_module")
    if isinstance(module, Mapping):
        inputs = {True: ", its inputs are finite", False: ", its inputs are not finite"}.get(
            module.get("inputs_finite", ""), ""
        )
        name = f"{module.get('module')} ({module.get('class')})"
        yield f"first module with non-finite output in step {module.get('step')}: {name}{inputs}"
    if isinstance(cause.get("profile"), str):
        yield from _profile(cause)
    operator = cause.get("operator")
    if isinstance(operator, Mapping):
        yield f"operator: {_words(operator)}"
    skipped = own | {"profile", "steps", "says", "shares", "gaps", "operators", "url"} if "profile" in cause else own
    skipped |= {"rank", "step", "loss", "grad_norm", "cause", "batch_tensor", "batch_step", "lr", "loaded", "shared"}
    yield from _plain_lines(cause, leave=skipped)


def _profile(cause: Mapping[str, Any]) -> Iterator[str]:
    """What it shows beside its first sentence, which is in the message, and where its trace is."""
    says = cause.get("says")
    yield from (f"profile: {one}" for one in (says[1:] if isinstance(says, list) else ()))
    trace = f", trace for ui.perfetto.dev at {cause['url']}" if "url" in cause else ""
    yield f"profile: `perfagent profile RUN --show {cause['profile'][:12]}`{trace}"


def _batch(batch: Mapping[str, Any], what: str) -> Iterator[str]:
    """The batch, and a line for each of its tensors."""
    origin = f", {_origin(batch['from'])}" if batch.get("from") else ""
    yield f"{what} of step {batch.get('step')}: fingerprint {batch.get('hash')}{origin}"
    for tensor in sorted(
        _tables(batch.get("tensors")), key=lambda tensor: not tensor.get("nonfinite")
    ):  # the damaged ones first
        kind = f"{tensor.get('dtype')}{tensor.get('shape')}"
        facts = [f"{tensor['nonfinite']:,} non-finite"] if isinstance(tensor.get("nonfinite"), int) else []
        if "min" in tensor and "max" in tensor:
            what = "finite range" if tensor.get("nonfinite") else "range"
            facts.append(f"{what} {_value('', tensor['min'])} to {_value('', tensor['max'])}")
        yield f"  {tensor.get('name')} {kind}: {', '.join([*facts, 'fingerprint ' + str(tensor.get('hash'))])}"


def _origin(found: Any) -> str:
    """Where the batch was found."""
    if isinstance(found, Mapping) and found.get("key") == "local_variables":
        return f"local variables of {found.get('function')} ({found.get('line')})"
    is_called = isinstance(found, Mapping) and found.get("key") == "called_with"
    return "what the model was called with" if is_called else str(found)


def _tensors(found: Mapping[str, Any]) -> str:
    names = [str(one["name"]) for one in _tables(found.get("first")) if "name" in one]
    more = f": {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" if names else ""
    return f"{found.get('nonfinite')} of {found.get('of')} tensors are not finite{more}"


def _tables(value: Any) -> list[Mapping[str, Any]]:
    """Those in a list; none where it is something else."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _plain_lines(evidence: Mapping[str, Any], leave: set[str]) -> Iterator[str]:
    for name, value in evidence.items():
        if name in _ELSEWHERE or name in leave or value is None or value in ({}, [], ""):
            continue
        words = _value(name, value)
        if words:
            yield f"{_of_whole_run(name, evidence) if name in _WHOLE_RUN else _label(name)}: {words}"


def _of_whole_run(name: str, evidence: Mapping[str, Any]) -> str:
    rank = evidence.get("wall_time_rank")
    return f"{_WHOLE_RUN[name]} of the whole run{'' if rank is None else f' on rank {rank}'}"


def _label(name: str) -> str:
    suffix = next((suffix for suffix, unit in _SUFFIXES.items() if unit == _unit(name)), "")
    return name.removesuffix(suffix).replace("_", " ")


def _words(table: Mapping[str, Any], unit_of: str = "") -> str:
    return ", ".join(
        f"{_label(str(name))} {_value(unit_of or str(name), value)}"
        for name, value in table.items()
        if value is not None
    )


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, (int, float)) or value in _SPELLED:
        unit = _unit(name)
        return f"{value:,}" if isinstance(value, int) and not unit else quantity(from_json(value), unit)
    if isinstance(value, Mapping):
        return _words(value, "_bytes" if name in _BYTES else name if _unit(name) else "")
    if isinstance(value, list):
        return _list(name, value)
    return " ".join(str(value).split())


def _unit(name: str) -> str:
    """Of `peak_bytes_by_rank` and `bytes_per_s` bytes, too."""
    if "bytes" in name.split("_"):
        return "B"
    return next((unit for suffix, unit in _SUFFIXES.items() if name.endswith(suffix)), "")


def _list(name: str, values: list[Any]) -> str:
    if any(isinstance(value, (Mapping, list)) for value in values):
        return "; ".join(_value(name, value) for value in values[:3]) + (" ..." if len(values) > 3 else "")
    figures = all(isinstance(value, (int, float)) or value in _SPELLED for value in values)
    cut = "... " if figures and len(values) > _NEWEST else ""
    shown = values[-_NEWEST:] if cut else values
    return cut + (", " if figures else "; ").join(_value(name, value) for value in shown)
