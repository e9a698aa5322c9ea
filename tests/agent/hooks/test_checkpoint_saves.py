"""Checkpoints are recognised where they are written, and are neither `other` nor part of the model's work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from agent.hooks.loops import about, sgd, step
from torch import nn
from torch import save as saved_by_name
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_by_name
from torch_versions import TORCH

from perfagent.samplers.folders import saved_to

NAP_S = 0.05
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


class Slow:
    """What takes its time to be pickled."""

    def __init__(self, clock) -> None:
        self.clock = clock

    def __reduce__(self):
        self.clock.sleep(NAP_S)
        return dict, ()


def train(save, steps=3):
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    for _ in range(steps):
        step(optimizer, model(torch.ones(2, 4)).square())
        save(model)


@pytest.mark.parametrize("how", ["by module", "by name", "by name, unzipped"])
def test_torch_save_is_a_phase_of_the_next_step_and_an_event(clock, record, tmp_path, how):
    recorded, path = record(), tmp_path / "model.pt"
    save, more = torch.save if how == "by module" else saved_by_name, {}
    if how == "by name, unzipped":
        more = {"_use_new_zipfile_serialization": False}
    train(lambda _: save(Slow(clock), path, **more))
    series, other = recorded.series("phase/checkpoint_s"), recorded.series("phase/other_s")
    sizes = {*recorded.series("checkpoint/file_bytes").values()}
    assert sizes == ({path.stat().st_size} if how != "by name" else set()), "the inner function has no path"
    assert [*series] == [2, 3]
    assert all(about(seconds, NAP_S) for seconds in series.values())
    assert all(other[number] < NAP_S for number in series)
    assert recorded.phases()[0] == ("checkpoint", 1)
    assert how != "by module" or saved_to[-1] == str(path)


@pytest.mark.parametrize("way", ["dcp", "dcp by name", "safetensors", "safetensors by name"])
def test_saves_of_other_libraries_are_checkpoints_once(record, tmp_path, way):
    """Those in which others are called, too."""
    if TORCH < (2, 11) and way.startswith("dcp"):
        pytest.skip("torch 2.10 has no such save by one process alone")
    safetensors = pytest.importorskip("safetensors.torch") if "safetensors" in way else None
    by_name = safetensors and safetensors.save_file
    recorded, path = record(), tmp_path / "saved"
    ways = {
        "dcp": lambda model: dcp.save({"w": model.weight}, checkpoint_id=path, no_dist=True),
        "dcp by name": lambda model: dcp_by_name(
            {"w": model.weight}, storage_writer=FileSystemWriter(path), no_dist=True
        ),
        "safetensors": lambda model: safetensors.save_file(model.state_dict(), path),
        "safetensors by name": lambda model: by_name(model.state_dict(), path),
    }
    train(ways[way])
    assert recorded.numbers("phase/checkpoint_s") == [2, 3]
    assert recorded.phases()[0] == ("checkpoint", 1)
    for values in [values for _, values in recorded.steps()][1:]:
        phases = [seconds for name, seconds in values.items() if name.startswith("phase/")]
        assert sum(phases) == pytest.approx(values["step_time_s"]), "no save counts twice"
    assert way != "dcp" or saved_to[-1] == str(path)
