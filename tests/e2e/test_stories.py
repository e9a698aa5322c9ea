"""The case studies of docs/stories: what the sick program prints, what perfagent says of it, and that the fixed one is well.

A page has the difference between its two programs in blocks of `diff`, and three blocks of `text`: what the sick program prints
(none for nothing), the verdict, and what the fixed one prints. `...` stands for anything, and so do times, sizes and shares, and
numbers of steps. Where a page says "at least N times as fast", so it is.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess, free_port, job_environment, until
from code_blocks import prints
from documents import Document, documents

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "stories"
PAGES = {
    page.path.stem: page for page in documents() if page.name.startswith("docs/stories/") and page.path.stem != "index"
}
SLOW = {
    "item-in-the-loop": "reads are counted after some seconds", "list-of-losses": "its memory is watched for 40 s",
    "state-keeps-the-graph": "on a busy machine its slowdown drowns in noise",
    "uneven-inputs-hang": "a hang is watched for 15 s",
}  # fmt: skip
LOUD = {"warning", "critical"}
SPEED = re.compile(r"([\d.]+) steps per second")
MEASURED = re.compile(r"\d[\d.,]* (?:steps|µs|ms|s|min|%|[KMG]iB)(?!\w)")
"""What differs from machine to machine."""


@dataclass(frozen=True)
class Story:
    name: str
    difference: str
    printed: str
    said: str
    printed_when_fixed: str
    faster: float | None

    @property
    def program(self) -> str:
        [name] = set(re.findall(r"examples/stories/(\w+?)(?:_fixed)?\.py", PAGES[self.name].text))
        return str(name)


def story(page: Document) -> Story:
    blocks = [piece for piece in page.code() if piece.language is not None]
    difference = "".join(piece.text for piece in blocks if piece.language == "diff")
    *sick, said, fixed = (piece.text for piece in blocks if piece.language == "text")
    faster = re.search(r"at least ([\d.]+) times as fast", page.text)
    return Story(page.path.stem, difference, "".join(sick), said, fixed, float(faster[1]) if faster else None)


def tells(page: str, found: str) -> bool:
    return prints(MEASURED.sub("...", page), found)


STORIES = [story(page) for page in PAGES.values()]


def train(
    server: ServerProcess, folder: Path, program: str, run: str, stop_at: str = ""
) -> tuple[str, list[dict[str, Any]]]:
    """What the program prints, and the worst that was said of each alert. stop_at: the rule after whose alert it is ended."""
    environment = job_environment(folder, PERFAGENT_SERVER=server.url, PERFAGENT_RUN_ID=run, OMP_NUM_THREADS="1")
    script = PROGRAMS / f"{program}.py"
    launcher = [] if "perfagent.attach(" in script.read_text() else ["-m", "perfagent", "run"]
    command = [sys.executable, *launcher, str(script)]
    ranks = [environment]
    if "init_process_group" in script.read_text():
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [environment | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    parts = [[], ["--resume"]] if program.startswith("resume") else [[]]
    output = ""
    for words in parts:
        jobs = [
            subprocess.Popen(
                [*command, *words],
                env=rank,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            for rank in ranks
        ]
        try:
            if stop_at:
                until(lambda: any(alert["rule"] == stop_at for alert in alerts(server, run)), within_s=120, every_s=0.5)
                for job in jobs:
                    os.killpg(job.pid, signal.SIGTERM)
            ends = [job.communicate(timeout=150) for job in jobs]
        finally:
            for job in jobs:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
        assert stop_at or {job.returncode for job in jobs} == {0}, ends
        output += "".join(said for said, _ in ends)
    until(lambda: server.get(f"/runs/{run}")["state"] not in ("starting", "running"), within_s=60)
    return output, alerts(server, run)


def alerts(server: ServerProcess, run: str) -> list[dict[str, Any]]:
    found = server.find(f"/runs/{run}/alerts") or {"alerts": []}
    return [alert for alert in found["alerts"] if alert["state"] != "pending"]


def test_there_are_ten_stories_and_each_program_is_in_one() -> None:
    assert len(STORIES) == 10
    assert {f"{one.program}{end}" for one in STORIES for end in ("", "_fixed")} == {
        path.stem for path in PROGRAMS.glob("*.py")
    }


@pytest.mark.parametrize("one", STORIES, ids=[one.name for one in STORIES])
def test_the_fix_is_the_difference_of_the_two_programs(one: Story) -> None:
    sick, fixed = ((PROGRAMS / f"{one.program}{end}.py").read_text().splitlines() for end in ("", "_fixed"))
    changes = [line for line in difflib.ndiff(sick, fixed) if line[0] in "+-" and '"""' not in line]
    told = [f"{line[0]} {line[1:]}" for line in one.difference.splitlines() if line[0] in "+-"]
    assert sorted(told) == sorted(changes)


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=[pytest.mark.long] if one.name in SLOW else [], id=one.name) for one in STORIES],
)
def test_a_story_is_true(one: Story, shared_server: ServerProcess, tmp_path: Path) -> None:
    [rule] = re.findall(r"^\[\w+\] (\w+):", one.said, re.MULTILINE)
    run = f"story-{one.name}"
    printed, _ = train(shared_server, tmp_path / "sick", one.program, run, stop_at="hang" if rule == "hang" else "")
    assert tells(one.printed, printed), printed

    def said() -> str:
        verdict = shared_server.get(f"/runs/{run}/verdict")
        return f"[{verdict['severity']}] {verdict['rule']}: {verdict['message']}\n    Fix: {verdict['fix']}"

    with contextlib.suppress(AssertionError):
        until(lambda: tells(one.said, said()), within_s=20)
    assert tells(one.said, said()), said()
    fixed, raised = train(shared_server, tmp_path / "fixed", f"{one.program}_fixed", f"{run}-fixed")
    assert tells(one.printed_when_fixed, fixed), fixed
    assert [alert for alert in raised if alert["severity"] in LOUD] == []
    assert shared_server.get(f"/runs/{run}-fixed/verdict")["severity"] not in LOUD
    if one.faster is not None:
        before, after = (float(SPEED.findall(text)[-1]) for text in (printed, fixed))
        assert after / before >= one.faster
