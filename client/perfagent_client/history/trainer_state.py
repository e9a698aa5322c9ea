"""Reads `trainer_state.json` of the Transformers Trainer, whose `log_history` holds every logged row.

Each checkpoint of an output folder has such a file, with all rows so far. The file with the most steps counts.
https://huggingface.co/docs/transformers/main_classes/callback#transformers.TrainerState
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from perfagent.wire.quantities import some
from perfagent_client.history.left_out import counted
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.history.rows import add_row, objects

__all__ = ["sources"]

_NAME = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
_ROWS = re.compile(r'"log_history"\s*:\s*\[')
_SETTINGS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")
_FACTS = ("total_flos", "num_input_tokens_seen", "best_metric", "best_model_checkpoint", "global_step")


def sources(folder: Path, files: Sequence[Path]) -> Iterator[Source]:
    own = [file for file in files if file.name == _NAME]
    below = [] if _CHECKPOINT.search(folder.name) else [one / _NAME for one in folder.glob("checkpoint-*")]
    states = own + sorted((file for file in below if file.is_file()), key=_steps_of, reverse=True)
    if states:
        yield Source("trainer_state", tuple(states), partial(_read, states))


def _steps_of(file: Path) -> int:
    found = _CHECKPOINT.search(file.parent.name)
    return int(found[1]) if found else 0


def _read(states: Sequence[Path]) -> Iterator[OldRun]:
    """The folder's own file, and the newest checkpoint's: whichever has more; older ones where neither is whole."""
    own = [file for file in states if not _steps_of(file)]
    read = [_State(file) for file in own]
    for file in states[len(own) :]:
        read.append(_State(file))
        if read[-1].is_whole:
            break
    best = max(read, key=lambda one: (one.newest, one.is_whole))
    yield best.run(own[0] if own else states[0])


class _State:
    """A file, as far as it is whole. damage: a sentence on the rest."""

    def __init__(self, file: Path) -> None:
        self.file, self.damage = file, ""
        self.rows: list[Any] = []
        self.facts: dict[str, Any] = {}
        text = file.read_bytes().decode("utf-8", "replace")
        try:
            self.facts = json.loads(text)
            rows = self.facts.pop("log_history")
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            self.facts = {}
            self._read_rows(text)
            return
        if isinstance(rows, list):
            self.rows = rows
        else:
            self.damage = f"{file.name} has no rows: log_history is no list"

    @property
    def is_whole(self) -> bool:
        return not self.damage

    @property
    def newest(self) -> int:
        """The step of its newest row."""
        return max((step for row in self.rows if (step := _step(row)) is not None), default=-1)

    def _read_rows(self, text: str) -> None:
        begin = _ROWS.search(text)
        self.rows, at = objects(text, begin.end()) if begin else ([], 0)
        left = len(text[at:].encode())
        self.damage = f"{self.file.name} is cut or damaged: its last {some(left, 'byte')} could not be read"

    def run(self, file: Path) -> OldRun:
        folder = file.parent.parent if _CHECKPOINT.search(file.parent.name) else file.parent
        run = OldRun(f"trainer_state:{folder.resolve()}", folder.resolve().name, state=self._state())
        run.config = {key: self.facts[key] for key in _SETTINGS if key in self.facts}
        run.meta = {"library": "transformers", **{key: self.facts[key] for key in _FACTS if key in self.facts}}
        others: Counter[str] = Counter()
        for row in self.rows:
            step = _step(row)
            if step is None:
                others["rows without a step"] += 1
            else:
                add_row(run, step, ((name, value) for name, value in row.items() if name != "step"), others)
        run.left_out = counted(others) + ([self.damage] if self.damage else [])
        return run

    def _state(self) -> Literal["", "finished"]:
        last = self.rows[-1] if self.rows and isinstance(self.rows[-1], dict) else {}
        return "finished" if "train_runtime" in last else ""


def _step(row: Any) -> int | None:
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int and 0 <= step < 2**53 else None
