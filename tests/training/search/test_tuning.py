"""The search for a faster setting: what it finds on data that waits, what it prints, what it leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ran
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from perfagent import session
from perfagent.errors import ConfigError
from perfagent_loop.search import tuning
from perfagent_loop.search.command import command
from perfagent_loop.search.job import TuningJob, job_from
from perfagent_loop.search.tuning import Setting, TuningReport, TuningStep, _left_out, tune
from perfagent_loop.search.workers import WorkersTrial


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
    return TuningJob(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), loss=loss, **(given | changed)
    )


def state_of(job: TuningJob) -> str:
    state = {name: tensor.tolist() for name, tensor in job.model.state_dict().items()}
    return repr((state, job.optimizer.state_dict(), job.model.training, torch.get_rng_state().tolist()))


@pytest.mark.real
def test_workers_are_found_for_waiting_data_and_all_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real training with given rates: the rates of a busy machine prove nothing."""
    real_rate = tuning._Training.rate

    def rate(training: tuning._Training, steps: int) -> float:
        real_rate(training, steps)
        return 120.0 if training._setting.num_workers else 30.0

    trials = [WorkersTrial(0, 0.12), WorkersTrial(4, 0.03)]
    monkeypatch.setattr(tuning, "search_num_workers", lambda *_, **__: (4, trials))
    monkeypatch.setattr(tuning._Training, "rate", rate)
    job = slow_job(dataset=Slow(0.001))
    before = state_of(job)
    heard: list[TuningStep] = []
    report = tune(job, steps=6, rounds=1, largest_batch=4, told=heard.append)
    assert heard == report.steps
    first = report.steps[0]
    assert (first.change, first.kept, first.gain_pct) == ("num_workers=4", True, 300.0)
    assert first.remark == "the loader alone: 133 samples/s"
    assert report.setting.num_workers == 4
    assert report.gain_pct == 300.0
    assert [step.change for step in report.steps[1:]] == ["precision='bf16'", "optimizer: fused=True"]
    assert state_of(job) == before
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert not multiprocessing.active_children()


@pytest.mark.real
def test_larger_batches_and_channels_last_are_tried() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 4))
    data = TensorDataset(torch.randn(64, 3, 8, 8), torch.randint(0, 4, (64,)))
    job = slow_job(dataset=TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), precision="bf16")
    conv = TuningJob(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=True), loss=loss, dataset=data
    )
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

def needs(width):
    return job()

def less():
    return {name: value for name, value in job().items() if name != "loss"}
"""


@pytest.mark.long
def test_the_command_prints_the_gain_of_each_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    assert ran(command, str(tmp_path / "mine.py"), "--steps", "2", "--rounds", "1", "--largest-batch", "32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["samples/s", "without", "with", "gain", "spread"]
    (line,) = (line for line in lines if line.startswith("batch_size=32"))
    without, with_it, gain, _, spread, _, result = line.removeprefix("batch_size=32").replace(",", "").split(maxsplit=6)
    assert float(gain) == pytest.approx(100 * (float(with_it) / float(without) - 1), abs=2), "as the columns say"
    assert float(spread) >= 0
    assert result.startswith(("kept: fewer larger steps", "left out: "))
    assert (
        ran(command, str(tmp_path / "mine.py"), *["--steps", "1", "--rounds", "1", "--largest-batch", "16", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["setting"]["batch_size"] == 16
    assert {"change", "before", "after", "gain_pct", "kept"} <= set(report["steps"][0])


def test_files_that_describe_no_training_say_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    (tmp_path / "script.py").write_text("x = 1")
    assert job_from(str(tmp_path / "mine.py")).batch_size == 16
    for name, said in {
        "mine.py:jobs": "it has job, less, needs, wrong",
        "mine.py:wrong": "batches",
        "mine.py:less": "no loss",
        "mine.py:needs": "is called without arguments, and needs some",
        "other.py": "there is no file .* whose function returns a TuningJob",
        "script.py": r"has no function; write `def job\(\):` that returns a TuningJob",
    }.items():
        with pytest.raises(ConfigError, match=said):
            job_from(str(tmp_path / name))


TRAINS = {
    "for step in range(3):\n    print('trained')": "line 2: `for step in range(3):`",
    "def main():\n    print('trained')\n\nmain()": "line 5: `main()`",
    "def fit():\n    print('trained')\n\nif True:\n    x = fit()": "line 6: `x = fit()`",
}


@pytest.mark.parametrize(("body", "said"), TRAINS.items(), ids=[*map(str, range(len(TRAINS)))])
def test_a_file_that_trains_when_imported_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, said: str
) -> None:
    file = tmp_path / "plain.py"
    file.write_text(f"import torch\n{body}\n" + JOB)
    with pytest.raises(ConfigError) as refused:
        job_from(str(file))
    assert f"{file}, {said} would run when the file is imported" in str(refused.value)
    assert "move it into job() or below `if __name__ ==" in str(refused.value)
    assert capsys.readouterr().out == ""


PREPARES = """
import os, sys
from pathlib import Path
import torch
import perfagent
try:
    import nothing_of_that_name
except ImportError:
    nothing_of_that_name = None
HERE = Path(__file__).parent
WIDTH: int = int(os.environ.get("WIDTH", 8)) * 2
sys.path.insert(0, str(HERE))
torch.manual_seed(0)
assert WIDTH
run = perfagent.attach(project="never")
if __name__ == "__main__":
    print("trained")
"""


def test_a_file_may_prepare_what_its_function_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PREPARES + JOB)
    assert job_from(str(file)).batch_size == 16
    assert session.current() is None
    assert caplog.messages == [
        f"perfagent: attach() or init() begins no run here: {file} is read for its function job()"
    ]


def test_why_a_change_is_left_out_and_what_is_noise() -> None:
    assert _left_out([10.0, 10.0, 10.0], [13.0, 12.0, 12.0]) == ""
    assert _left_out([10.0, 10.0, 10.0], [9.0, 12.0, 9.5]) == "slower"
    assert _left_out([10.0, 10.0, 10.0], [10.2, 10.2, 10.1]) == "gains less than 3 %"
    assert _left_out([10.0, 40.0, 10.0], [34.0, 34.0, 34.0]) == "slower in 1 of 3 rounds: noise"
    setting = Setting(batch_size=1, num_workers=0, precision="fp32")
    quiet = TuningReport(1.0, [], setting, 0.0, load=0.1, spread_pct=2.0)
    assert quiet.noise == ""
    assert replace(quiet, load=1.4).noise == "other programs kept 140 % of this machine's cores busy"
    assert "rounds of the same setting lay 45 % apart" in replace(quiet, spread_pct=45.0).noise
