"""One run as the sections of a page. Pure: the server's answers go in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perfagent.command_line.terminal_output import Line, Table
from perfagent.wire import CATALOGUE, FAMILIES, Finding, Latest, Series, Spent, Timing, metric
from perfagent.wire.configuration import by_use
from perfagent.wire.quantities import duration, figure, quantity, some
from perfagent_client.evidence import evidence_lines, traceback_lines
from perfagent_client.models import RunDetails
from perfagent_client.page import Section
from perfagent_client.sparkline import sparkline
from perfagent_client.spent import amounts, money, took_s
from perfagent_client.techniques import sentences
from perfagent_client.timing_table import about_figures, part_of_step, timing_head, timing_rows

__all__ = ["Facts", "sections"]

Wrap = Callable[[str, int, int], list[str]]
"""A text, the blanks in front of it, and those more in front of its further lines -> lines that fit."""

_CELL = 36
"""Of a grid of figures, two beside each other in 80 columns."""
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
_TRACEBACK = 8
_EVIDENCE = 12
"""Lines, unless all is shown."""


@dataclass(slots=True)
class Facts:
    """What the server answered about a run. losses: the series of its loss over the whole run; address: of its page."""

    run: RunDetails
    verdict: Finding
    findings: Sequence[Finding]
    latest: Mapping[str, Latest]
    timing: Timing
    losses: Series | None = None
    address: str = ""


def sections(facts: Facts, wrap: Wrap, *, everything: bool = False, bars: bool = True) -> list[Section]:
    """The whole page. everything: per layer and raw as well. bars: whether the stream can write the blocks of a small
    curve."""
    found = [
        _head(facts, wrap),
        _verdict(facts, wrap, everything=everything),
        _progress(facts, wrap, bars=bars),
        _steps(facts),
        _grid("GPU", _gpu(facts.latest), least=3, gives_way=4),
        _grid("HOST AND PROCESS (newest)", _machine(facts.latest), least=3, gives_way=5),
        _grid("GRADIENTS AND MEMORY OF THE MODEL (newest)", _model(facts.latest), least=2, gives_way=6),
        _grid("LOGGED BY THE SCRIPT (newest)", _logged(facts.latest), least=2, gives_way=7),
        _configuration(facts.run, wrap, everything=everything),
    ]
    if everything:
        found += [_layers(facts.latest), _raw(facts.latest)]
    return [section for section in found if section.parts]


# --------------------------------------------------------------------------------------------------- run and verdict


def _head(facts: Facts, wrap: Wrap) -> Section:
    run = facts.run
    started = run.started[:19].replace("T", " ")
    took = took_s(run)
    how_long = f"{'took' if run.ended else 'for'} {duration(took)}"
    state = f"{run.state}{': ' + run.reason if run.reason else ''}"
    ranks = f", {run.world_size} ranks" if run.world_size > 1 else ""
    attempts = f", attempt {run.attempts}" if run.attempts > 1 else ""
    lines = [Line(f"{run.name}  ({run.project}, {run.run})", "bold")]
    lines += [Line(text) for text in wrap(f"{state}, step {run.step:,}{ranks}{attempts}", 0, 2)[:3]]
    lines += [Line(f"started {started} UTC{', ' + how_long if took else ''}{f', on {run.host}' if run.host else ''}")]
    if spent := _spent(run.spent):
        lines += [Line(text) for text in wrap(spent, 0, 2)]
    for what, told in run.left_out.items():
        kind = "metric names" if what == "names" else what
        more = "" if told.get("exact") else ", or more,"
        text = f"{told['count']:,} {kind} of this run{more} were left out: the limit is {told['limit']:,}"
        lines += [Line(folded, "yellow") for folded in wrap(text, 0, 2)]
    if facts.address:
        lines.append(Line(facts.address, "blue"))
    if run.notes:
        lines += [Line(text) for text in wrap(run.notes, 0, 0)[:3]]
    return Section("", list(lines), least=len(lines))


def _spent(spent: Spent) -> str:
    """`took 3.2 GPU hours, 1.1 kWh, 0.4 J a token; cost 9.80 EUR, 3.10 EUR an hour`."""
    took, cost = ", ".join(amounts(spent)), money(spent)
    return f"took {took}; cost {cost}" if cost else f"took {took}" if took else ""


def _verdict(facts: Facts, wrap: Wrap, *, everything: bool) -> Section:
    """The verdict and what to do, the other findings by their sentences, and then what the verdict rests on."""
    verdict, others = facts.verdict, [finding for finding in facts.findings if finding.rule != facts.verdict.rule]
    section = Section("VERDICT", least=10, gives_way=1)
    section.parts += _sentence(verdict, wrap)
    if verdict.money_per_hour is not None:
        section.parts += [Line(text) for text in wrap(f"Costs: {verdict.cost}", 4, 2)]
    if verdict.fix:
        section.parts += [Line(text) for text in wrap(f"Fix: {verdict.fix}", 4, 2)]
    for finding in others:
        section.parts += _sentence(finding, wrap)
        if everything and finding.fix:
            section.parts += [Line(text) for text in wrap(f"Fix: {finding.fix}", 4, 2)]
    said = {finding.message for finding in others}
    section.parts += _grounds(verdict, wrap, everything=everything, leave=said)
    for finding in others if everything else ():
        section.parts += _grounds(finding, wrap, everything=True, leave=set())
    return section


def _sentence(finding: Finding, wrap: Wrap) -> list[Line]:
    since = f" (since step {finding.since_step:,})" if finding.since_step is not None else ""
    ranks = f" (ranks {', '.join(map(str, finding.ranks[:8]))})" if len(finding.ranks) > 1 else ""
    is_well = finding.rule == "healthy" and finding.is_judged
    style = "green" if is_well else _STYLES.get(finding.severity, "")
    text = f"[{finding.severity}] {finding.rule if finding.is_judged else 'unknown'}: {finding.message}{since}{ranks}"
    return [Line(folded, style) for folded in wrap(text, 0, 4)]


def _grounds(finding: Finding, wrap: Wrap, *, everything: bool, leave: set[str]) -> list[Line]:
    """The end of its traceback, and its evidence."""
    lines = [Line(f"    | {text}", "dim") for text in traceback_lines(finding, None if everything else _TRACEBACK)]
    shown = []
    for text in evidence_lines(finding, everything=everything):
        if not any(message in text for message in leave):
            indent = 6 + len(text) - len(text.lstrip())
            shown += [Line(folded, "dim") for folded in wrap(text.lstrip(), indent, 2)]
    if shown and finding.rule != "healthy":
        left = shown if everything or len(shown) <= _EVIDENCE else shown[: _EVIDENCE - 1]
        lines += [Line(f"    Evidence of {finding.rule}:"), *left]
        lines += (
            [Line(f"      ... {some(len(shown) - len(left), 'more line')}: --all", "dim")] if left is not shown else []
        )
    return lines


# ----------------------------------------------------------------------------------------------- progress and timing


def _progress(facts: Facts, wrap: Wrap, *, bars: bool) -> Section:
    section = Section("PROGRESS", least=3, gives_way=2)
    losses, latest = facts.losses, facts.latest
    if losses is not None and losses.step:
        section.parts += [Line(text) for text in wrap(_loss_in_words(losses, latest), 2, 2)]
        if bars and len(losses.step) > 1:
            section.parts.append(
                Line(f"  {sparkline(losses.mean)}  steps {losses.step[0]:,} to {latest[losses.name].step:,}")
            )
    timing = facts.timing
    rates = [_named(name, timing.rates[name].p50) for name in _RATES if name in timing.rates]
    if rates:
        section.parts += [Line(text) for text in wrap(f"median of {timing.window}: {', '.join(rates)}", 2, 2)]
    newest = [_named(name, latest[name].value) for name in _OF_THE_OPTIMIZER if name in latest]
    if newest:
        section.parts += [Line(text) for text in wrap(f"newest: {', '.join(newest)}", 2, 2)]
    return section


_RATES = ("samples_per_s", "tokens_per_s", "mfu", "flops_per_s")
_OF_THE_OPTIMIZER = ("lr", "amp/scale", "amp/skipped")


def _named(name: str, value: float) -> str:
    """With its title, where the unit does not say what it is."""
    return figure(name, value) if "/s" in metric(name).unit else f"{metric(name).title} {figure(name, value)}"


def _loss_in_words(losses: Series, latest: Mapping[str, Latest]) -> str:
    newest = latest[losses.name]
    text = f"{losses.name} {quantity(newest.value, '')} in step {newest.step:,} (newest)"
    finite = [
        (low, step, mean) for low, step, mean in zip(losses.min, losses.step, losses.mean, strict=True) if low == low
    ]
    if finite:
        first, lowest = finite[0], min(finite)
        start = f"in step {first[1]:,}" if losses.exact else f"the mean of the first {losses.bucket_steps:,} steps"
        text += f", {quantity(first[2], '')} {start}, lowest {quantity(lowest[0], '')}"
    bad = sum(losses.nonfinite)
    return text + (f", {some(bad, 'value')} not finite" if bad else "")


def _steps(facts: Facts) -> Section:
    """A line a phase, the longest first, each column named for what it is."""
    timing = facts.timing
    section = Section("WHERE A STEP GOES", least=5, gives_way=3)
    if timing.series:
        rows = [(part_of_step(name), *row) for name, *row in timing_rows(timing, facts.latest)]
        section.parts.append(Table(timing_head(timing), rows, right=range(1, 7), indent=2))
        section.parts += [Line(f"  ({note})", "dim") for note in [about_figures(timing, facts.run.world_size)] if note]
    return section


# --------------------------------------------------------------------------------------------------- figures in a grid


def _grid(title: str, cells: Sequence[tuple[str, str]], *, least: int, gives_way: int) -> Section:
    """Two figures a line, where both fit."""
    lines: list[str] = []
    has_room = False  # beside the last one
    for text in (f"{name} {value}" for name, value in cells):
        fits = len(text) <= _CELL
        if has_room and fits:
            lines[-1] = f"{lines[-1].ljust(_CELL)} {text}"
        else:
            lines.append(text)
        has_room = fits and not has_room
    return Section(title, [Line(f"  {line}") for line in lines], least=least, gives_way=gives_way)


def _cells(latest: Mapping[str, Latest], wanted: Iterable[str]) -> list[tuple[str, str]]:
    """(title, value) of those that are there; `a/b` is written as "a of b", of memory and its size."""
    cells = []
    for name in (one for one in wanted if one in latest):
        of = _WHOLES.get(name, "")
        whole = f" of {figure(of, latest[of].value)}" if of in latest else ""
        cells.append((metric(name).title, figure(name, latest[name].value) + whole))
    return cells


_WHOLES = {
    "gpu/memory_used_bytes": "gpu/memory_total_bytes", "gpu/power_w": "gpu/power_limit_w",
    "host/memory_used_bytes": "host/memory_total_bytes",
}  # fmt: skip
_GPU = (
    "gpu/utilization_pct", "gpu/memory_used_bytes", "gpu/power_w", "gpu/temperature_c", "cuda/allocated_bytes",
    "cuda/peak_allocated_bytes", "cuda/reserved_bytes", "cuda/headroom_bytes", "cuda/fragmentation", "gpu/sm_active_pct",
    "gpu/tensor_active_pct", "gpu/sm_clock_mhz",
)  # fmt: skip
_MACHINE = (
    "host/cpu_pct", "host/cores", "process/cpu_pct", "host/load1", "host/memory_used_bytes", "process/rss_bytes",
    "host/cpu_pressure_pct", "host/iowait_pct", "process/workers", "process/workers_cpu_pct", "disk/work_free_bytes",
    "agent/overhead_pct",
)  # fmt: skip
_MODEL = (
    "grad/norm", "update/ratio", "grad/zero_share", "grad/vanishing_share", "dead/share", "memory/parameters_bytes",
    "memory/gradients_bytes", "memory/optimizer_state_bytes", "memory/activations_and_other_bytes",
)  # fmt: skip
_TROUBLE = (
    "gpu/throttle_", "gpu/ecc_uncorrected", "gpu/xid", "gpu/remap", "gpu/other_processes", "cuda/alloc_retries", "cuda/ooms",
    "host/oom_kills", "host/cpu_throttled_pct",
    "host/memory_pressure_pct", "grad/nonfinite", "agent/dropped", "sync/calls_per_step",
)  # fmt: skip
"""Shown where they are not 0."""


def _trouble(latest: Mapping[str, Latest], *groups: str) -> list[str]:
    return [
        name
        for name in CATALOGUE
        if name in latest and name.startswith(groups) and name.startswith(_TROUBLE) and latest[name].value
    ]


def _gpu(latest: Mapping[str, Latest]) -> list[tuple[str, str]]:
    others = sorted({name.partition("/")[0] for name in latest if name.startswith("node_gpu")})
    has_gpu = any(name.startswith(("gpu/", "cuda/")) for name in latest)
    cells = _cells(latest, (*_GPU, *_trouble(latest, "gpu/", "cuda/", *(("sync/",) if has_gpu else ()))))
    for other in others:
        busy, memory = latest.get(f"{other}/utilization_pct"), latest.get(f"{other}/memory_used_bytes")
        facts = [figure("gpu/utilization_pct", busy.value)] if busy else []
        facts += [figure("gpu/memory_used_bytes", memory.value)] if memory else []
        cells.append((other, ", ".join(facts)))
    return cells


def _machine(latest: Mapping[str, Latest]) -> list[tuple[str, str]]:
    return _cells(latest, (*_MACHINE, *_trouble(latest, "host/", "agent/")))


def _model(latest: Mapping[str, Latest]) -> list[tuple[str, str]]:
    """And of each family of layers the largest one, which is what a look at all of them is for."""
    cells = _cells(latest, (*_MODEL, *_trouble(latest, "grad/")))
    for family in ("grad_norm/", "update_ratio/", "module_share/"):
        layers = {name: item.value for name, item in latest.items() if name.startswith(family)}
        finite = {name: value for name, value in layers.items() if value == value}
        if len(layers) > 1 and finite:
            name = max(finite, key=lambda name: finite[name])
            title, layer = FAMILIES[family].title.lower(), name.partition("/")[2]
            cells.append(
                (f"Largest {title}:", f"{figure(name, finite[name])} in {layer}, of {some(len(layers), 'layer')}")
            )
    return cells


def _logged(latest: Mapping[str, Latest]) -> list[tuple[str, str]]:
    newest_first = sorted(
        (name for name in latest if metric(name).is_logged), key=lambda name: (-latest[name].step, name)
    )
    return [(name, f"{quantity(latest[name].value, '')} (step {latest[name].step:,})") for name in newest_first]


# --------------------------------------------------------------------------------------------- configuration, and all


def _configuration(run: RunDetails, wrap: Wrap, *, everything: bool) -> Section:
    section = Section("CONFIGURATION", least=4, gives_way=8)
    techniques = sentences(run.config)
    config = {name: value for name, value in by_use(run.config).items() if name != "techniques"}
    own = ", ".join(f"{name} {_short(value)}" for name, value in config.items() if not isinstance(value, dict))
    lines = [f"of the script: {own}"] if own else []
    lines += [
        f"{name}: {_settings(value, everything=everything)}"
        for name, value in config.items()
        if isinstance(value, dict)
    ]
    lines += techniques
    meta = run.meta
    command, git = meta.get("command"), meta.get("git")
    made = [f"torch {meta['torch']}"] if meta.get("torch") else []
    made += [f"Python {meta['python']}"] if meta.get("python") else []
    if isinstance(git, dict) and git.get("commit"):
        made.append(f"commit {str(git['commit'])[:12]}{' with changes' if git.get('dirty') else ''}")
    lines += [", ".join(made)] if made else []
    lines += [f"command: {' '.join(map(str, command))}"] if isinstance(command, list) else []
    for line in lines:
        folded = wrap(line, 2, 2)
        section.parts += [Line(text) for text in (folded if everything else folded[:2])]
    return section


_COMPARED = ("class", "parameters", "trainable_parameters", "lr", "betas", "momentum", "weight_decay", "fused")


def _settings(table: Mapping[str, object], *, everything: bool) -> str:
    """Of an optimizer's settings those that somebody compares; of other tables all that are no tables themselves."""
    chosen = {
        name: value
        for name, value in table.items()
        if everything or (value is not None and not isinstance(value, dict))
    }
    if "class" in table and not everything:
        chosen = {name: value for name, value in chosen.items() if name in _COMPARED}
    return ", ".join(
        _short(value) if name == "class" else f"{name.replace('_', ' ')} {_short(value)}"
        for name, value in chosen.items()
    )


def _short(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())[:60]


def _layers(latest: Mapping[str, Latest]) -> Section:
    """A row a layer, a column a family."""
    section = Section("LAYERS (newest)")
    families = [family for family in FAMILIES if any(name.startswith(family) for name in latest)]
    layers = list(
        dict.fromkeys(name.partition("/")[2] for family in families for name in latest if name.startswith(family))
    )
    if layers:
        newest = {name: figure(name, one.value) for name, one in latest.items()}
        rows = [
            (layer, *(newest.get(family + layer, "") for family in families)) for layer in sorted(layers, key=_natural)
        ]
        head = ("layer", *(FAMILIES[family].title.lower() for family in families))
        section.parts.append(Table(head, rows, right=range(1, len(head)), indent=2))
    return section


def _natural(layer: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in layer.split(".")]


def _raw(latest: Mapping[str, Latest]) -> Section:
    section = Section("RAW VALUES (newest)")
    rows = [
        (name, f"{item.value:.6g}", metric(name).unit, f"{item.step:,}", str(item.rank))
        for name, item in sorted(latest.items())
    ]
    if rows:
        section.parts.append(Table(("name", "value", "unit", "step", "rank"), rows, right=(1, 3, 4), indent=2))
    return section
