"""How a job ended, by what it printed."""

from __future__ import annotations

import pytest

from perfagent_client.history.endings import ending
from perfagent_client.history.printed import is_progress

TRACE = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    y = model(x)"]
STEPS = [f"step {step} loss {9 - step / 10}" for step in range(20)]


def of_rank(rank: int, lines: list[str]) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in lines]


CASES = {  # name: (lines, state, exception, words of the reason)
    "exception": ([*STEPS, *TRACE, "ValueError: bad row 7"], "failed", "ValueError", "ValueError: bad row 7"),
    "without traceback": (["AssertionError: 30 != 32"], "failed", "AssertionError", "30 != 32"),
    "without a message": ([*TRACE, "MemoryError"], "failed", "MemoryError", "MemoryError"),
    "another package's": ([*TRACE, "hydra.errors.ConfigComposition: no x"], "failed", "ConfigComposition", "no x"),
    "one that followed another": (
        [*TRACE, "KeyError: 'a'", "", "During handling of the above exception, another one occurred:", "", *TRACE, "OSError: b"],
        "failed", "OSError", "b",
    ),
    "of a loader's worker": (
        [
            *TRACE, "RuntimeError: Caught FileNotFoundError in DataLoader worker process 0.",
            "Original Traceback (most recent call last):", '  File "data.py", line 1', "FileNotFoundError: x.png",
        ],
        "failed", "FileNotFoundError", "x.png",
    ),
    "of the rank that failed first": (
        [
            *of_rank(0, [*TRACE, "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:123"]),
            *of_rank(1, [*TRACE, "ValueError: bad row 7"]),
            *TRACE, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "train.py FAILED",
        ],
        "failed", "ValueError", "bad row 7",
    ),
    "C++": (
        ["terminate called after throwing an instance of 'c10::Error'", "  what():  CUDA error: x", "Aborted (core dumped)"],
        "failed", "c10::Error", "CUDA error: x",
    ),
    "segmentation fault": (["bash: line 1: 12 Segmentation fault      (core dumped) python x.py"], "killed", "", "SIGSEGV"),
    "bus error": (["Bus error (core dumped)"], "killed", "", "SIGBUS"),
    "killed": (["run.sh: line 3: 12345 Killed                  python train.py"], "killed", "", "SIGKILL"),
    "kernel": (["slurmstepd: error: Detected 1 oom_kill event in StepId=1.0."], "oom", "", "oom_kill"),
    "time": (["slurmstepd: error: *** JOB 1 CANCELLED AT 2024 DUE TO TIME LIMIT ***"], "killed", "", "TIME LIMIT"),
    "watchdog": (["[rank3]:[E501] Watchdog caught collective operation timeout: WorkNCCL"], "failed", "", "Watchdog"),
    "CUDA assertion": (["Loss.cu:242: block: [0,0,0] Assertion `t < n_classes` failed."], "failed", "", "t < n_classes"),
    "last resort": (["srun: error: node1: task 0: Exited with exit code 1"], "failed", "", "exit code 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_end_is_known_by_its_words(case: str) -> None:
    lines, state, exception, words = CASES[case]
    found = ending(lines, is_progress)
    assert found is not None
    assert (found.state, found.exception) == (state, exception)
    assert words in found.reason


@pytest.mark.parametrize(
    "lines",
    [
        [*STEPS, "Training finished"],
        [*TRACE, "ValueError: bad sample, skipped", *STEPS],
        ["  ValueError: indented", "# KeyError is raised where ..."],
        [],
    ],
)
def test_training_that_goes_on_or_says_nothing_has_no_bad_end(lines: list[str]) -> None:
    assert ending(lines, is_progress) is None


def test_traceback_is_kept_with_the_rank() -> None:
    found = ending(of_rank(3, [*TRACE, "ValueError: x"]), is_progress)
    assert found is not None and found.rank == 3
    assert found.traceback.splitlines()[0] == TRACE[0] and found.traceback.splitlines()[-1] == "ValueError: x"
