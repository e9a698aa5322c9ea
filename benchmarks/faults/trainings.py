"""The same small training under every fault that can be done to a process: what is broken, and how, by row.

`run(folder)` trains once without the agent and once per case with it, and says of each what differed: the losses bit by
bit, the exit code, what was printed, the time to the end, and what of the run is neither stored nor in the spool.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from builders import free_port, job_environment
from faults.accounts import left_in
from faults.proxy import Proxy
from faults.training import EXIT_CODE, STEPS
from ingest_server import IngestServer, Scripted

from perfagent.wire import Frame, Group

HERE = Path(__file__).resolve().parent
EXIT_S = 2.3  # two seconds, and what noticing the end takes


@dataclass(frozen=True, slots=True)
class Case:
    """server: which one of `_servers`. kept: whether every logged value must be on the server or in the spool
    afterwards. warns: whether the agent must print something. misuses: different wrong calls, each of which prints one
    line."""

    row: str
    what: str
    server: str = "good"
    env: dict[str, str] = field(default_factory=dict)
    before: str = ""
    during: str = ""
    kept: bool = True
    warns: bool = False
    misuses: int = 0
    exit_code: int = EXIT_CODE

    @property
    def name(self) -> str:
        return f"{self.row}-{self.what}".replace(" ", "-")


FAKE_NVML = """
import sys, time, types
import perfagent.samplers.gpu.nvml as library
library._DRIVER_FILES = ("/proc/self/stat",)
class NVMLError(Exception):
    value = 15
def lost(*_):
    raise NVMLError("GPU is lost")
fake = types.ModuleType("pynvml")
fake.NVMLError = NVMLError
fake.nvmlInit = {init}
fake.nvmlDeviceGetCount = lambda: 1
fake.nvmlDeviceGetHandleByIndex = lambda index: index
fake.__getattr__ = lambda name: lost
sys.modules["pynvml"] = fake
"""
SMALL_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))"
NO_THREAD = """
import threading
start = threading.Thread.start
def refuse(self):
    if self.name.startswith({name!r}):
        raise RuntimeError("can't start new thread")
    start(self)
threading.Thread.start = refuse
"""
SLOW_NAMES = """
import socket, time
def slow(*_, **__):
    time.sleep(20)
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
socket.getaddrinfo = slow
"""
JUMPING = """
import time
real, calls = time.time, []
def jumping():
    calls.append(0)
    return real() + (86400 if len(calls) // 50 % 2 else -86400)
time.time = jumping
"""
ODD_VALUES = """
import numpy, torch
for name, value in {"none": None, "text": "1.0", "complex": 1j, "nan": float("nan"), "inf": 1e400, "big": 2**70, "huge": 10**5000,
    "object": object(), "list": [1.0], "bfloat": torch.tensor(1.5, dtype=torch.bfloat16), "numpy": numpy.float16(0.5),
    "array": numpy.ones(3), "vector": torch.ones(3), "complex tensor": torch.tensor(1j)}.items():
    run.log({name: value, "fine": 1.0}, step=step)
class Hostile:
    def __str__(self): raise ValueError("no")
    __hash__ = object.__hash__
    def __eq__(self, other): raise ValueError("no")
run.log({Hostile(): 1.0}); run.log({10**5000: 1.0}); run.log("no dict"); run.log(None); run.log({"x": 1.0}, step="one")
run.alert(Hostile.__name__, text=10**100, level=object())
run._sender.event("state", {"state": "running", "config": {"x": 10**5000}})
"""
ODD_NAMES = """
run.log({"": 1.0, "x" * 10_000: 2.0, "\\ud800": 3.0, "a\\0b": 4.0, "../../etc/passwd": 5.0, "<script>": 6.0,
    "\\u202eabc": 7.0, 7: 8.0, None: 9.0, ("a", 1): 10.0} | {f"many/{step}/{n}": 1.0 for n in range(1000)}, step=step)
"""
FORKING = """
import os
child = os.fork()
if child == 0:
    run.log({"child": 1.0}); run.alert("from a child"); run.finish()
    os._exit(0)
os.waitpid(child, 0)
"""
FEW_FILES = """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if step == 10:
    run._sender.settled.wait(20)
    lowest = os.dup(0); os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
if step == 30:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft * 100 if hard < 0 else hard, hard))
"""
CTRL_C = """
if step == 30:
    def stop(_): raise KeyboardInterrupt
    model[0].weight.register_hook(stop)
