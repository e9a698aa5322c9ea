"""The search for a faster setting: what it finds on data that waits, what it prints, what it leaves behind."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from perfagent.errors import ConfigError
from perfagent.training.estimates.memory import estimate_memory
from perfagent.training.search.command import command
from perfagent.training.search.job import TuningJob, demo_job, job_from
from perfagent.training.search.tuning import TuningStep, tune


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Each sample waits, as for a disk."""

    def __init__(self, wait_s: float = 0.01) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        return torch.full((8,), float(index)), torch.tensor(index % 4)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def slow_job(**changed: Any) -> TuningJob:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    given: dict[str, Any] = {"dataset": Slow(), "batch_size": 4}
    return TuningJob(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), loss=loss, **(given | changed))


def state_of(job: TuningJob) -> str:
    state = {name: tensor.tolist() for name, tensor in job.model.state_dict().items()}
    return repr((state, job.optimizer.state_dict(), job.model.training, torch.get_rng_state().tolist()))


def test_workers_are_found_for_data_that_waits_and_everything_is_put_back() -> None:
    job = slow_job(dataset=Slow(0.03))  # far more than a step takes, on a busy machine as well
    before = state_of(job)
    heard: list[TuningStep] = []
    report = tune(job, steps=6, rounds=1, largest_batch=4, told=heard.append)
    assert heard == report.steps
    first = report.steps[0]
    assert first.change.startswith("num_workers=")
    assert first.kept
    assert first.gain_pct > 50
    assert report.setting.num_workers >= 2
    assert report.gain_pct > 50
    assert [step.change for step in report.steps[1:]] == ["precision='bf16'", "optimizer: fused=True"]
    assert state_of(job) == before
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert not multiprocessing.active_children()


def test_larger_batches_and_channels_last_are_tried_where_they_can_be() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 4))
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 4, (64,)))
    job = slow_job(dataset=TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), precision="bf16")
    conv = TuningJob(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=True), loss=loss, dataset=data)
    assert conv.batch_size == 32
    changes = [step.change for step in tune(conv, steps=2, rounds=1).steps]
    assert "precision='bf16'" in changes
    assert "model.to(memory_format=torch.channels_last)" in changes
    assert "batch_size=64" in changes
    assert not any("fused" in change for change in changes)  # it is fused already
    assert model[0].weight.is_contiguous()  # type: ignore[union-attr,operator]
    changes = [step.change for step in tune(job, steps=2, rounds=1, largest_batch=8).steps]
    assert "precision='bf16'" not in changes
    assert "batch_size=8" in changes


def test_a_report_of_a_training_that_is_as_fast_as_it_gets() -> None:
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    report = tune(slow_job(dataset=data), steps=1, rounds=1, largest_batch=4)
    assert report.samples_per_s > 0
    for step in report.steps:
        assert step.kept == (step.after > 1.03 * step.before)


JOB = """
import torch
from torch.utils.data import TensorDataset

def job():
    model = torch.nn.Linear(8, 4)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "dataset": data,
            "loss": lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]), "batch_size": 16}

def wrong():
    return {**job(), "batches": 3}

def vector():
    return {**job(), "loss": lambda model, batch: model(batch[0])}

def number():
    return {**job(), "loss": lambda model, batch: 3.0}

def needs(width):
    return job()

def less():
    return {name: value for name, value in job().items() if name != "loss"}
"""


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command(parser)
    options = parser.parse_args(words)
    return int(options.run(options))


def test_the_command_prints_the_gain_of_each_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    assert run_command(str(tmp_path / "mine.py"), "--steps", "2", "--rounds", "1", "--largest-batch", "32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["change", "samples/s", "gain"]
    assert lines[1].startswith("as given")
    assert any(line.startswith("batch_size=32") and "%" in line and ("kept" in line or "left out" in line) for line in lines)
    assert lines[-1].startswith("all that was kept")
    assert run_command(str(tmp_path / "mine.py"), "--steps", "1", "--rounds", "1", "--largest-batch", "16", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["setting"]["batch_size"] == 16
    assert {"change", "before", "after", "gain_pct", "kept"} <= set(report["steps"][0])


def test_files_that_describe_no_training_say_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    assert job_from(str(file)).batch_size == 16
    with pytest.raises(ConfigError, match="it has job, less, needs, number, vector, wrong"):
        job_from(f"{file}:jobs")
    with pytest.raises(ConfigError, match="batches"):
        job_from(f"{file}:wrong")
    with pytest.raises(ConfigError, match="no loss"):
        job_from(f"{file}:less")
    with pytest.raises(ConfigError, match="is called without arguments, and needs some"):
        job_from(f"{file}:needs")
    with pytest.raises(ConfigError, match="there is no file"):
        job_from(str(tmp_path / "other.py"))
    (tmp_path / "script.py").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"has no function; write `def job\(\):`"):
        job_from(str(tmp_path / "script.py"))


def test_a_file_that_parses_its_arguments_finds_none_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    parsing = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', default=3)\n"
    parsing += "at_import = parser.parse_args().width\ndef job():\n    return at_import, parser.parse_args().width\n"
    file.write_text(parsing)
    given = ["perfagent", "estimate", str(file)]
    monkeypatch.setattr("sys.argv", given)
    assert job_from(str(file)) == (3, 3)
    assert sys.argv is given
    file.write_text("raise ValueError('mine')")
    with pytest.raises(ValueError, match="mine"):
        job_from(str(file))
    assert sys.argv is given


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": iter([])}, "dataset"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
    ],
)
def test_a_job_is_checked_when_it_is_made(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slow_job(**changed)


def test_the_demo_is_a_job_and_wrong_use_is_said() -> None:
    job = demo_job()
    assert loss_is_a_number(job)
    with pytest.raises(ConfigError, match="TuningJob"):
        tune({"model": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rounds"):
        tune(job, rounds=0)
    with pytest.raises(ConfigError, match="largest_batch is a number of samples, 1 or more, not -5"):
        tune(job, largest_batch=-5)


@pytest.mark.parametrize(("name", "said"), [("vector", "a tensor of shape (16, 4)"), ("number", "a float")])
def test_a_loss_that_is_no_number_is_refused_in_words(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    job = job_from(f"{tmp_path / 'mine.py'}:{name}")
    for ask in (lambda: tune(job, steps=1, rounds=1), lambda: estimate_memory(job.with_loss(), (job.batch(16),))):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert f"loss(model, batch) answered {said}" in str(caught.value)


def test_a_batch_of_a_job_has_the_size_that_was_asked_for() -> None:
    job = slow_job(dataset=TensorDataset(torch.randn(6, 8), torch.arange(6)))
    values, labels = job.batch(9)
    assert values.shape == (9, 8)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def loss_is_a_number(job: TuningJob) -> bool:
    return bool(torch.isfinite(job.loss(job.model, next(iter(job.loader(batch_size=2))))))
