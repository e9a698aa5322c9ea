"""A job that shows its secrets everywhere: none of them leaves the process, not even into its own spool."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from builders import job_environment, until
from canaries import BASE62, BY_VALUE, HEX40
from ingest_server import IngestServer

SCRIPT = Path(__file__).parents[2] / "data" / "scripts" / "careless.py"
NAMED = {"NAMED_PASSWORD": "correct-horse-battery", "NAMED_BEARER": "dXNlcjpodW50ZXIyaHVudGVy", "NAMED_TOKEN": HEX40}
CANARIES = BY_VALUE | NAMED
ARGUMENTS = ("--lr", "0.25", "--api-key", "plainwordplainword", "--database", "mysql://me:hunter2hunter2@db/x", BASE62)
IN_ARGUMENTS = ("plainwordplainword", "hunter2hunter2", BASE62)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """In a repository whose remote has a password."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(SCRIPT, folder / "secrets_job.py")
    script = """
        git init -q -b main; git add .; git -c user.email=a@b -c user.name=n commit -qm x
        git remote add origin https://me:hunter2hunter2@example.com/team/repo.git"""
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True)
    return folder / "secrets_job.py"


def run(folder: Path, script: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The job to its end, named after a secret too."""
    canaries = {f"CANARY_{name}": value for name, value in CANARIES.items()}
    words = ["-m", "perfagent", "run", "--name", f"try {BY_VALUE['github']}", "--tag", BY_VALUE["aws"], str(script)]
    environment = job_environment(
        folder, **canaries, HF_TOKEN=BY_VALUE["hf"], NCCL_SECRET="plainwordplainword", OMP_NUM_THREADS="1", **more
    )
    command = [sys.executable, *words, *ARGUMENTS]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


def leaked(content: str) -> set[str]:
    """The canaries in a text, whole, or of a private key any line of it."""
    lines = {line for value in CANARIES.values() for line in value.split("\n") if len(line) > 8 and "-----" not in line}
    return {piece for piece in {*lines, *IN_ARGUMENTS} if piece in content or piece in content.replace("\\n", "\n")}


def everything_in(folder: Path) -> str:
    """All bytes of all files, and all that is compressed in them."""
    parts = []
    # a job that failed leaves its last frames to a process that sends them, and deletes their files meanwhile
    for path in (Path(at) / name for at, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(FileNotFoundError):
            parts.append(data := path.read_bytes())
            at = data.find(b"\x78")
            while at >= 0:
                with contextlib.suppress(zlib.error):
                    parts.append(zlib.decompressobj().decompress(data[at:]))
                at = data.find(b"\x78", at + 1)
    return b"\n".join(parts).decode("utf-8", "replace")


@pytest.mark.real
@pytest.mark.fault
def test_x10_no_secret_of_a_careless_job_is_written_or_sent(tmp_path: Path, script: Path) -> None:
    with IngestServer() as server:
        done = run(tmp_path, script, PERFAGENT_SERVER=server.url, PERFAGENT_API_KEY=BY_VALUE["perfagent"])
        spooled = everything_in(tmp_path / "state")
        until(lambda: "failed" in [state["state"] for state in server.events("state")], within_s=30)
    # it ends as without the agent, whose lines, on the run and the crash, hold no secret
    assert done.returncode == 1
    assert "RuntimeError: cannot log in" in done.stderr
    address, crash = [
        line for line in done.stderr.replace(str(Path(__file__).parents[3]), "").splitlines() if "perfagent" in line
    ]
    assert address.startswith("perfagent: watch it at http")
    assert crash.startswith("perfagent: the job crashed after step")
    sent = "\n".join(map(repr, server.frames))
    assert "9ee4a0bf527be1dfadf0713484afc43b44c543cc" in sent, "what is no secret stays"
    assert (
        leaked(address)
        == leaked(crash)
        == leaked(sent)
        == leaked(spooled)
        == leaked(everything_in(tmp_path / "state"))
        == set()
    )

    assert server.values("loss")
    context: dict[str, Any] = {}
    for told in server.events("context"):  # each adds to what was told before
        context |= told
    assert context["git"].items() >= {"remote": "https://example.com/team/repo.git", "dirty": False}.items()
    config = context["config"]
    assert config["argparse"] == {
        "lr": 0.25, "api_key": "[redacted]", "database": "mysql://me:[redacted]@db/x", "run_label": "baseline",
        "words": ["[redacted]"],
    }  # fmt: skip
    assert config["config"]["login"]["nested"][0]["user"] == "me"
    assert (config["config"]["batch_size"], config["config"]["auth"]) == (4, "[redacted]")
    assert (config["model"]["class"], config["model"]["parameters"], config["optimizer"]["lr"]) == ("Linear", 5, 0.25)
    assert context["packages"]["torch"].startswith("2.")
    # and what libraries of the test's own process left in it
    environment = server.events("context")[0]["environment"]
    assert environment.items() >= {"NCCL_SECRET": "[redacted]", "OMP_NUM_THREADS": "1"}.items()
    (last,) = [state for state in server.events("state") if state["state"] == "failed"]
    assert "secret=[redacted]" in last["traceback"]
    assert 'File "' in last["traceback"]
