"""What each check of `perfagent doctor` says of what was found: all is well, something is missing, something does not
work."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ticks import tick_of

from perfagent.delivery.spool import Header, Spool
from perfagent.wire import Group
from perfagent_client.doctor import connection, machine, storage
from perfagent_client.doctor.checks import Check
from perfagent_client.doctor.connection import ServerAnswer
from perfagent_client.doctor.probes import probe

CUDA = {"version": "2.13.0", "cuda": "13.0", "available": True, "devices": ["H100"]}
GLIBC = ("glibc", "2.36")
MISMATCH = {"reason": "Driver/library version mismatch"}


def answer(**fields: Any) -> ServerAnswer:
    known = {"version": "0.1.0", "who": "anyone", "may": ("ingest", "read"), "date": 1000.0, "asked": 1000.5}
    return ServerAnswer(**({"status": 200, "session_status": 200} | known | fields))


AWAY = ServerAnswer(error="ConnectError: refused")
CHECKS = [
    (machine.python((3, 11, 7), "/usr/bin/python", "linux"), "ok", "3.11.7", "/usr/bin/python"),
    (machine.python((3, 10, 2), "python", "linux"), "problem", "3.11 or later"),
    (machine.python((3, 15, 0), "python", "linux"), "warning", "3.11 to 3.14"),
    (machine.python((3, 12, 0), "python", "win32"), "problem", "WSL"),
    (machine.torch_build({"missing": True}, False), "warning", "not installed", "pip install torch"),
    (machine.torch_build({"error": "OSError: libcudart"}, True), "problem", "libcudart", "import torch"),
    (machine.torch_build({"version": "2.13.0+cpu"}, False), "ok", "built for CPU"),
    (machine.torch_build({"version": "2.13.0+cpu"}, True), "problem", "has an NVIDIA driver", "pip install torch"),
    (machine.torch_build(CUDA, True), "ok", "CUDA 13.0", "H100"),
    (machine.torch_build(CUDA | {"available": False}, False), "ok", "trains on the CPU", "no NVIDIA driver"),
    (machine.torch_build(CUDA | {"available": False}, True), "problem", "sees no GPU", "nvidia-smi"),
    (machine.gpus({"devices": ["H100", "H100"], "driver": "580.1"}), "ok", "H100, H100", "driver 580.1"),
    (machine.gpus({"reason": "no_driver"}), "ok", "no GPU metrics"),
    (machine.gpus({"reason": "no_package"}), "warning", "pip install nvidia-ml-py"),
    (machine.gpus(MISMATCH), "problem", "nvidia-smi", "reboot"),
    (machine.allocator(GLIBC, {}), "ok", "glibc 2.36"),
    (machine.allocator(GLIBC, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}), "ok", "jemalloc is preloaded"),
    (machine.allocator(GLIBC, {}, wanted=False), "warning", "unset PERFAGENT_MALLOC"),
    (machine.allocator(("", ""), {}), "ok", "an unknown C library"),
    (connection.server("http://x", answer(), "0.1.3"), "ok", "version 0.1.0"),
    (connection.server("http://x", answer(), "0.2.0"), "warning", "here it is 0.2.0", "same version"),
    (connection.server("http://x", AWAY, "0.1.0"), "problem", "refused", "perfagent up", "PERFAGENT_SERVER"),
    (connection.server("http://x", answer(version=None, status=501), "0.1.0"), "problem", "no perfagent server (status 501)"),
    (connection.key(False, answer()), "ok", "not needed: anyone may ingest and read"),
    (connection.key(False, answer(may=())), "problem", "asks for one", "perfagent keys create ingest"),
    (connection.key(True, answer(who="key abc", may=("ingest",))), "ok", "valid: key abc, may ingest"),
    (connection.key(True, answer(may=("read",))), "problem", "may read, but not send", "keys create ingest"),
    (connection.key(True, answer(session_status=401)), "problem", "revoked or expired", "PERFAGENT_API_KEY"),
    (connection.key(True, answer(session_status=429)), "warning", "wait a minute"),
    (connection.clock(answer()), "ok", "within 5 s"),
    (connection.clock(answer(asked=1060.0)), "warning", "60 s ahead of the server's", "NTP"),
    (connection.clock(answer(asked=1.0)), "problem", "1000 s behind the server's", "NTP"),
]  # fmt: skip


def graded(check: Check, grade: str, *words: str) -> None:
    assert check.grade == grade, check
    assert not [word for word in words if word not in f"{check.found} {check.next_step}"], check
    assert bool(check.next_step) == (grade != "ok"), "a next step for all that is not ok, and for nothing else"


def test_each_finding_has_its_grade_and_a_next_step() -> None:
    for check, grade, *words in CHECKS:
        graded(check, grade, *words)


def test_the_spool_and_what_of_it_has_not_arrived(tmp_path: Path) -> None:
    here, there = "http://127.0.0.1:8420", "http://old:1"
    graded(storage.spool(tmp_path / "none", here), "ok", "nothing undelivered")
    for letter, server in (("a", here), ("b", there)):
        source = letter * 32
        left = Spool(tmp_path / source, Header(source=source, project="p", rank=0, server=server, run="r", attempt=1))
        left.append(*tick_of([Group(step=[1], time=[1.0], monotonic=[1.0], values={"loss": [1.0]})]), now=0.0)
        if letter == "a":
            graded(storage.spool(tmp_path, here), "ok", "nothing undelivered; 1 running job left out")
        left.close(final="finished")
    check = storage.spool(tmp_path, here)
    graded(check, "warning", "of 2 sources whose process has ended", "`perfagent sync` sends")
    graded(check, "warning", f"asks before it sends what was recorded for {there} to {here}")
    (tmp_path / "file").touch()
    graded(storage.spool(tmp_path / "file" / "spool", here), "problem", "cannot be used", "XDG_STATE_HOME")


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (5 * 2**30, ("ok", "5 GiB free")), (2**30, ("warning", "1 GiB free", "make room")),
        (2**20, ("problem", "1 MiB free", "make room")), (OSError(5, "Input/output error"), ("problem", "Input/output error")),
    ],
    ids=["much", "little", "none", "error"],
)  # fmt: skip
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | OSError, expected: tuple[str, ...]) -> None:
    def usage(place: Path) -> SimpleNamespace:
        assert place == tmp_path
        if isinstance(free, OSError):
            raise free
        return SimpleNamespace(free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    graded(storage.disk("disk", tmp_path / "not" / "there" / "yet"), *expected)


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
