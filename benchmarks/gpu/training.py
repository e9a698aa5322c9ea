"""The training that is watched: a decoder-only transformer as people train them, with a loader, autocast and AdamW.

Run as a program it is one training process that obeys its standard input, a word a line, and answers in JSON:

    python training.py '{"size": "real", "device": "cuda", "record": FOLDER or null, "deterministic": false}'

    block N     N steps, waited for at the end: {"wall_s", "cpu_s" (of this thread), "losses" (if deterministic)}
    load S      steps for S seconds, told when they begin and end: {"begin", "end", "steps"} in Unix seconds
    end         finishes the run
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SIZES", "Child", "Recording", "Size", "Training", "flops_of_step", "recorded"]

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of one batch."""

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    vocabulary: int


SIZES = {
    "real": Size(1024, 24, 16, 1024, 16, 50_304),  # 354 million parameters, 16,384 tokens a step
    "small": Size(256, 4, 4, 256, 8, 8192),  # as long as it takes to launch its kernels
    "tiny": Size(32, 2, 2, 16, 2, 64),  # for a dry run on a CPU
}


def flops_of_step(size: Size) -> float:
    """Multiplications and additions of one forward and backward pass by the textbook: matrix products, and causal
    attention's pairs of positions. Backward is twice forward."""
    tokens = size.batch * size.length
    products = 2 * tokens * (12 * size.layers * size.width**2 + size.width * size.vocabulary)
    pairs = size.length * (size.length + 1) / 2
    attention = size.layers * 2 * 2 * size.batch * pairs * size.width
    return 3.0 * (products + attention)


class Training:
    """A model with everything that its steps need. Torch is imported here, not before."""

    def __init__(self, size: Size, device: str, *, deterministic: bool = False) -> None:
        import torch

        self.torch, self.size, self.device, self.deterministic = torch, size, device, deterministic
        torch.manual_seed(0)
        if deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(False)
        if device == "cpu":
            torch.set_num_threads(1)
        self.model = _transformer(torch, size).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.batches = self._endless()
        self.losses: list[Any] = []
        self.done = 0

    def _endless(self) -> Iterator[Any]:
        torch, size = self.torch, self.size
        tokens = torch.randint(
            0, size.vocabulary, (64 * size.batch, size.length + 1), generator=torch.Generator().manual_seed(1)
        )
        data = [{"input_ids": row} for row in tokens]
        order = torch.Generator().manual_seed(2)
        loader = torch.utils.data.DataLoader(
            data, batch_size=size.batch, shuffle=True, generator=order, pin_memory=self.device == "cuda", drop_last=True
        )
        while True:
            yield from loader

    def step(self, *, annotated: bool = False) -> Any:
        """One step; never waits for the device. annotated: names its phases for the profiler."""
        torch = self.torch
        name = torch.profiler.record_function if annotated else _nothing
        tokens = next(self.batches)["input_ids"].to(self.device, non_blocking=True)
        with name("check forward"), torch.autocast(self.device, torch.bfloat16):
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        with name("check backward"):
            loss.backward()
        with name("check optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.deterministic:
            self.losses.append(loss.detach())
        self.done += 1
        return loss

    def warm_up(self, steps: int, seconds: float) -> None:
        """At least so many steps and so long: until what happens once in a run has happened."""
        until = time.monotonic() + seconds
        while self.done < steps or time.monotonic() < until:
            self.step()
            if self.done % 8 == 0:
                self.wait()
        self.wait()

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class _nothing:  # noqa: N801 - stands for a context manager of that spelling
    def __init__(self, _name: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_error: object) -> None: ...


def _transformer(torch: Any, size: Size) -> Any:
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
            self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
            self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            parts = self.qkv(self.norm1(x)).view(batch, length, 3, size.heads, -1).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
            self.blocks = nn.ModuleList(Block() for _ in range(size.layers))
            self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    return Transformer()


# ---- what was recorded


@dataclass(slots=True)
class Recording:
    """Of one process. series: name -> [(step, Unix seconds, value)]; events: (kind, step, data)."""

    series: dict[str, list[tuple[int, float, float]]]
    events: list[tuple[str, int | None, dict[str, Any]]]

    def values(
        self, name: str, *, steps: tuple[int, int] | None = None, times: tuple[float, float] | None = None
    ) -> list[float]:
        """Finite values of a series, of the steps or times from..to, both inclusive."""
        found = self.series.get(name, [])
        if steps is not None:
            found = [row for row in found if steps[0] <= row[0] <= steps[1]]
        if times is not None:
            found = [row for row in found if times[0] <= row[1] <= times[1]]
        return [value for _, _, value in found if math.isfinite(value)]


def recorded(folder: Path) -> Recording:
    """What lies in the folder of one recording process. Reads a copy: reading a spool takes its frames away."""
    from perfagent.delivery.spool import Spool

    recording = Recording({}, [])
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        for source in sorted(Path(copy).iterdir()):
            spool = Spool.open(source, recording=True)
            while (outgoing := spool.next()) is not None:
                for group in outgoing.groups:
                    for name in group.values:
                        rows = zip(group.steps(), group.times(), group.column(name), strict=True)
                        recording.series.setdefault(name, []).extend(rows)
                recording.events += [(event.kind, event.step, event.data) for event in outgoing.events]
                spool.ack(outgoing.seq)
            spool.abandon()
    return recording


# ---- as a process of its own


class Child:
    """A training process. record: folder that it records into; None: without the agent."""

    def __init__(self, size: str, device: str, *, record: Path | None, deterministic: bool = False) -> None:
        given = {
            "size": size,
            "device": device,
            "record": str(record) if record else None,
            "deterministic": deterministic,
        }
        command = [sys.executable, str(HERE / "training.py"), json.dumps(given)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, order: str) -> dict[str, Any]:
        self.tell(order)
        return self._answer()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the training process ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self.tell("end")
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    given = json.loads(sys.argv[1])
    training = Training(SIZES[given["size"]], given["device"], deterministic=given["deterministic"])
    run = None
    if given["record"]:
        import perfagent

        run = perfagent.attach(training.model, training.optimizer, record=given["record"], project="gpu-check")

    def answer(told: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()

    answer({"ready": True})
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "end":
            break
        training.wait()
        began, wall, cpu = time.time(), time.perf_counter(), time.thread_time()
        steps = 0
        if word == "block":
            for _ in range(int(number)):
                training.step()
            steps = int(number)
        else:
            while time.perf_counter() < wall + float(number):
                loss = training.step()
                steps += 1
                # what is told of each step, such as its energy, counts the steps that the host has begun
                if steps % 2 == 0:
                    loss.item()
        training.wait()
        told: dict[str, Any] = {"wall_s": time.perf_counter() - wall, "cpu_s": time.thread_time() - cpu, "steps": steps}
        told |= {"begin": began, "end": time.time()}
        if training.deterministic:
            told["losses"] = [loss.item().hex() for loss in training.losses]
        answer(told)
    if run is not None:
        run.finish()


if __name__ == "__main__":
    main()
