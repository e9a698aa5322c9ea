"""Reads what trainers print: Transformers, torchtitan, nanoGPT, Megatron, Keras, Coqui, and any lines of `name value`.

A line is read if other lines have the same names, and one of the names is a loss. Its step is in the line, or in the progress bar
before it; otherwise the lines are numbered. These formats are defined only by the code that prints them:
https://github.com/pytorch/torchtitan (torchtitan/components/metrics.py), https://github.com/karpathy/nanoGPT (train.py),
https://github.com/coqui-ai/Trainer (trainer/logging/console_logger.py), https://github.com/keras-team/keras (progbar.py).
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from perfagent_client.history.console import lines_of, unlabelled
from perfagent_client.history.endings import ending
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.rows import head_of, named, number, pieces, whole_step

__all__ = ["is_progress", "sources"]

_NO_LOGS = frozenset((
    ".py", ".pyi", ".ipynb", ".md", ".rst", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".sh", ".c", ".h", ".cc",
    ".cpp", ".cu", ".cuh", ".rs", ".go", ".js", ".ts", ".html", ".css", ".xml", ".svg", ".sql", ".lock", ".csv", ".tsv", ".jsonl",
    ".ndjson", ".bat", ".ps1", ".j2", ".jinja", ".template", ".model", ".vocab", ".merges", ".patch", ".diff", ".tex", ".bib",
))  # fmt: skip
_HEAD_BYTES = 1 << 12
_CONSOLE_LINES, _LONGEST_LINE = 2000, 10_000
_FEWEST, _FEWEST_BESIDE = 3, 2
"""Lines of one shape that are believed, and of another one beside such lines (an evaluation)."""

_NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})++(?:\.\d++)?|\d++(?:\.\d*+)?(?:e[-+]?\d++)?|\.\d++(?:e[-+]?\d++)?|nan|inf(?:inity)?)"
)
_COUNT = r"\d{1,15}"
_PAIR = re.compile(
    r"(?<![\w.+])(?P<name>[A-Za-z_][\w./@-]*(?: [A-Za-z_][\w./@-]*){0,4})(?P<unit>\s?\((?:ms|s|%)\))?"
    rf"(?:[ ]*[:=]\s*|\s+|(?=\[))(?:\[\s*|tensor\()?(?P<value>{_NUMBER})"
    rf"(?:\s?/\s?(?P<total>{_COUNT}))?(?P<after>ms|s|%|[KMGT]i?B|it/s)?"
    r"(?![\w:/]*\d)(?!\.?[A-Za-z_])",
    re.IGNORECASE,
)
_DICT = re.compile(r"\{'[\w./@-]+': [^{}]*\}")
_ENTRY = re.compile(r"'([\w./@-]+)': '?([^,'}]+)")
_BAR = re.compile(r"(\d{1,15})/\d+ \[\d+:\d\d")
_INNER = re.compile(
    r"(?:\b(?P<word>[A-Za-z]+)(?:\s?\((?P<mode>\w+)\))?:?\s*(?:\[?(?P<epoch>\d{1,7})\]?\s*)?)?"
    r"\[\s*(?P<at>\d{1,15})/\s*(?P<of>\d{1,15})[ \](]"
)
"""A batch of an epoch, as timm (`Train: 0 [50/1251`), mmengine (`Epoch(train) [1][50/500]`) and PyTorch's examples print it."""
_EVALUATIONS = frozenset(("test", "val", "valid", "validation", "eval", "evaluation"))
_BESIDE = re.compile(r"\.(?:py|cc|cpp|cu|h):\d+|:[\w.<>]+:\d+ - |(?:DEBUG|INFO|WARN|WARNING|ERROR)\b")
"""What loggers put before a line: a place in a file, a level."""
_KERAS_EPOCH = re.compile(r"^Epoch (\d{1,15})/\d+$")
_KERAS = re.compile(r"^(\d+)/(\d+)\b.* - ")
_COQUI_STEP = re.compile(r"-->.*\bGLOBAL_STEP: (\d{1,15})")
_COQUI_EVALUATION = re.compile(r"--> EVAL(UATION)? PERFORMANCE|> EVALUATION")
_COQUI_VALUE = re.compile(rf"\|\s*> ([\w./-]+):\s*({_NUMBER})", re.IGNORECASE)
_STEP_WORDS = ("global_step", "step", "iteration", "iter", "iters", "it", "steps", "update", "num_updates", "batch")
_BESIDE_STEP = frozenset(("info", "root", "train", "training", "trainer", "at", "current", "in"))
"""Words that loggers and sentences put before it."""
_NO_VALUES = frozenset(("pid", "rank", "local_rank", "seed", "eta"))
_STEP_TIMES = frozenset(("time", "dt", "step_time", "iter_time", "elapsed_time_per_iteration"))


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:  # noqa: ARG001 - as all readers
    for file in files:
        if named(file).suffix.lower() not in _NO_LOGS and _is_text(file):
            yield Source("printed", (file,), partial(_read, file))


