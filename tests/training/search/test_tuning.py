"""The search for a faster setting: what it tries, what it prints, what it leaves behind."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ran
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from perfagent import session
from perfagent.errors import ConfigError
from perfagent_loop.search import tuning
from perfagent_loop.search.command import command
from perfagent_loop.search.job import TuningJob, job_from
from perfagent_loop.search.tuning import Setting, TuningReport, TuningStep, tune
from perfagent_loop.search.workers import WorkersTrial


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def small_job(*layers: nn.Module, shape: tuple[int, ...] = (8,), fused: bool = False, **options: Any) -> TuningJob:
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))
    data = TensorDataset(torch.randn(64, *shape), torch.randint(0, 4, (64,)))
    model(data[:4][0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    return TuningJob(model=model, optimizer=optimizer, loss=loss, dataset=data, **options)


def state_of(job: TuningJob) -> str:
    state = {name: (tensor.tolist(), tensor.stride()) for name, tensor in job.model.state_dict().items()}
    gradients = [parameter.grad for parameter in job.model.parameters()]
    return repr((state, gradients, job.optimizer.state_dict(), job.model.training, torch.get_rng_state().tolist()))


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Samples a second of each block of real steps, in turns: those of a busy machine prove nothing. At the end: 30."""
    real, given = tuning._Training.rate, list[float]()

    def rate(training: tuning._Training, steps: int) -> float:
        real(training, steps)
        return given.pop(0) if given else 30.0

    monkeypatch.setattr(tuning._Training, "rate", rate)
    return given


@pytest.mark.real
def test_workers_are_found_for_waiting_data_and_all_is_put_back(
    monkeypatch: pytest.MonkeyPatch, rates: list[float]
) -> None:
    trials = [WorkersTrial(0, 0.12), WorkersTrial(1, 0.03)]
    monkeypatch.setattr(tuning, "search_num_workers", lambda *_, **__: (1, trials))
    rates += [30.0, 120.0, 120.0, 120.0, 120.0, 120.0, 30.0, 120.0]
    job = small_job(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), batch_size=4)
    before = state_of(job)
    heard: list[TuningStep] = []
    report = tune(job, steps=6, rounds=1, largest_batch=4, on_step=heard.append)
    assert heard == report.steps
    first = report.steps[0]
    assert (first.change, first.kept, first.gain_pct) == ("num_workers=1", True, 300.0)
    assert first.remark == "the loader alone: 133 samples/s"
    assert (report.setting.num_workers, report.gain_pct) == (1, 300.0)
    assert [step.change for step in report.steps[1:]] == ["precision='bf16'", "optimizer: fused=True"]
    assert state_of(job) == before
    assert not multiprocessing.active_children()


@pytest.mark.real
def test_larger_batches_and_channels_last_are_tried() -> None:
    job = small_job(nn.Conv2d(3, 4, 3), shape=(3, 8, 8), fused=True)
    before = state_of(job)
    changes = {step.change for step in tune(job, steps=2, rounds=1).steps}
    assert {"precision='bf16'", "model.to(memory_format=torch.channels_last)", "batch_size=64"} <= changes
    assert "optimizer: fused=True" not in changes  # it is fused already
    assert state_of(job) == before
    job = small_job(nn.Linear(8, 8), batch_size=4, precision="bf16")
    changes = {step.change for step in tune(job, steps=2, rounds=1, largest_batch=8).steps}
    assert "batch_size=8" in changes
    assert "precision='bf16'" not in changes


@pytest.mark.parametrize(
    ("without", "with_it", "remark"),
    [
        ([10.0, 10.0, 10.0], [13.0, 12.0, 12.0], "computes in half precision: compare the loss curves"),
        ([10.0, 10.0, 10.0], [9.0, 12.0, 9.5], "slower"),
        ([10.0, 10.0, 10.0], [10.2, 10.2, 10.1], "gains less than 3 %"),
        ([10.0, 40.0, 10.0], [34.0, 34.0, 34.0], "slower in 1 of 3 rounds: noise"),
    ],
)
def test_why_a_change_is_left_out(
    without: list[float], with_it: list[float], remark: str, rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "search_num_workers", lambda *_, **__: (0, []))
    rates += [rate for pair in zip(without, with_it, strict=True) for rate in pair]
    [step] = tune(small_job(nn.Linear(8, 8), fused=True), steps=1, rounds=3, largest_batch=32).steps
    assert (step.remark, step.kept) == (remark, remark.startswith("computes"))


def test_what_is_noise_is_named() -> None:
    setting = Setting(batch_size=1, num_workers=0, precision="fp32")
    noises = [TuningReport(1.0, [], setting, 0.0, load, spread).noise for load, spread in ((0.1, 2.0), (1.4, 45.0))]
    assert noises[0] == ""
    assert all(part in noises[1] for part in ("other programs kept 140 %", "the same setting lay 45 % apart"))


JOB = """
import os, sys
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import perfagent
try:
    import nothing_of_that_name
except ImportError:
    nothing_of_that_name = None
HERE = Path(__file__).parent
WIDTH: int = int(os.environ.get("WIDTH", 4)) * 2
sys.path.insert(0, str(HERE))
torch.manual_seed(0)
assert WIDTH
run = perfagent.attach(project="never")
if __name__ == "__main__":
    print("trained")

def job():
    model = torch.nn.Linear(WIDTH, 4)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "dataset": data,
            "loss": lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]), "batch_size": 16}

def wrong():
    return {**job(), "batches": 3}

def needs(width):
    return job()

def less():
    return {name: value for name, value in job().items() if name != "loss"}
"""
"""Prepares what its function needs, and trains only as a script."""


def test_the_command_prints_the_gain_of_each_step(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    rates: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "search_num_workers", lambda *_, **__: (0, []))
    (file := tmp_path / "mine.py").write_text(JOB)
    words = [str(file), "--steps", "2", "--rounds", "1", "--largest-batch", "32"]
    rates += [10.0, 5.0, 10.0, 20.0]
    assert ran(command, *words) == 0
    assert session.current() is None
    assert caplog.messages == [
        f"perfagent: attach() or init() begins no run here: {file} is read for its function job()"
    ]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        "samples/s without with gain spread",
        "precision='bf16' 10 5 -50.0 % 0 % left out: slower",
        "optimizer: fused=True 10 20 +100.0 % 0 % kept",
    ]
    assert ran(command, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["setting"]["batch_size"] == 16
    assert {"change", "before", "after", "gain_pct", "kept"} <= set(report["steps"][0])


REFUSED = [
    (":jobs", JOB, "it has job, less, needs, wrong"),
    (":wrong", JOB, "batches"),
    (":less", JOB, "no loss"),
    (":needs", JOB, "is called without arguments, and needs some"),
    (".py", JOB, "there is no file .* whose function returns a TuningJob"),
    ("", "x = 1", r"has no function; write `def job\(\):` that returns a TuningJob"),
    (
        "",
        "for step in range(3):\n    print('trained')\n" + JOB,
        "line 1: `for step in range.* would run when the file is",
    ),
    (
        "",
        "def main():\n    print('trained')\n\nmain()\n" + JOB,
        r"line 4: `main\(\)` would run .* move it into job\(\)",
    ),
    ("", "def fit(): print('trained')\nif True:\n    x = fit()\n" + JOB, r"line 3: `x = fit\(\)` would run"),
]


@pytest.mark.parametrize(("name", "text", "said"), REFUSED)
def test_a_file_that_describes_no_training_is_refused(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        job_from(f"{tmp_path / 'mine.py'}{name}")
    assert capsys.readouterr().out == ""
