"""What each hook of `attach` adds where it stands, around a body that does nothing: the hook itself, to a tenth of a
microsecond.

Caches are warm here, which they are not in a training step (timing.py measures that). Four places, each with the
agent's hook, with nothing, and with a bare clock read: the root model's call, `torch.autograd.backward`, an optimizer's
step, a loader's next. Blocks in turn, least of many: `..._us` is what the hook adds, `..._stamp_us` what a clock read
with an append adds there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from blocks import block_us
from timing import NoOptimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

import perfagent
from perfagent import patching
from perfagent.step.state import state


class Nothing(torch.nn.Module):
    """A model whose forward pass is no work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class Endless(_BaseDataLoaderIter):
    """A loader's iterator with nothing behind it."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch

    def __next__(self) -> torch.Tensor:
        return self.batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = Nothing()
    optimizer = NoOptimizer(model.parameters())
    batch, loss = torch.ones(8, 4), torch.ones((), requires_grad=True)
    backward = torch.autograd.backward
    run = perfagent.attach(model, optimizer, project="bench")
    for _ in range(20):  # the first steps look for the model
        (model(batch).sum() * model.weight).backward()
        optimizer.step()
    progress = state.current
    assert progress is not None
    stamps: deque[int] = deque(maxlen=1000)

    def stamp(*_: Any) -> None:
        stamps.append(time.perf_counter_ns())

    def no_backward(*_: Any, **__: Any) -> None: ...

    def stamped_backward(*_: Any, **__: Any) -> None:
        stamp()
        stamp()

    def undo() -> None:
        state.current = None
        patching.remove()
        run._trained.take_off()

    def with_agent() -> Callable[[], None]:
        torch.autograd.backward = no_backward
        patching.install()
        run._trained.watch()
        state.current = progress
        progress.measure_at = 2**60  # gradients are a matter of the governor's, measured elsewhere
        return undo

    def with_nothing() -> Callable[[], None]:
        torch.autograd.backward = no_backward
        return lambda: None

    def with_stamps() -> Callable[[], None]:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        torch.autograd.backward = stamped_backward
        handles = [
            register_optimizer_step_pre_hook(stamp),
            register_optimizer_step_post_hook(stamp),
            model.register_forward_pre_hook(stamp),
            model.register_forward_hook(stamp),
        ]
        return lambda: [handle.remove() for handle in handles] and None

    def loss_backward() -> None:
        progress.plain = True  # as after an ordinary step
        torch.autograd.backward(loss)

    iterator = Endless(batch)
    timed = patching.watch_next(Endless.__next__)  # the hook stands on the base class, whose own next is no empty body

    def fetch() -> None:
        (timed if state.current is not None else Endless.__next__)(iterator)

    places: dict[str, Callable[[], object]] = {
        "forward": lambda: model(batch),
        "backward": loss_backward,
        "optimizer": optimizer.step,
        "data": fetch,
    }
    undo()
    least: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for how, install in (("agent", with_agent), ("nothing", with_nothing), ("stamp", with_stamps)):
            take_out = install()
            for place, call in places.items():
                least[place, how] = min(block_us(call), least.get((place, how), 1e9))
                progress.trace.clear()
                progress.roots = 0
            take_out()
    torch.autograd.backward = backward
    result = {f"{place}_us": least[place, "agent"] - least[place, "nothing"] for place in places}
    result |= {
        f"{place}_stamp_us": least[place, "stamp"] - least[place, "nothing"] for place in places if place != "data"
    }
    result["sum_us"] = sum(result[f"{place}_us"] for place in places)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