def _is_text(file: Path) -> bool:
    head = head_of(file, _HEAD_BYTES)
    return bool(head) and not head.startswith(b"#!") and not re.search(rb"[\x00-\x06\x0e-\x1a\x7f]", head)


def is_progress(line: str) -> bool:
    """Whether a line looks like a step of a training that goes on."""
    return len(line) <= _LONGEST_LINE and "loss" in line.lower() and _row(line) is not None


@dataclass(slots=True)
class _Row:
    """One printed line. shape: the names in it; step: the step in it; epoch, total: set if each epoch counts its steps from the
    start; kind: "dict", "keras", "coqui", "batch" (of an epoch), or "" for pairs; before, after: the count of the progress bar
    before this line and after it."""

    shape: frozenset[str]
    values: Mapping[str, float]
    step: int | None = None
    epoch: float | None = None
    total: int | None = None
    kind: str = ""
    before: int | None = None
    after: int | None = None


def _read(file: Path) -> Iterator[OldRun]:
    run = OldRun(f"printed:{file.resolve()}", named(file).stem)
    console = deque[str](maxlen=_CONSOLE_LINES)
    rows = _believed(list(_rows(lines_of(pieces(file, run.left_out)), console)))
    run.console = [*console]
    _take_steps_of_bars(rows)
    _add(run, rows)
    end = ending(run.console, is_progress)
    if end is not None:
        run.state = "failed"
    if rows or end is not None:
        yield run


# ---- lines


def _rows(lines: Iterable[str], console: deque[str]) -> Iterator[_Row]:
    bar: int | None = None
    waiting: _Row | None = None  # for the bar that is drawn anew below it
    first_label: str | None = None
    shapes: dict[frozenset[str], frozenset[str]] = {}  # one of each, however many rows have it
    keras_epoch, coqui = 0, ""
    coqui_step = 0
    for line in lines:
        console.append(line)
        if len(line) > _LONGEST_LINE:
            continue
        if "/" in line and (drawn := _BAR.search(line)):
            bar = int(drawn[1])
            if waiting is not None:
                waiting.after, waiting = bar, None
        if "GLOBAL_STEP" in line and (header := _COQUI_STEP.search(line)):
            coqui, coqui_step = "train", int(header[1])
        elif "EVAL" in line and _COQUI_EVALUATION.search(line):
            coqui = "eval" if coqui else ""
        elif coqui and "| >" in line.replace("|  >", "| >"):
            if value := _COQUI_VALUE.search(line):
                name = value[1] if coqui == "train" else f"eval_{value[1]}"
                yield _Row(frozenset((name,)), {name: _number(value[2])}, coqui_step, kind="coqui")
        elif keras := _KERAS_EPOCH.match(line):
            keras_epoch = int(keras[1])
        elif "loss" in line.lower() or "'eval_" in line:
            label, text = unlabelled(line)
            row = _row(text, keras_epoch)
            if row is None:
                continue
            first_label = label if first_label is None else first_label
            if label != first_label:
                continue  # another rank prints the same
            if row.kind == "dict" and row.step is None and "loss" in row.values:
                row.before, waiting = bar, row
            row.shape = shapes.setdefault(row.shape, row.shape)
            yield row


def _row(line: str, keras_epoch: int = 0) -> _Row | None:
    if "{'" in line and (found := _DICT.search(line)):
        return _of_dict(found[0])
    keras = _KERAS.match(line) if keras_epoch else None
    if keras is not None and keras[1] != keras[2]:
        return None  # a bar in progress
    line = _BESIDE.sub(" | ", line)
    inner = _INNER.search(line) if "[" in line and "/" in line else None
    counted_by = inner.span() if inner and inner["epoch"] else (0, 0)
    values: dict[str, float] = {}
    step: tuple[int, int] | None = None  # (how sure, step)
    epoch = total = None
    for pair in _PAIR.finditer(line):
        if counted_by[0] <= pair.start("value") < counted_by[1]:
            continue
        name, value = pair["name"].strip(" .-"), _number(pair["value"])
        counts = "_".join(word for word in name.lower().split(" ") if word not in _BESIDE_STEP)
        if counts in _STEP_WORDS and not pair["unit"] and (counted := whole_step(value)) is not None:
            sure = _STEP_WORDS.index(counts)
            if step is None or sure < step[0]:
                step, total = (sure, counted), int(pair["total"]) if pair["total"] else None
        elif counts in ("epoch", "epochs", "ep"):
            epoch = value
        elif counts not in _NO_VALUES:
            values.setdefault(*_value(name, value, (pair["unit"] or pair["after"] or "").strip(" ()").lower()))
    if not any("loss" in name.lower() for name in values):
        return None
    if inner is not None and {str(inner[part]).lower() for part in ("word", "mode")} & _EVALUATIONS:
        values = {f"eval_{name}": value for name, value in values.items()}
        return _Row(frozenset(values), values)
    shape = frozenset((*values, "step" if step else "", "epoch" if epoch is not None else ""))
    if keras is not None:
        return _Row(shape, values, keras_epoch, kind="keras")
    if step is None and inner is not None:
        if inner["epoch"]:  # timm counts epochs from 0
            epoch = float(inner["epoch"]) + (inner["word"].lower() == "train")
        return _Row(shape, values, int(inner["at"]), epoch or 0.0, int(inner["of"]), "batch" if inner["epoch"] else "")
    if step is None:
        return _Row(shape, values, whole_step(epoch))
    return _Row(shape, values, step[1], epoch, total)