"""


def raising(module: str, name: str, error: str) -> str:
    """Code that puts a function which raises in the place of one of ours."""
    return f"import perfagent.{module} as module\ndef broken(*_, **__): raise {error}\nmodule.{name} = broken"


CASES = (
    Case("a01", "no server", server="dead", warns=True),
    Case("a02", "a server that stands still", server="still"),
    Case("a03", "a slow server", server="slow"),
    Case("a04", "cut connections", server="cutting"),
    Case("a06", "429 with an absurd pause", server="429"),
    Case("a07", "413", server="413"),
    Case("a08", "422", server="422", kept=False, warns=True),
    Case("a09", "401", server="401", warns=True),
    Case("a10", "html", server="html", warns=True),
    Case("a13", "ctrl-c in a callback", during=CTRL_C, exit_code=-2),
    Case("a14", "forks", during=FORKING),
    Case("a15", "files of at most 4 kB", server="dead", before=SMALL_FILES, kept=False),
    Case("a15", "no folder", env={"XDG_STATE_HOME": "/proc/nowhere"}, warns=True),
    Case("a15", "no more open files", during=FEW_FILES),
    Case("a16", "a broken spool", before="", kept=True),
    Case("a17", "the spool of the others"),
    Case("a18", "a clock that jumps", before=JUMPING),
    Case("a19", "values that are no numbers", during=ODD_VALUES, warns=True, misuses=6),
    Case("a20", "names from hell", during=ODD_NAMES, warns=True, misuses=5),
    Case("a21", "a thread that raises", before=raising("delivery.spool", "Spool.next", "ValueError"), kept=False, warns=True),
    Case("a21", "no memory", before=raising("delivery.spool", "Spool.append", "MemoryError"), kept=False, warns=True),
    Case("a21", "a source that exits", during="import sys\nrun._sender.add_source(lambda: sys.exit(9))"),
    Case("a21", "no thread", before=NO_THREAD.format(name="perfagent"), kept=False, warns=True),
    Case("a21", "no courier", before=NO_THREAD.format(name="perfagent-courier"), warns=True),
    Case("a22", "no NVML", before=FAKE_NVML.format(init="lost")),
    Case("a22", "an NVML that hangs", before=FAKE_NVML.format(init="lambda: time.sleep(60)")),
    Case("a22", "a lost GPU", before=FAKE_NVML.format(init="lambda: None")),
    Case("a22", "no access", before=raising("samplers.host", "HostReader.read", "PermissionError")),
    Case("a23", "a hook that raises", before=raising("hooks.backward", "_root", "ValueError"), warns=True),
    Case("a23", "no GradScaler", before="import torch\ndel torch.amp.GradScaler, torch.cuda.amp.GradScaler"),
    Case("a24", "slow names", server="name", before=SLOW_NAMES),
    Case("a24", "a proxy in the environment", env={"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}),
    Case("a24", "IPv6 only", server="ipv6", warns=True),
)  # fmt: skip


@contextmanager
def _servers() -> Iterator[tuple[dict[str, str], list[IngestServer]]]:
    """name -> address of every server, and those that store."""
    rules = {
        "slow": Scripted(delay_s=30.0),
        "429": Scripted(status=429, headers={"Retry-After": "1e99"}),
        "422": Scripted(status=422),
        "401": Scripted(status=401),
        "html": Scripted(body=b"<html>"),
    }

    def at_most_four(frame: Frame) -> Scripted | None:
        return Scripted(status=413) if sum(group.rows for group in frame.groups) > 4 else None

    with ExitStack() as stack:
        good = stack.enter_context(IngestServer())
        small = stack.enter_context(IngestServer(rule=at_most_four))
        cutting = stack.enter_context(Proxy(good.port, seed=24))
        addresses = {
            "good": good.url,
            "cutting": cutting.url,
            "413": small.url,
            "dead": f"http://127.0.0.1:{free_port()}",
        }
        for name, answer in rules.items():
            addresses[name] = stack.enter_context(IngestServer(rule=lambda _, answer=answer: answer)).url  # type: ignore[misc]
        still = stack.enter_context(socket.socket())
        still.bind(("127.0.0.1", 0))
        still.listen(100)
        addresses["still"] = f"http://127.0.0.1:{still.getsockname()[1]}"
        addresses["name"] = "http://monitor.example:8420"
        addresses["ipv6"] = f"http://[::1]:{free_port()}"
        yield addresses, [good, small]


def run(folder: Path, cases: tuple[Case, ...] = CASES) -> dict[str, str]:
    """name of the case -> what was wrong, empty when nothing was."""
    (folder / "spool").mkdir(parents=True)
    broken = folder / "state" / "perfagent" / "spool" / "broken"
    broken.mkdir(parents=True)
    (broken / "00000001.ticks").write_bytes(b"perfagent spool 2\n" + bytes(range(256)))
    with _servers() as (addresses, stores):
        plain = {"attach": False, "before": "", "env": {}}
        told = [plain | {"name": "plain", "during": ""}, plain | {"name": "plain-ctrl-c", "during": CTRL_C}]
        told += [
            {
                "name": case.name,
                "attach": True,
                "env": {"PERFAGENT_SERVER": addresses[case.server]} | case.env,
                "before": case.before,
                "during": case.during,
            }
            for case in cases
        ]
        environment = job_environment(folder, OMP_NUM_THREADS="1")
        command = [sys.executable, str(HERE / "training.py"), str(folder)]
        done = subprocess.run(
            command, input=json.dumps(told), env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=170
        )
    results = {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}
    assert results["plain"]["code"] == EXIT_CODE
    assert results["plain-ctrl-c"]["code"] == -2
    return {case.name: "; ".join(_wrong(case, results[case.name], folder, stores)) for case in cases}


def _wrong(case: Case, result: dict[str, float], folder: Path, stores: list[IngestServer]) -> Iterator[str]:
    errors = (folder / f"{case.name}.err").read_text()
    if not (folder / f"{case.name}.losses").exists():
        yield f"it never trained: {errors[-600:]}"
        return
    losses = (folder / f"{case.name}.losses").read_text()
    plain = "plain-ctrl-c" if case.exit_code == -2 else "plain"
    if losses != (folder / f"{plain}.losses").read_text():
        yield "I3: the losses differ"
    if result["code"] != case.exit_code:
        yield f"I3: exit code {result['code']}, not {case.exit_code}"
    if "Traceback" in errors and case.exit_code != -2:
        yield f"I4: {errors[-600:]}"
    told = [line.split("/spool/")[0] for line in errors.splitlines() if line.startswith("perfagent: ")]
    told = [line for line in told if not line.startswith("perfagent: watch it at")]
    if len(told) != len(set(told)) or len(told) > max(3, case.misuses):
        yield f"too many words: {told}"
    if case.warns and not told:
        yield "nothing was told"
    if result["exit_s"] is not None and result["exit_s"] > EXIT_S:
        yield f"I7: the end took {result['exit_s']:.2f} s"
    groups = [*_groups_of(case.name, folder, stores)]
    stored = [step for group in groups if "seen" in group.values for step in group.steps()]
    for group in groups:
        if [*group.monotonics()] != sorted(group.monotonics()):
            yield f"A18: rows of {[*group.values][:3]} are out of order by the monotonic clock"
        for name in group.values:
            if name.endswith(("_s", "_pct", "_bytes")) and name != "seen" and min(group.column(name)) < 0:
                yield f"A18: {name} is negative"
    if len(stored) != len(set(stored)):
        yield "I2: steps are stored twice"
    last = 30 if case.exit_code == -2 else STEPS
    if case.kept and sorted(stored) != list(range(1, last + 1)):
        yield f"I1: {last - len(stored)} of {last} steps are neither stored nor in the spool"


def _groups_of(run: str, folder: Path, stores: list[IngestServer]) -> Iterator[Group]:
    """What is stored of a run, and what waits in its spool."""
    for server in stores:
        for _, frame in sorted(server.stored.items()):
            if frame.run == run:
                yield from frame.groups
    for place in (folder / "state" / "perfagent" / "spool").iterdir():
        for waiting in left_in(place) if place.name != "broken" and _run_of(place) == run else ():
            if not any((place.name, waiting.seq) in server.stored for server in stores):
                yield from waiting.groups


def _run_of(place: Path) -> str | None:
    from perfagent.delivery.spool import owner

    header = owner(place)
    return header.run if header is not None else None
