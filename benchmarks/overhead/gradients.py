"""What looking at gradients costs, perfagent beside wandb.watch: interleaved rounds, fresh processes, medians.

    PYTHONPATH=benchmarks:tests python benchmarks/overhead/gradients.py [--quick] [--rounds N] [--write]

A transformer of 306 parameter tensors. Every case runs in a process and a virtual environment of its own
(environments.py); inside it, blocks of steps with the measurement and without it take turns. Told is CPU of the
training thread, which holds on a busy machine, and of all other threads and child processes: of wandb the difference
between the blocks; of perfagent, whose passes are lost in the noise of steps thirty times as long, what its passes
themselves took. Then a step with and one without are run once more under a counter of ATen operations: on a GPU each is
at least one kernel launch, and each host read (`.item()`, `float()`, `bool()` of a tensor) is a wait for the device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = {
    "perfagent, norms, shares and NaN in every step": "perfagent",
    "perfagent, everything in every step": "perfagent",
    "perfagent, every tenth step": "perfagent",
    "wandb.watch, every step": "wandb",
    "wandb.watch, every tenth step": "wandb",
}
BLOCK = 10
NEVER = 10**12
SETTLE = 2  # steps of a block that are not counted: caches, and what the change itself costs


class Case:
    """One way of looking at gradients, on and off."""

    def __init__(self, name: str, model: Any, optimizer: Any, folder: Path) -> None: ...
    def on(self) -> None: ...
    def off(self) -> None: ...
    def after_step(self) -> None: ...

    def own_s(self) -> float | None:
        """CPU seconds of the training thread in the measurements so far, where they can be timed by themselves."""
        return None


class Perfagent(Case):
    """Hooks are in the whole time; only the passes over the gradients come and go."""

    def __init__(self, name: str, model: Any, optimizer: Any, folder: Path) -> None:
        import perfagent
        from perfagent.measure.gradient_schedule import GradientSchedule
        from perfagent.step.governor import Governor

        case = self
        self._own_s = 0.0

        class Timed(GradientSchedule):
            """What runs on the training thread, under its CPU clock. (Dead units are looked at inside of the model's
            call.)"""

            __slots__ = ()

            def measure(self, *args: Any, **kwargs: Any) -> None:
                begin = time.thread_time()
                super().measure(*args, **kwargs)
                case._own_s += time.thread_time() - begin

            def finish(self, *args: Any) -> None:
                begin = time.thread_time()
                super().finish(*args)
                case._own_s += time.thread_time() - begin

        class Every(Governor):
            """A period that is given, not one that the cost decides."""

            steps = 1

            def period(self, pass_ns: int, step_ns: int) -> int:
                return self.steps

        run = perfagent.attach(model, optimizer, project="bench")
        self._progress = run._progress
        self._progress.links.gradient_schedule = Timed(run._progress)
        self._progress.links.governor = Every(0.5)
        Every.steps = 10 if "tenth" in name else 1
        if "norms" in name:
            self._progress.links.gradient_schedule.deeper = 10**9
        elif "everything" in name:
            self._progress.links.gradient_schedule.deeper = 1
        self._due = 0

    def on(self) -> None:
        self._progress.measure_at = max(self._due, self._progress.completed)

    def off(self) -> None:
        if self._progress.measure_at < NEVER:
            self._due, self._progress.measure_at = self._progress.measure_at, NEVER
        self._progress.probe = None

    def own_s(self) -> float | None:
        return self._own_s


class WandbWatch(Case):
    """log() is called in every step, watched or not: what watch() adds is told."""

    def __init__(self, name: str, model: Any, optimizer: Any, folder: Path) -> None:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DISABLE_CODE="true")
        import wandb

        settings = wandb.Settings(x_disable_stats=True, console="off")
        self._run = wandb.init(project="bench", dir=str(folder), mode="offline", settings=settings)
        self._model, self._every = model, 10 if "tenth" in name else 1

    def on(self) -> None:
        self._run.watch(self._model, log="gradients", log_freq=self._every)

    def off(self) -> None:
        self._run.unwatch(self._model)

    def after_step(self) -> None:
        self._run.log({"step": 1.0})


def children_cpu_s() -> float:
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        total += sum(child.cpu_times()[:2])
    return total


def block(step: Callable[[], object], case: Case, steps: int) -> tuple[float, float, float]:
    """CPU seconds for one step: of the training thread, of everything else, and of the measurements by themselves."""
    for _ in range(SETTLE):
        step()
        case.after_step()
    own = case.own_s() or 0.0
    thread, process, children = time.thread_time(), time.process_time(), children_cpu_s()
    for _ in range(steps):
        step()
        case.after_step()
    mine = time.thread_time() - thread
    others = time.process_time() - process - mine + children_cpu_s() - children
    return mine / steps, others / steps, ((case.own_s() or 0.0) - own) / steps


def counted(step: Callable[[], object], case: Case) -> tuple[int, int]:
    """ATen operations of one step (views aside), and host reads among them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    views = {"detach", "view", "_unsafe_view", "reshape", "alias", "unbind", "select", "t", "slice", "expand", "empty"}
    views |= {"as_strided", "split_with_sizes"}

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[str(func.overloadpacket.__name__)] += 1
            return func(*args, **(kwargs or {}))

    with Count() as mode:
        step()
        case.after_step()
    reads = mode.seen["_local_scalar_dense"] + mode.seen["_to_copy"]
    return sum(n for name, n in mode.seen.items() if name not in views and name != "_local_scalar_dense"), reads