def _value(name: str, value: float, unit: str) -> tuple[str, float]:
    name = sys.intern(name.replace(" ", "_") + ("_pct" if unit == "%" else ""))
    if unit in ("ms", "s") and name.lower() in _STEP_TIMES and (unit == "ms" or name.lower() != "time"):
        return "step_time_s", value / 1000 if unit == "ms" else value
    return name, value


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _of_dict(text: str) -> _Row | None:
    """Transformers prints floats, and since its version 5 their texts."""
    values = {name: known for name, value in _ENTRY.findall(text) if (known := number(value)) is not None}
    if not any("loss" in name or name.startswith("eval_") for name in values):
        return None
    step = next(
        (found for name in ("step", "global_step") if (found := whole_step(values.pop(name, None))) is not None), None
    )
    return _Row(frozenset(values), values, step, kind="dict")


# ---- which are believed, and at which steps


def _believed(rows: list[_Row]) -> list[_Row]:
    counts = Counter(row.shape for row in rows if row.kind not in ("coqui", "dict"))
    dicts = [row for row in rows if row.kind == "dict"]
    coqui = Counter(row.shape for row in rows if row.kind == "coqui" and not next(iter(row.shape)).startswith("eval_"))
    least = _FEWEST_BESIDE if max([len(dicts), *counts.values()], default=0) >= _FEWEST else _FEWEST
    kept = {shape for shape, count in counts.items() if count >= least}
    has_coqui = max(coqui.values(), default=0) >= _FEWEST_BESIDE
    return [
        row
        for row in rows
        if row.shape in kept or (row.kind == "dict" and len(dicts) >= _FEWEST) or (row.kind == "coqui" and has_coqui)
    ]


def _take_steps_of_bars(rows: Sequence[_Row]) -> None:
    """tqdm writes a line above its bar, and draws the bar anew: that has the step. The one before may lag behind, but counts
    where each is as far from the last as the first from zero: then nothing was drawn anew."""
    waiting = [row for row in rows if row.kind == "dict" and row.step is None and "loss" in row.values]
    before = [row.before for row in waiting if row.before is not None]
    if before and before[0] > 0 and before == [before[0] * place for place in range(1, len(waiting) + 1)]:
        for row, step in zip(waiting, before, strict=True):
            row.step = step
    elif sum(row.after is not None for row in waiting) >= max(1, len(waiting) - 1):  # the very last may be cut off
        for row in waiting:
            row.step = row.after


def _add(run: OldRun, rows: Sequence[_Row]) -> None:
    """What says no step is of the newest one (an evaluation); where nothing says one, lines with a training loss are counted."""
    are_told = any(row.step is not None for row in rows)
    keras = {row.step or 0: row for row in rows if row.kind == "keras"}  # the last of an epoch has its evaluation
    step, position = 0, _Position()
    for row in rows:
        is_training = row.kind != "dict" or "loss" in row.values
        if row.kind == "keras" and keras[row.step or 0] is not row:
            continue
        if row.step is not None:
            step = position.of(row.step, row.epoch, row.total, is_batch=row.kind == "batch")
        elif is_training and row.kind == "dict" and are_told:
            run.left_out.append("a line whose step is cut off")
            continue
        elif not are_told:
            step += is_training
        for name, value in row.values.items() if step < 2**53 else ():
            run.add(name, step, value)
    if rows and not are_told:
        run.left_out.append("no line says its step: lines are counted")


@dataclass(slots=True)
class _Position:
    """Steps of the whole run, where a script counts them anew in each epoch."""

    offset: int = 0
    last: int = -1
    epoch: float = -math.inf
    first: int = 0

    def of(self, step: int, epoch: float | None, total: int | None, *, is_batch: bool) -> int:
        if is_batch and epoch is not None and total is not None:
            if self.last < 0:
                self.first = min(1, int(epoch))  # epochs are counted from 0, or from 1
            self.offset = max(0, int(epoch) - self.first) * total
        elif epoch is not None and epoch > self.epoch and step <= self.last:
            self.offset += self.last if total is None else total
        self.last, self.epoch = step, self.epoch if epoch is None else epoch
        return self.offset + step
