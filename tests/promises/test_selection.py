"""`scripts/test` leaves out the tests that are marked `long`; `--all`, `-m` and a test's own id bring them back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/promises/test_selection.py"
PLUGINS = ("hypothesispytest", "hydra_pytest", "anyio", "xdist", "xdist.looponfail")
"""Which take seconds to import and have no part in it."""
LONG = f"{HERE}::test_this_is_marked_long"


@pytest.mark.long
def test_this_is_marked_long() -> None:
    """For the test below, which collects it."""


@pytest.mark.parametrize(
    ("words", "collected"),
    [([HERE], False), ([HERE, "--all"], True), ([HERE, "-m", "long"], True), ([LONG], True)],
    ids=["plain", "--all", "-m", "by its id"],
)
def test_a_long_test_is_collected_only_when_it_is_asked_for(words: list[str], collected: bool) -> None:
    others = [word for plugin in PLUGINS for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *others, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (LONG in done.stdout.splitlines()) == collected
