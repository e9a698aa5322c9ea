"""How a bad step is looked into: once, without a trace in the training, and told also where the run ends with it."""

from __future__ import annotations

import math

import preloaded
import pytest
import torch
from agent.causes.conftest import Made, Net, linears
from agent_recorded import Recording
from builders import job_environment
from torch import nn
from torch.utils.checkpoint import checkpoint

NAN = math.nan


def spoil_head(job) -> None:
    with torch.no_grad():
        job.model.head.bias[0] = NAN


def test_one_bad_stretch_is_one_finding_and_three_the_most(train):
    job = train()
    job.guard = True
    for _ in range(5):
        job.steps(3)
        job.model.blocks[2].broken = NAN
        job.steps(6)
        job.model.blocks[2].broken = None
    assert [found["since_step"] for found in job.events("finding")] == [4, 13, 22]


@pytest.mark.parametrize("looks", ["bad losses", "a profile"])
def test_looking_changes_nothing_that_training_produces(record, looks):
    def trained(looked_at: bool) -> list:
        torch.manual_seed(3)
        model = Net()
        model.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        recorded = record(model) if looked_at else None
        losses = []
        for step in range(1, 15):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 8)).square().mean()
            if looks == "bad losses" and step in (5, 10):
                loss = loss * math.inf
            loss.backward()
            if not torch.isfinite(loss):
                optimizer.zero_grad()
            optimizer.step()
            losses.append(loss.item())
            if recorded is not None:
                if looks == "a profile" and step == 3:
                    options = {"steps": 5, "shapes": True, "memory": True, "python": True}
                    for callback in recorded.sender.on_command:
                        callback({"id": "c", "kind": "profile", "params": options})
                recorded.rows += recorded.sender.drain()
                recorded.sender.progress.links.investigator.poll()
        if recorded is not None:
            kinds = [kind for kind, data, _ in recorded.sender.events if kind == "finding" or "operators" in data]
            assert kinds == (["finding"] * 2 if looks == "bad losses" else ["profile"]), "it was looked into"
            recorded.finish()
        return [losses, [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()]

    (losses, tensors, random), (again, same, state) = trained(False), trained(True)
    assert losses == again
    assert all(torch.equal(one, other) for one, other in zip(tensors, same, strict=True))
    assert torch.equal(random, state)


# ---- models that are not looked into as others are


def test_a_checkpointed_model_is_not_run_again(train):
    calls = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return torch.tanh(job.model.embed(x))

    job = train(Made(lambda self, x: self.head(checkpoint(inner, x, use_reentrant=False)), **linears("embed", "head")))
    job.steps(5)
    job.spoil = lambda loss: loss * NAN
    job.steps(3)
    assert len(calls) == 2 * 8, "forward and recomputation, no third"
    assert "operator" not in job.finding()["evidence"]


# ---- runs that end with it, and guards before any backward pass


@pytest.mark.parametrize("logged", [False, True])
def test_a_run_that_ends_with_its_nan_tells_what_is_known(train, logged):
    """After a step, or without one where its loss was logged."""
    job = train()
    job.steps(5)
    spoil_head(job)
    if logged:
        job.run.log({"train/loss": job.model(torch.randn(6, 8)).square().mean().item()})
    else:
        job.step()
    job.recorded.finish()
    found = job.finding()["evidence"]
    assert (found["step"], found["cause"], found["parameter"]) == (6, "parameter", "head.bias")


SCRIPT = """
import os, sys, torch, perfagent

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
perfagent.attach(model, optimizer)

def train_one_epoch():
    for step in range(6):
        x = torch.ones(2, 4)
        loss = model(x).mean()
        if step == 5:
            loss = (loss * 0 - 1).log()
        if not torch.isfinite(loss):
            if os.environ["BY"] == "raise":
                raise FloatingPointError("the loss is no number")
            if os.environ["BY"] == "exit":
                exit(1)
            sys.exit(1 if os.environ["BY"] == "number" else "Loss is nan, stopping training")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

train_one_epoch()
"""


@pytest.mark.real
def test_a_guard_that_raises_or_exits_is_looked_into_there(tmp_path):
    """`print("Loss is nan, stopping training"); sys.exit(1)`, as the training scripts of many vision papers have it: before
    any backward pass."""
    ways = ("raise", "exit", "number", "text")
    (tmp_path / "train.py").write_text(SCRIPT)
    environments = [job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / by), BY=by) for by in ways]
    ended = preloaded.run([str(tmp_path / "train.py")], tmp_path, environments)
    assert [done.returncode for done in ended] == [1] * 4, ended
    for by in ways:
        (finding,) = Recording(tmp_path / by).events("finding")
        assert finding["explains"][-1] == "process_crash", "no row holds that loss: no other alert may say why it ended"
        found = finding["evidence"]
        assert (found["step"], found["cause"], found["operator"]["operator"], found["lr"]) == (
            6,
            "operator",
            "Log",
            0.01,
        ), by
        assert [tensor["name"] for tensor in found["batch"]["tensors"]] == ["x"]