def child(name: str, blocks: int, out: Path) -> None:
    """The figures of one case, in this process."""
    import torch
    from workloads import make

    workload = make("deep")
    for _ in range(3):
        workload.step()
    case: Case = (Perfagent if CASES[name] == "perfagent" else WandbWatch)(
        name, workload.model, workload.optimizer, out
    )
    for _ in range(5):
        workload.step()
        case.after_step()
    with_it: list[tuple[float, float, float]] = []
    without: list[tuple[float, float, float]] = []
    floors: list[float] = []
    warm: list[float] = []
    gradients = [torch.randn_like(parameter) for parameter in workload.model.parameters()]
    floor = bare_pass(gradients)
    ours = own_pass(gradients) if CASES[name] == "perfagent" else None
    for number in range(blocks):
        for watched in (True, False) if number % 2 else (False, True):
            case.on() if watched else case.off()
            (with_it if watched else without).append(block(workload.step, case, BLOCK))
            floors += [floor() for _ in range(3)][1:]
            warm += [ours() for _ in range(3)][1:] if ours is not None else []
    case.on()
    most = max(counted(workload.step, case) for _ in range(11))
    case.off()
    least = min(counted(workload.step, case) for _ in range(3))
    thread = statistics.median(one for one, _, _ in with_it) - statistics.median(one for one, _, _ in without)
    if case.own_s() is not None:
        thread = statistics.median(own for _, _, own in with_it)  # a block holds one tenth step exactly
    others = statistics.median(other for _, other, _ in with_it) - statistics.median(other for _, other, _ in without)
    result = {
        "thread_us": thread * 1e6,
        "others_us": others * 1e6,
        "step_us": statistics.median(one for one, _, _ in without) * 1e6,
        "operations": most[0] - least[0],
        "reads": most[1] - least[1],
        "tensors": sum(1 for _ in workload.model.parameters()),
        "floor_us": statistics.median(floors) * 1e6,
        "warm_us": statistics.median(warm) * 1e6 if warm else float("nan"),
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


def bare_pass(gradients: list[Any]) -> Callable[[], float]:
    """CPU seconds of one `torch._foreach_norm` over the gradients and one stack: what a pass costs that does nothing
    else."""
    import torch

    def seconds() -> float:
        begin = time.thread_time()
        torch.stack(torch._foreach_norm(gradients))
        return time.thread_time() - begin

    return seconds


def own_pass(gradients: list[Any]) -> Callable[[], float]:
    """The same of perfagent's pass: norms, shares and NaN, from an optimizer to what the sender's thread is handed."""
    import torch
    from progress import new_progress

    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    progress = new_progress(deque())
    schedule = progress.links.gradient_schedule
    schedule.deeper = 10**9

    def seconds() -> float:
        begin = time.thread_time()
        schedule.measure(optimizer)
        taken = time.thread_time() - begin
        progress.gradients = None
        return taken

    for _ in range(3):  # the plan; and the second pass keeps the weights
        seconds()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works, not to quote")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--cases", default=";".join(CASES), help="some of them, with ; between")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "perfagent-bench")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.blocks, Path(tempfile.mkdtemp(prefix="perfagent-bench-")))
    import environments
    import tables
    from measure import live_server, run_child

    rounds = options.rounds or (1 if options.quick else 3)
    wanted = options.cases.split(";")
    if unknown := set(wanted) - set(CASES):
        parser.error(f"unknown cases {sorted(unknown)}; these are: {'; '.join(CASES)}")
    environments.build(options.folder, sorted({CASES[name] for name in wanted}))
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as scratch, live_server(Path(scratch)) as (url, _):
        for number in range(rounds):
            order = list(wanted)
            random.Random(number).shuffle(order)
            for name in order:
                print(f"  round {number + 1}: {name}", file=sys.stderr, flush=True)
                blocks = 4 if options.quick or "wandb" in name else options.blocks
                result = run_child(
                    "gradients.py",
                    ["--child", name, "--blocks", str(blocks)],
                    environment=environments.python(options.folder, CASES[name]),
                    server=url,
                    state=Path(scratch) / f"state-{number}-{name[:12]}",
                )
                figures[name] += [result] if result else []
    text = report(figures, rounds, tables.machine("torch"))
    print(text)
    if options.write:
        tables.replace("gradients", text)
    return 0 if all(figures.values()) else 1


