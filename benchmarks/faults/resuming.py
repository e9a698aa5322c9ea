"""kill -9 of a training at random moments, then resume: are the losses those of a training that nobody interrupted?

    python resuming.py KIND FOLDER TRIALS SEED

KIND: plain, ddp, fsdp2, zero1, zero2, zero3; all but the first on two ranks. A program of its own, so that it can fork
trainings from one process that has imported torch once. Prints one line of JSON: trials, equal, resumed (went on from a
checkpoint), torn (killed while one was being written), problems.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a child would import later is imported once, here
import torch.distributed as dist
import torch.distributed.checkpoint.staging
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.loop import loop as make_loop

KINDS = ("plain", "ddp", "fsdp2", "zero1", "zero2", "zero3")
STEPS, MICRO, EPOCHS = 36, 2, 3


@dataclass
class Result:
    trials: int = 0
    equal: int = 0
    resumed: int = 0
    torn: int = 0
    problems: list[str] = field(default_factory=list)


# ---- the training, in a child


def build(kind: str, rank: int) -> tuple[Any, Any, Any]:
    """Model as it is wrapped, optimizer, scheduler."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if kind.startswith("zero"):
        return with_deepspeed(model, int(kind[-1]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)


def with_deepspeed(model: nn.Module, stage: int) -> tuple[Any, Any, Any]:
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO, "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    more: Any = {"config": config, "dist_init_required": False}
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, **more)[0], None, None


def train(kind: str, rank: int, world: int, folder: Path, log: Path, *, every: int, asynchronous: bool) -> None:
    if world > 1:
        store = dist.FileStore(str(folder / f"store-{os.getppid()}-{os.environ['ATTEMPT']}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, optimizer, scheduler = build(kind, rank)
    checkpoint = Checkpoint(folder / "saved", every=every, keep=2, asynchronous=asynchronous, emergency=False)
    how = {} if optimizer is None else {"grad_accum": MICRO, "clip_norm": 1.0}  # an engine has its own
    loop = make_loop(model, optimizer, scheduler, checkpoint=checkpoint, **how)
    start = loop.resume() or 0
    data = torch.Generator().manual_seed(5)
    rows = STEPS * MICRO * 4 * world // EPOCHS
    pairs = TensorDataset(torch.randn(rows, 8, generator=data), torch.randn(rows, 4, generator=data))
    sampler = DistributedSampler(pairs, world, rank, shuffle=True, seed=1) if world > 1 else None
    loader = DataLoader(pairs, batch_size=4, sampler=sampler, shuffle=sampler is None)
    if start == 0:
        torch.manual_seed(100 + rank)
        random.seed(rank)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(out, f"from {start}\n".encode())
    losses: list[str] = []
    for inputs, targets in loop.batches(loader, epochs=EPOCHS):
        with loop.forward():
            loss = (loop.model(inputs) - targets).square().mean() * (1.0 + 0.01 * random.random())
        loop.backward(loss)
        losses.append(loss.item().hex())
        # told before the checkpoint of this step can exist
        if len(losses) == MICRO:
            os.write(out, f"{loop.step_count + 1} {' '.join(losses)}\n".encode())
            losses.clear()
        loop.step()
    checkpoint.close()
    os.write(out, b"done\n")


# ---- the parent


def start(kind: str, folder: Path, attempt: int, **how: Any) -> list[int]:
    """A process for each rank, forked; their output goes to files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    world = 1 if kind == "plain" else 2
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid:
            children.append(pid)
            continue
        code = 1
        try:
            said = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.environ |= {
                "ATTEMPT": str(attempt),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
            }
            train(kind, rank, world, folder, folder / f"losses-{rank}-{attempt}.txt", **how)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return children


def ended(children: list[int], within_s: float) -> list[int]:
    """The exit codes; whoever is not done in time is killed."""
    codes, until = [], time.monotonic() + within_s
    for pid in children:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes.append(os.waitstatus_to_exitcode(status))
                break
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    return codes


def read_log(path: Path) -> tuple[int, dict[int, str], bool]:
    """Where it began, the losses by step, and whether it came to its end. A last line that was cut short does not
    count."""
    if not path.exists():
        return 0, {}, False
    lines = [line[:-1] for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    began = int(lines[0].split()[1]) if lines else 0
    rows = dict(line.split(" ", 1) for line in lines[1:] if line != "done")
    return began, {int(step): losses for step, losses in rows.items()}, bool(lines) and lines[-1] == "done"


def trial(kind: str, folder: Path, seeded: random.Random, expected: list[dict[int, str]], result: Result) -> None:
    how = {"every": seeded.randint(1, 4), "asynchronous": seeded.random() < 0.5}
    children = start(kind, folder, 1, **how)
    at_step, delay_s = seeded.randint(1, STEPS), seeded.random() * 0.004
    log = folder / "losses-0-1.txt"
    while os.waitpid(children[0], os.WNOHANG)[0] == 0 and max(read_log(log)[1], default=0) < at_step:
        time.sleep(0.001)
    time.sleep(delay_s)  # the moment within the step, by chance
    for pid in seeded.sample(children, len(children)):
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    result.torn += any((folder / "saved").glob("*.tmp"))
    codes = ended(start(kind, folder, 2, **how), 120.0)
    result.trials += 1
    problem = ""
    began_at = set()
    for rank, right in enumerate(expected):
        before = read_log(folder / f"losses-{rank}-1.txt")[1]
        began, after, done = read_log(folder / f"losses-{rank}-2.txt")
        began_at.add(began)
        wrong = [step for step, losses in [*before.items(), *after.items()] if right.get(step) != losses]
        if wrong or not done or sorted(after) != list(range(began + 1, STEPS + 1)):
            said = (folder / f"output-{rank}.txt").read_text()[-1500:]
            problem = f"{kind} {how} killed after step {at_step}: rank {rank} from {began}, {codes}, wrong {wrong[:5]}: {said}"
    result.resumed += max(began_at) > 0
    if problem or len(began_at) > 1:
        result.problems.append(problem or f"ranks began at {began_at}")
    else:
        result.equal += 1


def run(kind: str, folder: Path, trials: int, seed: int) -> Result:
    seeded, result = random.Random(seed), Result()
    codes = ended(start(kind, folder / "whole", 0, every=10**6, asynchronous=False), 120.0)
    expected = [read_log(folder / "whole" / f"losses-{rank}-0.txt")[1] for rank in range(len(codes))]
    if any(codes) or any(len(right) != STEPS for right in expected):
        said = (folder / "whole" / "output-0.txt").read_text()[-3000:]
        result.problems.append(f"the training without interruption failed with {codes}: {said}")
        return result
    for number in range(trials):
        trial(kind, folder / f"trial-{number}", seeded, expected, result)
    return result


def main() -> None:
    kind, folder, trials, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    if kind.startswith("zero"):
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
    print(json.dumps(asdict(run(kind, folder, trials, seed))))


if __name__ == "__main__":
    main()
