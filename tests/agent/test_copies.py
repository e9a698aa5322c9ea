"""A run among what a script copies and sends to its workers: in a trainer, a module, a dataset."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording

import perfagent


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = perfagent.init(record=tmp_path / "record")
    yield run
    perfagent.finish()


class Trainer:
    def __init__(self, run: Any) -> None:
        self.run, self.weights = run, [1.0]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_what_holds_the_run_holds_the_same_run(run: Any, duplicate: Any, tmp_path: Path) -> None:
    again = duplicate(Trainer(run))
    assert again.run is run
    del again
    gc.collect()
    run.log({"x": 1.0}, step=1)
    perfagent.finish()
    recording = Recording(tmp_path / "record")
    assert recording.series("x") == [(1, 1.0)]
    assert not recording.series("agent/dropped")
