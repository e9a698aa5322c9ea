"""Checkpoints are recognised where they are written, and are neither `other` nor part of the model's work."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch import save as saved_by_name

from perfagent.hooks.checkpoint_saves import _note_path
from perfagent.samplers.folders import saved_to

NAP_S = 0.05
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")


class Slow:
    """What takes its time to be pickled."""

    def __init__(self, clock) -> None:
        self.clock = clock

    def __reduce__(self):
        self.clock.sleep(NAP_S)
        return dict, ()


def train(save, steps=3):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(model)


def phases(recorded):
    return [data for kind, data, _ in recorded.sender.events if kind == "phase"]


def test_torch_save_is_a_checkpoint_phase_of_the_next_step_and_an_event(clock, record, tmp_path):
    recorded = record()
    path = tmp_path / "model.pt"
    train(lambda model: torch.save({"model": model.state_dict(), "slow": Slow(clock)}, path))
    series = recorded.of("phase/checkpoint_s")
    assert [step for step, _ in series] == [2, 3]
    assert all(NAP_S <= seconds <= NAP_S + 0.001 for _, seconds in series)
    for step, values in recorded.steps():
        assert (
            step == 1 or values.get("phase/other_s", 0.0) < values["step_time_s"] - values["phase/checkpoint_s"] + 1e-6
        )
    assert [event["name"] for event in phases(recorded)][:1] == ["checkpoint"]
    assert all(event["duration_s"] >= NAP_S for event in phases(recorded))
    assert saved_to[-1] == str(path)


@pytest.mark.parametrize(
    ("said", "expected"), [("last.pt", "{folder}/last.pt"), ("memory://bucket/last.pt", "memory://bucket/last.pt")]
)
def test_the_folder_of_a_checkpoint_does_not_move_with_the_working_directory(said, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _note_path(({}, said), {})
    monkeypatch.chdir("/")
    assert saved_to[-1] == expected.format(folder=tmp_path)


@alone
def test_a_name_imported_before_the_run_is_caught_below(record, tmp_path):
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as imported_earlier

    recorded = record()
    train(
        lambda model: imported_earlier(
            {"w": model.weight}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True
        )
    )
    assert [step for step, _ in recorded.of("phase/checkpoint_s")] == [2, 3]


@alone
def test_saves_inside_of_a_save_count_once(record, tmp_path):
    import torch.distributed.checkpoint as dcp

    recorded = record()
    took = []

    def save(model):
        began = time.perf_counter()
        dcp.save({"w": model.weight}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        took.append(time.perf_counter() - began)

    train(save)
    series = recorded.of("phase/checkpoint_s")
    assert [step for step, _ in series] == [2, 3]
    assert all(seconds <= whole for (_, seconds), whole in zip(series, took, strict=False))
    assert saved_to[-1] == str(tmp_path / "dcp")


@pytest.mark.parametrize("zipped", [True, False])
def test_of_torch_too(clock, record, tmp_path, zipped):
    recorded = record()
    train(lambda _: saved_by_name(Slow(clock), tmp_path / "model.pt", _use_new_zipfile_serialization=zipped))
    series = recorded.of("phase/checkpoint_s")
    assert [step for step, _ in series] == [2, 3]
    assert all(seconds >= NAP_S for _, seconds in series)


def test_of_safetensors_too(record, tmp_path):
    saved_earlier = pytest.importorskip("safetensors.torch").save_file
    recorded = record()
    train(lambda model: saved_earlier(model.state_dict(), tmp_path / "model.safetensors"))
    assert [step for step, _ in recorded.of("phase/checkpoint_s")] == [2, 3]


def test_safetensors_is_a_checkpoint(record, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    recorded = record()
    train(lambda model: safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors"))
    assert [step for step, _ in recorded.of("phase/checkpoint_s")] == [2, 3]


def test_a_save_on_another_thread_keeps_nobody_waiting(record):
    import threading

    recorded = record()

    def save(model):
        thread = threading.Thread(target=torch.save, args=(model.state_dict(), io.BytesIO()))
        thread.start()
        thread.join()

    train(save)
    assert not recorded.of("phase/checkpoint_s")


@pytest.mark.parametrize("opens", [False, True])
def test_where_it_goes_is_known_nevertheless(record, tmp_path, opens):
    """Many scripts save in the background, or into a file that they open, so as to rename it when it is whole."""
    import threading

    record()
    path = tmp_path / f"in the background {opens}.pt"

    def write(state):
        with path.open("wb") as file:
            torch.save(state, file if opens else path)

    def save(model):
        thread = threading.Thread(target=write, args=(model.state_dict(),))
        thread.start()
        thread.join()

    train(save)
    assert saved_to[-1] == str(path)


def test_many_small_saves_are_few_events(record):
    recorded = record()
    train(lambda model: torch.save(model.weight, io.BytesIO()), steps=40)
    assert len(recorded.of("phase/checkpoint_s")) == 39
    assert len(phases(recorded)) < 10


def test_a_save_that_fails_raises_as_without_us_and_leaves_the_hooks_working(record):
    recorded = record()

    def save(model):
        with pytest.raises(AttributeError, match=r"lambda|local object|pickle"):
            torch.save(lambda: model, io.BytesIO())

    train(save)
    assert [step for step, _ in recorded.of("phase/forward_s")] == [2, 3]


def test_the_patches_are_gone_after_the_run(record):
    recorded = record()
    assert hasattr(torch.save, "__wrapped__")
    recorded.finish()
    assert not hasattr(torch.save, "__wrapped__")


def test_a_save_that_is_watched_can_be_pickled(record):
    import torch.distributed.checkpoint as dcp

    recorded = record()
    saves = [torch.save, torch.serialization.save, dcp.save, dcp.async_save, dcp.state_dict_saver.save]
    assert [hasattr(save, "__wrapped__") for save in saves] == [True] * 5
    assert [pickle.loads(pickle.dumps(save)) is save for save in saves] == [True] * 5
    recorded.finish()
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save


@pytest.mark.long
def test_a_save_is_itself_again_where_a_module_took_it_during_the_run():
    script = """
import pickle, torch, perfagent.patching as instrument
instrument.install()
import torch.distributed.checkpoint as dcp, torch.distributed.checkpoint.state_dict_saver as below
assert dcp.save is below.save and pickle.loads(pickle.dumps(dcp.save)) is dcp.save
watched = dcp.save
instrument.remove()
assert dcp.save is below.save is not watched and pickle.loads(pickle.dumps(dcp.save)) is dcp.save
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
