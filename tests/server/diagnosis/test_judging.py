"""What is found in labelled runs and logs, and in curves that are made up."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perfagent_client.history import OldRun, find_runs
from perfagent_server.diagnosis.judging import Diagnosis, diagnose
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

LABELLED = Path(__file__).parents[2] / "data" / "labelled"
PLAN = Plan(all_rules())
GALLERY = {
    "healthy": ("healthy", ""),
    "bad_labels": ("loss_plateau", "worse than guessing"),
    "fp16_nan": ("nonfinite_gradient", ""),
    "lr_hot": ("loss_divergence", "from the start"),
    "lr_zero": ("frozen_training", "learning rate"),
    "overfit": ("overfit", ""),
}
CAUSES = {  # label: (rule, cause)
    "ram_oom": ("oom_observed", "host memory"),
    "segfault": ("process_crash", "native code"),
    "file_not_found": ("process_crash", "no file"),
    "permission": ("process_crash", "not allowed"),
    "missing_module": ("process_crash", "no module"),
    "div_zero": ("process_crash", "division by zero"),
    "nan_loss": ("nonfinite_loss", ""),
    "traceback": ("process_crash", "KeyError"),
    "assertion": ("process_crash", "assertion"),
    "runtime_error": ("process_crash", "no CUDA"),  # of a GPU that the build of torch does not know
    "cuda_runtime": ("process_crash", "device assert"),
    "device_mismatch": ("process_crash", "devices"),
}


def of_files(path: Path) -> dict[str, Diagnosis]:
    return {run.name: diagnose(run, PLAN) for source in find_runs([path]) for run in source.read()}


def of_curve(values: list[float], *, every: int = 5, **others: list[float]) -> Diagnosis:
    run = OldRun("test:1", "made up")
    for name, column in {"loss": values, **others}.items():
        for place, value in enumerate(column, 1):
            run.add(name, place * every, value)
    return diagnose(run, PLAN)


def test_sick_runs_of_the_gallery_are_named_healthy_is_silent() -> None:
    found = of_files(LABELLED / "gallery")
    assert {name: (one.verdict.rule, one.verdict.cause) for name, one in found.items()} == GALLERY
    assert found["healthy"].outcome == "nothing found" and found["healthy"].alerts == []
    assert all(one.verdict.fix for name, one in found.items() if name != "healthy")


def test_causes_of_crash_logs_are_those_of_their_labels() -> None:
    found = of_files(LABELLED / "crash_logs")
    labels = json.loads((LABELLED / "crash_logs" / "labels.json").read_text())
    wanted = {name.removesuffix(".log"): CAUSES[cause] for name, cause in labels.items()}
    assert {name: (one.verdict.rule, one.verdict.cause) for name, one in found.items()} == wanted
    assert all("step 0" not in one.verdict.message for one in found.values()), "the logs tell of no step"


def falling(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [(1.0 + 3.0 * math.exp(-place / 10)) * math.exp(draw.gauss(0, 0.05)) for place in range(count)]


CURVES: dict[str, tuple[Callable[[], Diagnosis], str]] = {
    "falls": (lambda: of_curve(falling(60)), "healthy"),
    "falls, then lost": (lambda: of_curve([*falling(40), *([3.5] * 30)]), "loss_divergence"),
    "a spike that comes back": (lambda: of_curve([*falling(30), 9.0, 6.0, 3.0, *falling(40)[10:]]), "healthy"),
    "of a GAN rises": (lambda: of_curve([*falling(40), *([3.5] * 30)], d_loss=falling(70)), "healthy"),
    "one gradient overflows": (lambda: of_curve(falling(60), grad_norm=[math.nan, 1, 1, math.inf, *([1.0] * 56)]), "healthy"),
    "gradients stay NaN": (lambda: of_curve(falling(60), grad_norm=[1.0] * 30 + [math.nan] * 30), "nonfinite_gradient"),
    "zeros beside NaN gradients": (
        lambda: of_curve(falling(30) + [0.0] * 30, grad_norm=[1.0] * 30 + [math.nan] * 30), "nonfinite_gradient",
    ),
    "NaN": (lambda: of_curve(falling(30) + [math.nan] * 30), "nonfinite_loss"),
    "high and comes down": (lambda: of_curve([18.0 * math.exp(-place / 30) for place in range(60)]), "healthy"),
}  # fmt: skip


@pytest.mark.parametrize("curve", CURVES)
def test_whole_curves_are_judged_with_hindsight(curve: str) -> None:
    judged, rule = CURVES[curve]
    assert judged().verdict.rule == rule


def of_parts(*scales: float, evaluation: Callable[[float], float] | None = None, **others: list[float]) -> Diagnosis:
    """A table as Ultralytics writes it: a row an epoch, the loss in three parts."""
    tails = ("box_loss", "cls_loss", "dfl_loss")
    run = OldRun("test:2", "detector")
    for place, scale in enumerate(scales, 1):
        for tail, share in zip(tails, (1.0, 2.0, 0.5), strict=True):
            run.add(f"train/{tail}", place, share * scale)
            if evaluation is not None:
                run.add(f"val/{tail}", place, share * evaluation(place))
    for name, column in others.items():
        for place, value in enumerate(column, 1):
            run.add(name, place, value)
    return diagnose(run, PLAN)


SUM = "The loss is the sum of train/box_loss, train/cls_loss and train/dfl_loss."


def test_parts_of_a_loss_are_judged_as_their_sum() -> None:
    healthy = of_parts(*(losses := falling(100)), evaluation=lambda epoch: 1.1 + 3.0 * math.exp(-epoch / 10))
    assert (healthy.verdict.rule, healthy.outcome, healthy.alerts) == ("healthy", "nothing found", [])
    assert healthy.verdict.message.endswith(SUM) and f"loss {3.5 * losses[-1]:.4g}" in healthy.verdict.message
    lost = of_parts(*falling(40), *([3.5] * 60))
    assert lost.verdict.rule == "loss_divergence" and lost.verdict.message.endswith(SUM)
    assert lost.verdict.evidence["loss_parts"] == ["train/box_loss", "train/cls_loss", "train/dfl_loss"]
    memorized = of_parts(
        *(3.0 / epoch for epoch in range(1, 101)), evaluation=lambda epoch: 2.0 / min(epoch, 10) + epoch / 50
    )
    assert memorized.verdict.rule == "overfit" and memorized.verdict.message.endswith(SUM)


def test_best_of_hundreds_of_noisy_evaluations_is_chance() -> None:
    draw = random.Random(7)
    losses = [2.0 + 3.0 * math.exp(-place / 20) for place in range(300)]
    noisy = [(one + 0.3) * math.exp(draw.gauss(0, 0.03)) for one in losses]
    trained = [one * (1 - place / 3000) for place, one in enumerate(losses)]
    assert of_curve(trained, eval_loss=noisy).outcome == "nothing found"
    risen = [one * (1 + max(0, place - 150) / 1000) for place, one in enumerate(noisy)]
    assert of_curve(trained, eval_loss=risen).verdict.rule == "overfit"


APART = [
    ("Loss_D", "Loss_G"),
    ("train/actor_loss", "train/alpha_loss"),
    ("loss/recon", "loss/kl"),
    ("train/box_loss", "ema/box_loss"),
]


@pytest.mark.parametrize("names", APART)
def test_losses_that_are_no_parts_of_one_are_not_summed(names: tuple[str, str]) -> None:
    run = OldRun("test:3", "apart")
    for place, value in enumerate([*falling(40), *([9.0] * 40)]):
        for name in names:
            run.add(name, place, value)
    found = diagnose(run, PLAN)
    assert (found.outcome, found.alerts) == ("could not judge", [])


def test_part_that_is_nan_now_and_then_is_no_fault() -> None:
    losses = falling(100)
    losses[50] = math.nan
    assert of_parts(*losses).outcome == "could not judge"
    assert of_parts(*losses[:50], *([math.nan] * 50)).verdict.rule == "nonfinite_loss"
    assert "sum" not in of_parts(*falling(60), loss=falling(60)).verdict.message, "there is a whole one"


@pytest.mark.parametrize("losses", [falling(60), []])
def test_run_that_its_tracker_calls_failed_is_ill(losses: list[float]) -> None:
    run = OldRun("test:4", "failed", state="failed")
    for place, value in enumerate(losses):
        run.add("loss", place, value)
    found = diagnose(run, PLAN)
    assert (found.verdict.rule, found.verdict.severity, found.outcome) == ("process_crash", "critical", "finding")
    assert found.verdict.message == ("Rank 0 failed after step 59." if losses else "Rank 0 failed.")
    run.console = ["Traceback (most recent call last):", "  x", "KeyError: 'text'"]
    assert diagnose(run, PLAN).verdict.cause == "KeyError", "the console says more"
    run.console, run.state = [], "finished"
    assert diagnose(run, PLAN).verdict.rule != "process_crash"


def test_run_that_ended_with_an_exit_code_for_wandb_is_ill() -> None:
    found = of_files(LABELLED.parent / "history" / "wandb-0.31")["failed"]
    assert (found.verdict.rule, found.outcome) == ("process_crash", "finding")


def test_job_that_met_its_time_limit_is_named(tmp_path: Path) -> None:
    said = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    (tmp_path / "job.out").write_text(said)
    [found] = of_files(tmp_path).values()
    assert (found.verdict.rule, found.verdict.cause, found.outcome) == ("process_crash", "time limit", "finding")
    assert "--time" in found.verdict.fix


def test_curve_that_never_fell_gets_a_remark() -> None:
    draw = random.Random(1)
    found = of_curve([2.0 + draw.gauss(0, 0.05) for _ in range(60)])
    assert [(one.rule, one.severity, one.fired and one.fired.cause) for one in found.alerts] == [
        ("loss_plateau", "info", "never fell")
    ]
    assert found.outcome == "nothing found"


def test_excused_gradients_are_said_not_to_be_judged() -> None:
    found = of_curve(falling(60), grad_norm=[math.nan, *([1.0] * 59)])
    assert any("GradScaler" in subject for subject in found.unjudged)


def test_what_has_no_data_is_named_by_its_subject() -> None:
    found = of_curve(falling(60))
    assert {"errors of GPUs and links", "where the time of a step goes, and use of the GPU"} <= found.unjudged.keys()
    assert "overfit" in found.unjudged["the loss"]
    assert "the loss" not in of_curve(falling(60), eval_loss=falling(60), learning_rate=[0.1] * 60).unjudged


def test_too_few_losses_are_not_judged() -> None:
    assert of_curve(falling(10)).outcome == "could not judge"
    assert of_curve([1.0, 1.0, math.nan]).outcome == "finding"


BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name, name=name)

for name in {missing}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
from argparse import ArgumentParser
from perfagent_server.commands.diagnose import command
parser = ArgumentParser()
command(parser)
arguments = parser.parse_args(sys.argv[1:])
sys.exit(arguments.run(arguments))
"""
MISSING = (
    "alembic", "brotli", "dash", "fastapi", "plotly", "psycopg", "pyarrow", "pydantic", "re2", "sqlalchemy", "starlette", "torch",
    "uvicorn", "yaml", "zstandard", "fcntl", "resource", "pwd", "grp",
)  # fmt: skip
"""What the base install and numpy do not bring, and what Windows does not have."""


@pytest.mark.real
def test_base_install_with_numpy_is_enough_on_any_system() -> None:
    script = BARE.format(missing=MISSING)
    words = [sys.executable, "-c", script, str(LABELLED / "gallery"), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert len(json.loads(done.stdout)["runs"]) == len(GALLERY)


@pytest.mark.real
def test_missing_package_loses_only_what_needs_it(tmp_path: Path) -> None:
    (tmp_path / "crash.log").write_text("Traceback (most recent call last):\n  x\nKeyError: 'text'\n")
    neptune = LABELLED.parent / "history" / "neptune"
    script = BARE.format(missing=MISSING)
    for sources, code, count in (([neptune, tmp_path], 1, 1), ([neptune], 3, 0)):
        words = [sys.executable, "-c", script, *map(str, sources), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, len(json.loads(done.stdout)["runs"])) == (code, count)
        assert "needs pyarrow" in done.stderr


@pytest.mark.real
@pytest.mark.parametrize("name", ["diagnose", "gate"])
def test_command_that_could_not_start_found_nothing(name: str) -> None:
    script = "import sys; sys.modules['numpy'] = None; from perfagent.cli import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", script, name, "x", "y"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "numpy is missing" in done.stderr
