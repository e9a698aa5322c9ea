"""What the kernel says of the training thread, beside what the thread itself can ask."""

from __future__ import annotations

import mmap
import os
import resource
import threading
from pathlib import Path

import pytest

from perfagent.samplers.training_thread import TrainingThreadReader, native_id
from perfagent.wire import CATALOGUE

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
PAGE = os.sysconf("SC_PAGE_SIZE")


def touch(pages: int) -> None:
    with mmap.mmap(-1, pages * PAGE) as memory:
        for page in range(pages):
            memory[page * PAGE] = 1


def usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_THREAD)


def test_faults_a_step_are_those_of_the_training_thread_alone() -> None:
    steps = 0
    reader = TrainingThreadReader(lambda: (native_id(threading.get_ident()), steps))
    touch(64)  # what Python needs for it is there now
    before = usage().ru_minflt
    reader.read(0.0)
    other = threading.Thread(target=touch, args=(4000,))
    other.start()
    other.join()
    touch(1500)
    assert "process/page_faults_per_step" not in reader.read(5.0), "the step in progress goes on"
    touch(1500)
    steps = 10
    told = reader.read(10.0)
    assert told["process/page_faults_per_step"] == pytest.approx((usage().ru_minflt - before) / 10, abs=60)
    assert 290 < told["process/page_faults_per_step"] < 390
    assert told.keys() <= CATALOGUE.keys()