def report(figures: dict[str, list[dict[str, float]]], rounds: int, machine: str) -> str:
    import tables

    def middle(results: list[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in results)

    every = [row for results in figures.values() for row in results]
    ours = [row["warm_us"] for name, results in figures.items() if CASES[name] == "perfagent" for row in results]
    step_us = middle(every, "step_us")
    rows = [
        [
            name,
            tables.figure(middle(results, "thread_us") / 1000),
            tables.figure(statistics.median(row["thread_us"] / row["floor_us"] for row in results)),
            tables.figure(100 * middle(results, "thread_us") / step_us),
            tables.figure(middle(results, "others_us") / 1000),
            f"{middle(results, 'operations'):.0f}",
            f"{middle(results, 'reads'):.0f}",
        ]
        for name, results in figures.items()
        if results
    ]
    head = [
        "gradients", "added CPU ms per step, training thread", "to one bare pass", "% of the step",
        "added CPU ms per step, other threads and processes", "ATen operations in a measured step",
        "host reads in a measured step",
    ]  # fmt: skip
    return "\n".join(
        [
            f"{machine}, one torch thread. {middle(every, 'tensors'):.0f} parameter tensors, 5 million numbers; a training step "
            f"takes {step_us / 1000:.1f} ms of CPU. Medians of {rounds} interleaved rounds. wandb 0.31.0.",
            "",
            tables.table(head, rows),
            "",
            f"One bare pass (`torch._foreach_norm` and `stack`, nothing else) takes {middle(every, 'floor_us') / 1000:.2f} ms in "
            "the same processes, between the blocks, with the gradients warm in the caches; perfagent finds them as the backward "
            "pass left them. Its pass over plain gradients is those two operations."
            + (
                f" Over gradients that are as warm as the bare pass's, perfagent's pass takes "
                f"{statistics.median(ours) / 1000:.2f} ms."
                if ours
                else ""
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
