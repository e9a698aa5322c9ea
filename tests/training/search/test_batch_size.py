"""The batch-size finder: the exact size, whole steps, and nothing left behind."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import free_port, job_environment
from preloaded import run
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

import perfagent
from perfagent.errors import ConfigError
from perfagent.training.search.batch_size import find_batch_size, search_batch_size
from perfagent.training.search.host_memory import HostMemory, available_bytes

HERE = Path(__file__).parent


class Training:
    """Everything that a step can change: weights, running statistics, moments, a schedule, a scale, an average,
    generators."""

    def __init__(self, room: int) -> None:
        torch.manual_seed(4)
        self.room, self.sizes = room, []  # type: ignore[var-annotated]
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self, size: int) -> None:
        self.sizes.append(size)
        self.model.train()
        # one more row than asked for: BatchNorm1d refuses a single one
        inputs = torch.randn(size + 1, 6) * random.random() * float(np.random.rand())
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        if size > self.room:  # in the middle of the step: gradients are there, the optimizer has not run
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)

    def state(self) -> str:
        parts: list[Any] = [{name: tensor.tolist() for name, tensor in self.model.state_dict().items()}]
        parts += [{name: tensor.tolist() for name, tensor in self.average.state_dict().items()}]
        parts += [[None if p.grad is None else p.grad.tolist() for p in self.model.parameters()], self.model.training]
        parts += [repr(self.optimizer.state_dict()), self.schedule.state_dict(), self.scaler.state_dict()]
        parts += [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
        return repr(parts)


def test_the_size_is_exact_and_found_by_doubling_and_halving() -> None:
    training = Training(room=37)
    found, trials = search_batch_size(training.step, 2, 4096)
    assert found == 37
    assert [trial.batch_size for trial in trials] == [2, 4, 8, 16, 32, 64, 48, 40, 36, 38, 37, 37]
    assert [trial.batch_size for trial in trials if not trial.fits] == [64, 48, 40, 38]
    assert training.sizes[:2] == [2, 2]  # the optimizer has no state before its first step
    assert training.sizes[-2:] == [37, 37]


@pytest.mark.parametrize(
    ("room", "start", "limit", "found"), [(1, 1, 64, 1), (2, 1, 64, 2), (99, 1, 64, 64), (99, 5, 5, 5), (99, 3, 50, 50)]
)
def test_the_answer_lies_between_start_and_limit(room: int, start: int, limit: int, found: int) -> None:
    assert find_batch_size(Training(room).step, start, limit) == found


@pytest.mark.parametrize("stepped_before", [False, True])
def test_everything_is_as_it_was(stepped_before: bool) -> None:
    training = Training(room=9)
    if stepped_before:
        training.step(4)
        (training.model(torch.ones(2, 6)).sum()).backward()  # a gradient that the user keeps
        training.model.eval()
    before, tensors = training.state(), [id(p) for p in training.model.parameters()]
    assert find_batch_size(training.step, limit=64) == 9
    assert training.state() == before
    assert [id(p) for p in training.model.parameters()] == tensors


def test_training_goes_on_bit_for_bit_as_if_nothing_had_been_searched() -> None:
    random.seed(1)
    np.random.seed(1)
    plain = Training(room=9)
    for _ in range(3):
        plain.step(8)
    plain_after = plain.state()
    random.seed(1)
    np.random.seed(1)
    searched = Training(room=9)
    find_batch_size(searched.step, limit=64)
    for _ in range(3):
        searched.step(8)
    assert searched.state() == plain_after


def test_a_function_that_hides_its_model_is_restored_too() -> None:
    """Nothing leads from the step to the model but a module's registry: the hooks see it all the same."""
    registry = sys.modules[__name__].__dict__.setdefault("_registry", {})
    registry["model"] = model = nn.Linear(3, 3)
    registry["optimizer"] = optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]

    def step(size: int) -> None:
        hidden: Any = sys.modules[__name__]
        hidden._registry["model"](torch.ones(size, 3)).sum().backward()
        hidden._registry["optimizer"].step()

    try:
        assert find_batch_size(step, limit=8) == 8
    finally:
        # an optimizer that lives on, and never steps, would pass for the one that counts in other tests
        registry.clear()
    assert all(torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("where", ["default", "keyword-only default", "closure", "global"])
def test_a_schedule_is_restored_wherever_the_step_has_it_from(where: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def train(size: int, schedule: Any) -> None:
        model(torch.ones(size, 3)).sum().backward()
        optimizer.step()
        schedule.step()

    def by_default(size: int, schedule: Any = schedule) -> None:
        train(size, schedule)

    def by_keyword(size: int, *, schedule: Any = schedule) -> None:
        train(size, schedule)

    def by_closure(size: int) -> None:
        train(size, schedule)

    found: dict[str, Any] = {"train": train, "schedule": schedule}
    exec("def by_global(size): train(size, schedule)", found)  # globals without a __name__: the function has no module
    steps = {
        "default": by_default,
        "keyword-only default": by_keyword,
        "closure": by_closure,
        "global": found["by_global"],
    }
    assert find_batch_size(steps[where], limit=8) == 8
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)


def test_a_step_may_name_what_is_only_assigned_later() -> None:
    training = Training(room=9)
    before = training.state()

    def step(size: int) -> None:
        training.step(size)
        if size > 1000:
            print(later)

    assert find_batch_size(step, limit=4) == 4
    assert training.state() == before
    later = "now"


def test_no_hook_stays_and_errors_go_through_with_everything_restored() -> None:
    training = Training(room=9)
    before = training.state()
    hooks = len(hooks_of_modules._global_forward_pre_hooks), len(hooks_of_optimizers._global_optimizer_pre_hooks)

    def step(size: int) -> None:
        training.step(size)
        if size == 4:
            raise ZeroDivisionError("a bug of the user's")

    with pytest.raises(ZeroDivisionError, match="a bug of the user's"):
        find_batch_size(step)
    assert training.state() == before
    assert (
        len(hooks_of_modules._global_forward_pre_hooks),
        len(hooks_of_optimizers._global_optimizer_pre_hooks),
    ) == hooks


def test_the_running_job_hears_nothing_of_the_search(tmp_path: Path) -> None:
    training = Training(room=9)
    run = perfagent.attach(training.model, training.optimizer, record=tmp_path)
    try:
        find_batch_size(training.step, limit=16)
        assert run._progress.completed == 0
        training.step(4)
        assert run._progress.completed == 1
    finally:
        run.finish()


@pytest.mark.long
def test_memory_that_really_ends_is_survived_and_given_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "limited_job.py"), "limited"], capture_output=True, text=True, timeout=120, check=False,
        env=job_environment(tmp_path, MALLOC_ARENA_MAX="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert 6 <= seen["found"] <= 30, seen  # 4 MiB a sample in the forward pass, some of it again in the backward pass
    assert seen["failed"], seen
    assert min(seen["failed"]) == seen["found"] + 1
    assert seen["same"]
    assert seen["generator"]
    assert seen["state"] == 0
    assert seen["large_tensors"] == 0
    # a third of one step of that size: what many steps had was given back
    assert seen["grown_mb"] < 4 * seen["found"] / 3, seen


def test_ranks_try_the_same_sizes_and_a_step_that_communicates_is_refused(tmp_path: Path) -> None:
    port = str(free_port())
    environments = [
        job_environment(tmp_path / rank, RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in ("0", "1")
    ]
    ended = run([str(HERE / "limited_job.py"), "ranks"], tmp_path, environments)
    assert [one.returncode for one in ended] == [0, 0], "".join(one.stderr[-2000:] for one in ended)
    first, second = (json.loads(one.stdout) for one in ended)
    assert first["found"] == second["found"] == 5
    assert first["tried"] == second["tried"]
    assert "model.module" in first["refused"]
    assert "model.module" in second["refused"]


def test_a_host_that_would_be_filled_is_not_tried() -> None:
    host = HostMemory()
    room = available_bytes()
    assert room is not None
    host._took = {8: room // 8, 16: room // 4}
    assert not host.would_not_hold(32, 0.9)
    assert host.would_not_hold(64, 0.9)
    host = HostMemory()
    host.begin()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    peak = host.end(4)
    assert peak is not None
    assert host._took[4] == pytest.approx(64 * 2**20, rel=0.2)  # seen though it is gone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((7,), "a function of a batch size"),
        ((print, 0), "start"),
        ((print, 1, 2.5), "limit"),
        ((print, 8, 4), "below start"),
    ],
)
def test_wrong_use_is_said(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_batch_size(*arguments)


def test_a_start_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="perfagent estimate"):
        find_batch_size(Training(room=3).step, start=4)
    with pytest.raises(ConfigError, match="load_state_dict"):
        find_batch_size(Training(room=3).step, restore=[object()])


def test_what_nothing_leads_to_can_be_named() -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    kept, counts = Counter(), {id(Counter): 0}

    def step(size: int, of: Tensor = torch.ones(1)) -> None:  # noqa: B008
        counts[id(Counter)] += size
        next(one for one in [kept]).count += 1

    assert find_batch_size(step, limit=4, restore=[kept]) == 4
    assert kept.count == 0
