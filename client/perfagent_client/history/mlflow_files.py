"""Runs of MLflow's folder `mlruns/`: EXPERIMENT/RUN/{meta.yaml, metrics/KEY, params/KEY, tags/KEY}, where a `/` in a key is a
folder (mlflow/store/tracking/file_store.py). A line of a metric is `milliseconds value step`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from perfagent.wire.quantities import some
from perfagent_client.history.left_out import cut
from perfagent_client.history.mlflow_run import old_run, seconds
from perfagent_client.history.old_run import OldRun, Source

__all__ = ["sources"]

_META, _STAGE = "meta.yaml", "lifecycle_stage"
_STATES = {"1": "RUNNING", "3": "FINISHED", "4": "FAILED", "5": "KILLED"}
_LARGEST_STEP = 2**63 - 1


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    """The folder of an experiment, with all below it, or that of one run."""
    if folder / _META not in files:
        return
    about = _flat_yaml(folder / _META)
    inside = tuple(sorted(one for one in folder.iterdir() if one.is_dir()))
    if _id(about):
        yield Source("mlflow", (folder / _META, *inside), partial(_runs, folder.parent, [folder]))
    elif "experiment_id" in about:
        yield Source("mlflow", (folder / _META, *inside), partial(_runs, folder, inside))


def _runs(experiment: Path, folders: Sequence[Path]) -> Iterator[OldRun]:
    of_experiment = _flat_yaml(experiment / _META)
    found, closed = _all_about(folders)
    alive = [one for one in found if "deleted" not in (of_experiment.get(_STAGE), one[1].get(_STAGE))]
    names = {_id(about): about.get("run_name") or _text(folder / "tags" / "mlflow.runName") for folder, about in found}
    deleted = len(found) - len(alive)
    project = of_experiment.get("name", experiment.name)
    for folder, about in alive:
        try:
            run = _run(folder, about, project, names)
        except OSError as error:
            closed.append(error)
            continue
        if deleted:
            run.left_out.append(f"{some(deleted, 'run')} of the same experiment, deleted in MLflow")
            deleted = 0
        yield run
    if closed:
        raise closed[0]


def _all_about(folders: Sequence[Path]) -> tuple[list[tuple[Path, dict[str, str]]], list[OSError]]:
    """Each run with what its file says of it; and why others cannot be read."""
    found, closed = [], []
    for folder in folders:
        try:
            about = _flat_yaml(folder / _META)
        except OSError as error:
            closed.append(error)
            continue
        if _id(about):
            found.append((folder, about))
    return found, closed


def _run(folder: Path, about: dict[str, str], project: str, names: dict[str, str]) -> OldRun:
    config, tags = _texts(folder / "params"), _texts(folder / "tags")
    run = old_run(_id(about), project, _STATES.get(about.get("status", ""), ""), config, tags, names)
    run.started, run.ended = (_time(about.get(key, "")) for key in ("start_time", "end_time"))
    for key, file in _files(folder / "metrics"):
        _read_metric(run, key, file)
    if artifacts := len(_files(folder / "artifacts")):
        run.left_out.append(some(artifacts, "artifact"))
    return run


def _read_metric(run: OldRun, key: str, file: Path) -> None:
    """A last line without its end is left out: what is there of a number may be another number."""
    *lines, rest = file.read_bytes().split(b"\n")
    odd = 0
    for line in lines:
        try:
            time, value, *more = line.split()
            step = int(more[0]) if more else 0  # MLflow before 1.0 knew no steps
            if not 0 <= step <= _LARGEST_STEP:
                raise ValueError
            run.add(key, step, float(value), math.nan if (when := seconds(int(time))) is None else when)
        except ValueError:
            odd += bool(line.strip())
    if odd:
        run.left_out.append(f"{some(odd, 'line')} of {key} at steps below 0, or damaged")
    if rest:
        run.left_out.append(cut(file, len(rest)))


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((file.relative_to(folder).as_posix(), file) for file in folder.rglob("*") if file.is_file())


def _texts(folder: Path) -> dict[str, str]:
    return {key: _text(file) for key, file in _files(folder)}


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace") if file.is_file() else ""


def _id(about: dict[str, str]) -> str:
    return about.get("run_id") or about.get("run_uuid", "")


def _time(milliseconds: str) -> float | None:
    return seconds(int(milliseconds)) if milliseconds.isascii() and milliseconds.isdigit() else None


def _flat_yaml(file: Path) -> dict[str, str]:
    """What MLflow writes: one key a line; a text that is longer than 80 characters goes on in lines that are set in."""
    return {
        key: _scalar(text.strip()) for key, text in re.findall(r"^(\S+):(.*(?:\n +.*)*)", _text(file), re.MULTILINE)
    }


def _scalar(text: str) -> str:
    if text[:1] == '"':
        with suppress(SyntaxError, ValueError):
            return str(ast.literal_eval(re.sub(r"\n +", " ", re.sub(r"\\\n +\\?", "", text))))
    text = re.sub(r"\n +", " ", text)
    if text[:1] == "'":
        return text[1:-1].replace("''", "'")
    return "" if text == "null" else text
