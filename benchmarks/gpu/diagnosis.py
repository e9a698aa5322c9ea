"""Training jobs with an illness that only a GPU shows: what the rules make of their recordings.

    python diagnosis.py JOB FOLDER SECONDS [DEVICE]     one job, recorded into FOLDER

Each job trains for real, in a process of its own, and is ill on purpose. The recordings are then judged by
`perfagent diagnose`, which needs the server's packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Result, not_checked
from stage import Stage

HERE = Path(__file__).resolve().parent
GIB = 2**30
ALONGSIDE = {"splinters": 150, "leak": 330}
"""Seconds of the jobs that hardly use the GPU's time: they run beside the others."""
IN_TURN = {"reads": 40, "copies": 40, "loader": 40, "launches": 80}
LAST = {"grows": 60}  # takes all the memory
RULES = {
    "splinters": "gpu_fragmentation",
    "leak": "gpu_memory_leak",
    "reads": "sync_bound",
    "copies": "h2d_bound",
    "loader": "data_bound",
    "launches": "host_bound",
    "grows": "oom_imminent",
}


def check(stage: Stage) -> list[Result]:
    folders = {job: stage.recording(f"sick-{job}") for job in RULES}
    beside = [_start(stage, job, folders[job], seconds) for job, seconds in ALONGSIDE.items()]
    for job, seconds in IN_TURN.items():
        _start(stage, job, folders[job], seconds).wait()
    for process in beside:
        process.wait()
    for job, seconds in LAST.items():
        _start(stage, job, folders[job], seconds).wait()
    return [judged(stage, job, folder) for job, folder in folders.items()]


def _start(stage: Stage, job: str, folder: Path, seconds: int) -> subprocess.Popen[bytes]:
    length = "4" if stage.dry else str(seconds)
    return subprocess.Popen([sys.executable, __file__, job, str(folder), length, stage.device])


def judged(stage: Stage, job: str, folder: Path) -> Result:
    """What `perfagent diagnose` says of the recording of a job."""
    name, rule = f"diagnosis of a job that is ill: {job}", RULES[job]
    command = [sys.executable, "-m", "perfagent", "diagnose", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        return not_checked(name, f"no diagnosis: {done.stderr.strip().splitlines()[-1:]}")
    (run,) = json.loads(done.stdout)["runs"]
    if stage.dry:
        return Result(name, "a recording that is judged", f"{run['steps']} steps", "pass" if run["steps"] else "FAIL")
    alerts = {alert["rule"]: alert for alert in run["findings"]}
    others = [one for one, alert in alerts.items() if one != rule and alert["severity"] != "info"]
    note = f"also {', '.join(others)}" if others else ""
    found = alerts.get(rule)
    if found is None:
        return Result(name, rule, f"none in {run['steps']:,} steps", "FAIL", note)
    message = f"{rule} at step {found['first_step']:,}: {found['message']}"
    return Result(name, rule, message, "pass", note)


# ---- the jobs


class Job:
    """A small perceptron of some layers, and a clock."""

    def __init__(self, folder: str, seconds: float, device: str, *, width: int, layers: int, **optimizer: Any) -> None:
        import torch

        import perfagent

        torch.manual_seed(0)
        self.torch, self.device = torch, device
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*parts, torch.nn.Linear(width, 16)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **optimizer)
        self.run = perfagent.attach(self.model, self.optimizer, record=folder, project="gpu-check")
        self.width, self.until = width, time.monotonic() + seconds

    def goes_on(self) -> bool:
        """At least some steps, however busy the machine is."""
        return time.monotonic() < self.until or self.run.steps_done < 8

    def step(self, x: Any, y: Any) -> Any:
        loss = self.torch.nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def batch(self, rows: int, device: str | None = None) -> tuple[Any, Any]:
        where = device or self.device
        return self.torch.randn(rows, self.width, device=where), self.torch.randint(0, 16, (rows,), device=where)

    @property
    def memory_bytes(self) -> int:
        """Of the device; on a CPU, enough for a try."""
        return 64 * 2**20 if self.device == "cpu" else self.torch.cuda.get_device_properties(0).total_memory


def reads(*given: Any) -> None:
    """Counts hits sample by sample with .item()."""
    job = Job(*given, width=1024, layers=8)
    while job.goes_on():
        x, y = job.batch(256)
        job.step(x, y)
        with job.torch.no_grad():
            hits = job.model(x).argmax(1) == y
        sum(hit.item() for hit in hits)
    job.run.finish()


def copies(*given: Any) -> None:
    """Sends large batches from memory that is not pinned."""
    job = Job(*given, width=4096 if given[2] == "cuda" else 64, layers=2)
    batches = [job.batch(16_384, "cpu") for _ in range(4)]
    for number in range(10**9):
        if not job.goes_on():
            break
        x, y = batches[number % 4]
        job.step(x.to(job.device), y.to(job.device))
    job.run.finish()


def loader(*given: Any) -> None:
    """Prepares its samples in the main process."""
    job = Job(*given, width=1024, layers=8)
    torch = job.torch

    class Samples(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> tuple[Any, int]:
            x = torch.randn(job.width, generator=torch.Generator().manual_seed(index))
            for _ in range(10):
                x = torch.sort(x).values.roll(1)
            return x, index % 16

    for x, y in torch.utils.data.DataLoader(Samples(), batch_size=128, pin_memory=job.device == "cuda"):
        if not job.goes_on():
            break
        job.step(x.to(job.device, non_blocking=True), y.to(job.device, non_blocking=True))
    job.run.finish()


def launches(*given: Any) -> None:
    """Many kernels that are shorter than their launch."""
    job = Job(*given, width=64, layers=100, foreach=False, fused=False)
    x, y = job.batch(16)
    while job.goes_on():
        loss = job.step(x, y)
        if job.run.steps_done % 50 == 0:
            loss.item()
    job.run.finish()


def splinters(*given: Any) -> None:
    """Batches that grow: none fits where the one before lay, and the allocator keeps both."""
    job = Job(*given, width=256, layers=2)
    size, step = job.memory_bytes // 64, 0
    x, y = job.batch(64)
    while job.goes_on():
        step += 1
        grown = min(step, 20)
        scratch = job.torch.empty(size + grown * size // 12, dtype=job.torch.uint8, device=job.device)
        job.step(x, y)
        del scratch
        time.sleep(0.2)
    job.run.finish()


def leak(*given: Any) -> None:
    """Keeps what each step computed: slowly, as a list of outputs does."""
    job = Job(*given, width=256, layers=2)
    kept = []
    x, y = job.batch(64)
    while job.goes_on():
        job.step(x, y)
        kept.append(job.torch.zeros(job.memory_bytes // 8192, dtype=job.torch.uint8, device=job.device))
        time.sleep(0.2)
    job.run.finish()


def grows(*given: Any) -> None:
    """Keeps outputs with their graphs, as for a metric that is never computed, until the memory is full."""
    job = Job(*given, width=1024, layers=2)
    kept = []
    seconds = given[1]
    share = job.memory_bytes / (seconds / 0.06)  # full after about `seconds`
    rows = max(16, int(share / (4 * 1024 * 5)))
    x, y = job.batch(rows)
    while job.goes_on() or job.device == "cuda":
        job.step(x, y)
        kept.append(job.model(x))
        time.sleep(0.05)
    job.run.finish()


JOBS: dict[str, Callable[..., None]] = {
    made.__name__: made for made in (reads, copies, loader, launches, splinters, leak, grows)
}

if __name__ == "__main__":
    JOBS[sys.argv[1]](sys.argv[2], float(sys.argv[3]), *(sys.argv[4:] or ["cuda"]))
