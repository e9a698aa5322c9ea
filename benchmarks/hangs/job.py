"""One rank of a short data-parallel training on gloo, with one fault or one pause: `job.py KIND RANK SEED FOLDER`.

Steps of about 50 ms; after the twelfth, the rank named has its fault, or makes a pause that is longer than a hang may
take to be told. The end of each step is written to FOLDER/RANK.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS, AT = 24, 12
PAUSE_S = 17.0  # and a second more for each of the seed's next five
SIZE = 1_000_000


class Rows(Dataset[Tensor]):
    """stuck: the row whose worker waits for a lock that nobody lets go; slow_s: what a worker computes when it starts."""

    def __init__(self, stuck: int = -1, slow_s: float = 0.0) -> None:
        self.stuck, self.slow_s = stuck, slow_s

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, row: int) -> Tensor:
        if row == self.stuck:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if self.slow_s:
            work(self.slow_s)
            self.slow_s = 0.0
        return torch.full((64,), row / 1e4)


class SlowFile(io.BytesIO):
    def write(self, data: object) -> int:
        time.sleep(0.4)
        return super().write(data)  # type: ignore[arg-type]


class Job:
    def __init__(self, kind: str, rank: int, seed: int, folder: Path) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.kind, self.chosen, self.seed = kind, rank, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        pair = sorted({rank, (rank + 1) % self.world})
        self.pair, self.is_paired = dist.new_group(pair), self.rank in pair
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batches = iter(self.loader(AT if kind == "loader" and self.is_chosen else -1))
        self.ends = (folder / str(self.rank)).open("w", buffering=1)

    @property
    def is_chosen(self) -> bool:
        return self.rank == self.chosen

    def loader(self, stuck: int = -1, slow_s: float = 0.0) -> DataLoader[Tensor]:
        return DataLoader(Rows(stuck, slow_s), batch_size=1, num_workers=1, prefetch_factor=2)

    def run(self) -> None:
        for step in range(STEPS):
            if step == AT and self.kind in PAUSES:
                if self.is_chosen or self.seed % 2:
                    PAUSES[self.kind](self, PAUSE_S + self.seed % 5)
                dist.barrier()
            self.step(step)
            self.ends.write(f"{time.time()}\n")
        dist.barrier()
        dist.destroy_process_group()

    def step(self, step: int) -> None:
        fault = FAULTS.get(self.kind) if step == AT and self.is_chosen else None
        batch = next(self.batches)
        time.sleep(0.03)
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        if fault is not None and fault(self, loss):
            return
        loss.backward()
        if self.is_paired and step % 3 == 0:  # AT is such a step
            dist.all_reduce(torch.ones(SIZE), group=self.pair)
        self.gather(loss)
        self.optimizer.step()

    def gather(self, loss: Tensor) -> None:
        """What every rank calls in every step: one of two collectives, by the seed."""
        if self.seed % 2:
            dist.all_gather([torch.zeros(1) for _ in range(self.world)], loss.detach().reshape(1))
        else:
            dist.barrier()


# ---- faults: whether the step is done


def stopped(_: Job, __: Tensor) -> bool:
    os.kill(os.getpid(), signal.SIGSTOP)
    return False


def waiting(job: Job, _: Tensor) -> bool:
    reader, _ = os.pipe()
    lock = threading.Lock()
    lock.acquire()
    waits: tuple[Callable[[], object], ...] = (lambda: time.sleep(600), lock.acquire, lambda: os.read(reader, 1))
    waits[job.seed % 3]()
    return False


def missing(job: Job, loss: Tensor) -> bool:
    loss.backward()
    job.optimizer.step()
    return True


def reordered(job: Job, loss: Tensor) -> bool:
    job.gather(loss)
    return False


def shape(job: Job, loss: Tensor) -> bool:
    loss.backward()
    dist.all_reduce(torch.ones(2 * SIZE), group=job.pair)
    return False


FAULTS: dict[str, Callable[[Job, Tensor], bool]] = {
    "stopped": stopped, "waiting": waiting, "missing": missing, "reordered": reordered, "shape": shape,
    "loader": lambda _, __: False,
}  # fmt: skip


# ---- pauses


def work(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.rand(200, 200).matmul(torch.rand(200, 200))


def save(job: Job, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.save(job.model.state_dict(), SlowFile())


def evaluation(job: Job, seconds: float) -> None:
    until, model = time.monotonic() + seconds, job.model.module
    model.eval()
    with torch.no_grad():
        while time.monotonic() < until:
            model(torch.rand(64, 64))
            time.sleep(0.2)
    model.train()


def compiling(_: Job, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch._dynamo.reset()
        torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), backend="aot_eager")(torch.rand(2, 8))


def garbage(_: Job, seconds: float) -> None:
    until, kept = time.monotonic() + seconds, [[[number]] for number in range(1_500_000)]
    while time.monotonic() < until:
        gc.collect()
    del kept


def epoch(job: Job, seconds: float) -> None:
    job.batches = iter(job.loader(slow_s=seconds))
    next(job.batches)


def upload(_: Job, seconds: float) -> None:
    """By another thread, for which this one waits."""
    until = time.monotonic() + seconds

    def parts() -> None:
        with tempfile.TemporaryFile() as file:
            while time.monotonic() < until:
                file.write(bytes(SIZE))
                time.sleep(0.2)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(parts).result()


PAUSES: dict[str, Callable[[Job, float], None]] = {
    "save": save, "evaluation": evaluation, "compile": compiling, "gc": garbage, "epoch": epoch, "upload": upload,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    Job(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])).run()
