"""glibc's thresholds: really raised where nobody has set them, left alone elsewhere, and the run says which of the two."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import job_environment

from perfagent.process.host_allocator import reason_against

pytestmark = [pytest.mark.real, pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")]
TUNED = "tuned: mmap threshold 32 MiB, trim threshold 64 MiB"

MEASURE = """
    import ctypes, json, os, resource, subprocess, sys
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

    def faults(size=14 * 2**20):
        '''Of a step that takes and frees four blocks: 56 MiB, more than glibc keeps after blocks of this size.'''
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            blocks = [libc.malloc(size) for _ in range(4)]
            for block in blocks:
                ctypes.memset(block, 1, size)
            for block in blocks:
                libc.free(block)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def childs_environment():
        return subprocess.run(["env"], capture_output=True, text=True, check=True).stdout

    told = {}
"""
INIT = """
    import perfagent
    told["before"], environment = faults(), childs_environment()
    run = perfagent.init() if sys.argv[1] == "init" else perfagent.attach(tune_malloc=False)
    told["after"], told["environment kept"] = faults(), childs_environment() == environment
    sys.modules["perfagent.lifecycle"].EXIT_S = 60.0  # its end waits until all is written
    run.finish()
    perfagent.init(tune_malloc=sys.argv[1] != "init", record=os.environ["PERFAGENT_RECORD"] + "-second").finish()
    told["second"] = faults()
    print(json.dumps(told))
"""
OFF = "left alone: switched off"


def _malloc(record: Path) -> str | None:
    """What the run's configuration says in the end."""
    told = Recording(record).events("context")
    assert not any("malloc" in context.get("config", {}) for context in told), "it is none of the user's settings"
    word: str | None = [context["environment"].get("malloc") for context in told if "environment" in context][-1]
    return word


def test_thresholds_are_raised_unless_that_is_switched_off(tmp_path: Path) -> None:
    """They stay after a run, and a later one may raise them."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(MEASURE) + textwrap.dedent(INIT), "utf-8")
    started = {
        call: subprocess.Popen(
            [sys.executable, str(script), call], env=job_environment(tmp_path, PERFAGENT_RECORD=str(tmp_path / call)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for call in ("init", "attach")
    }  # fmt: skip
    for call, expected in (("init", TUNED), ("attach", OFF)):
        out, error = started[call].communicate(timeout=120)
        assert started[call].returncode == 0, error[-2000:]
        said: dict[str, Any] = json.loads(out)
        assert said["before"] > 2000, "nothing to win here: the case shows nothing"
        assert (said["environment kept"], said["after"] < 100, said["second"] < 100) == (True, expected == TUNED, True)
        assert (_malloc(tmp_path / call), _malloc(tmp_path / f"{call}-second")) == (expected, TUNED)


def test_variables_that_glibc_reads_stop_us_and_no_others():
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"):
        assert reason_against(True, {name: "1"}) == f"{name} is set"
    assert reason_against(True, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=4096"}) is not None
    assert reason_against(True, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}) == "jemalloc is preloaded"
    others = {
        "MALLOC_OF_MINE": "1",
        "GLIBC_TUNABLES": "glibc.rtld.nns=4:glibc.cpu.hwcaps=-AVX2",
        "LD_PRELOAD": "libother.so",
    }
    assert reason_against(True, others) is None
