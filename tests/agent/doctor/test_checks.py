"""What each check of `perfagent doctor` says of what was found: all is well, something is missing, something does not
work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from perfagent.delivery.spool import Header, Spool
from perfagent.doctor import connection, machine, storage
from perfagent.doctor.checks import Check
from perfagent.doctor.connection import Look
from perfagent.doctor.probes import probe
from perfagent.doctor.storage import Left
from perfagent.wire import Group


def graded(check: Check, grade: str, *words: str) -> None:
    assert check.grade == grade, check
    for word in words:
        assert word in f"{check.found} {check.next_step}", check
    assert bool(check.next_step) == (grade != "ok"), "a next step for all that is not ok, and for nothing else"


def test_python() -> None:
    graded(machine.python((3, 11, 7), "/usr/bin/python", "linux"), "ok", "3.11.7", "/usr/bin/python")
    graded(machine.python((3, 10, 2), "python", "linux"), "problem", "3.11 or later")
    graded(machine.python((3, 15, 0), "python", "linux"), "warning", "3.11 to 3.14")
    graded(machine.python((3, 12, 0), "python", "win32"), "problem", "WSL")


def test_torch_build() -> None:
    graded(machine.torch_build({"missing": True}, False), "warning", "not installed", "pip install torch")
    graded(machine.torch_build({"error": "OSError: libcudart"}, True), "problem", "libcudart", "import torch")
    cpu = {"version": "2.13.0+cpu", "cuda": None}
    graded(machine.torch_build(cpu, False), "ok", "built for CPU")
    graded(machine.torch_build(cpu, True), "problem", "this machine has an NVIDIA driver", "pip install torch")
    cuda = {"version": "2.13.0", "cuda": "13.0", "available": True, "devices": ["H100"]}
    graded(machine.torch_build(cuda, True), "ok", "CUDA 13.0", "H100")
    graded(machine.torch_build(cuda | {"available": False}, False), "ok", "trains on the CPU", "no NVIDIA driver")
    graded(machine.torch_build(cuda | {"available": False}, True), "problem", "sees no GPU", "nvidia-smi")


def test_gpus() -> None:
    graded(machine.gpus({"devices": ["H100", "H100"], "driver": "580.1"}), "ok", "H100, H100", "driver 580.1")
    graded(machine.gpus({"reason": "no NVIDIA driver on this machine"}), "ok", "no GPU metrics")
    graded(machine.gpus({"reason": "the package nvidia-ml-py is missing"}), "warning", "pip install nvidia-ml-py")
    mismatch = {"reason": "NVML does not start: Driver/library version mismatch"}
    graded(machine.gpus(mismatch), "problem", "nvidia-smi", "reboot")


def test_allocator() -> None:
    glibc = ("glibc", "2.36")
    graded(machine.allocator(glibc, {}), "ok", "glibc 2.36")
    graded(machine.allocator(glibc, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}), "ok", "jemalloc is preloaded")
    graded(machine.allocator(glibc, {"MALLOC_TRIM_THRESHOLD_": "1"}), "ok", "MALLOC_TRIM_THRESHOLD_ is set")
    graded(machine.allocator(glibc, {}, wanted=False), "warning", "unset PERFAGENT_MALLOC")
    graded(machine.allocator(("", ""), {}), "ok", "an unknown C library")


def test_the_spool_and_what_of_it_has_not_arrived(tmp_path: Path) -> None:
    here, there = "http://127.0.0.1:8420", "http://old:1"
    assert storage.left_in(tmp_path / "none") == []
    for letter, server in (("a", here), ("b", there)):
        source = letter * 32
        header = Header(source=source, project="p", rank=0, server=server, run="r", attempt=1)
        left = Spool(tmp_path / source, header)
        left.append([Group(step=[1], time=[1.0], monotonic=[1.0], values={"loss": [1.0]})], [], now=0.0)
        if letter == "b":
            found = {source.server: source.running for source in storage.left_in(tmp_path)}
            assert found == {here: False, there: True}, "this process holds the second"
        left.close(final="finished")
    check = storage.spool(tmp_path, storage.left_in(tmp_path), here)
    graded(check, "warning", "of 2 sources whose process has ended", "`perfagent sync` sends")
    graded(check, "warning", f"asks before it sends what was recorded for {there} to {here}")
    running = [Left(tmp_path, 10, here, running=True)]
    graded(storage.spool(tmp_path, running, here), "ok", "nothing undelivered; 1 running job left out")
    refused = PermissionError(13, "Permission denied")
    graded(storage.spool(tmp_path, refused, here), "problem", "Permission denied", "XDG_STATE_HOME")


def test_disk(tmp_path: Path) -> None:
    free = storage.free_bytes(tmp_path / "not" / "there" / "yet")
    assert isinstance(free, int)
    graded(storage.disk("disk", tmp_path, 5 * 2**30), "ok", "5 GiB free")
    graded(storage.disk("disk", tmp_path, 2**30), "warning", "1 GiB free", "make room")
    graded(storage.disk("disk", tmp_path, 2**20), "problem", "1 MiB free", "make room")
    graded(storage.disk("disk", tmp_path, OSError(5, "Input/output error")), "problem", "Input/output error")


KNOWN = {"version": "0.1.0", "who": "anyone", "may": ("ingest", "read"), "date": 1000.0, "asked": 1000.5}
AWAY = Look(error="ConnectError: refused")


def changed(**fields: Any) -> Look:
    return Look(**({"status": 200, "session_status": 200} | KNOWN | fields))


OURS = changed()


def test_server() -> None:
    graded(connection.server("http://x", OURS, "0.1.3"), "ok", "version 0.1.0")
    graded(connection.server("http://x", OURS, "0.2.0"), "warning", "here it is 0.2.0", "same version")
    graded(connection.server("http://x", AWAY, "0.1.0"), "problem", "refused", "perfagent up", "PERFAGENT_SERVER")
    foreign = changed(version=None, status=501)
    graded(connection.server("http://x", foreign, "0.1.0"), "problem", "no perfagent server (status 501)")


def test_key() -> None:
    graded(connection.key(False, OURS), "ok", "not needed: anyone may ingest and read")
    graded(connection.key(False, changed(may=())), "problem", "asks for one", "perfagent keys create ingest")
    graded(connection.key(True, changed(who="key abc", may=("ingest",))), "ok", "valid: key abc, may ingest")
    graded(connection.key(True, changed(may=("read",))), "problem", "may read, but not send", "keys create ingest")
    graded(connection.key(True, changed(session_status=401)), "problem", "revoked or expired", "PERFAGENT_API_KEY")
    graded(connection.key(True, changed(session_status=429)), "warning", "wait a minute")


def test_clock() -> None:
    graded(connection.clock(OURS), "ok", "within 5 s")
    graded(connection.clock(changed(asked=1060.0)), "warning", "60 s ahead of the server's", "NTP")
    graded(connection.clock(changed(asked=1.0)), "problem", "1000 s behind the server's", "NTP")


@pytest.mark.real
@pytest.mark.parametrize(
    ("body", "said"),
    [("import time; time.sleep(60)", "gave no answer within 1 s"), ("raise OSError('no libcudart')", "no libcudart")],
)
def test_a_torch_that_hangs_or_fails_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    found = probe("torch", 1.0 if "sleep" in body else 60.0)
    assert said in found["error"]
    graded(machine.torch_build(found, False), "problem", said)
