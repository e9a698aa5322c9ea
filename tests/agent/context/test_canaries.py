"""A job that shows its secrets everywhere: none of them leaves the process, not even into its own spool."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_recorded import Recording
from builders import job_environment, until
from canaries import BASE62, BY_VALUE, HEX40

SCRIPT = Path(__file__).parents[2] / "data" / "scripts" / "careless.py"
NAMED = {"NAMED_PASSWORD": "correct-horse-battery", "NAMED_BEARER": "dXNlcjpodW50ZXIyaHVudGVy", "NAMED_TOKEN": HEX40}
CANARIES = BY_VALUE | NAMED
ARGUMENTS = ("--lr", "0.25", "--api-key", "plainwordplainword", "--database", "mysql://me:hunter2hunter2@db/x", BASE62)
IN_ARGUMENTS = ("plainwordplainword", "hunter2hunter2", BASE62)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The script in a repository whose remote has a password."""
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(SCRIPT, folder / "secrets_job.py")
    git = ["git", "-C", str(folder), "-c", "user.email=a@b", "-c", "user.name=n"]
    for words in (
        ["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "x"],
        ["remote", "add", "origin", "https://me:hunter2hunter2@example.com/team/repo.git"],
    ):  # fmt: skip
        subprocess.run([*git, *words], check=True)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    canaries = {f"CANARY_{name}": value for name, value in CANARIES.items()}
    return job_environment(
        folder, **canaries, HF_TOKEN=BY_VALUE["hf"], NCCL_SECRET="plainwordplainword", OMP_NUM_THREADS="1", **more
    )


def fails(folder: Path, script: Path, **more: str) -> None:
    """Runs the job, named after a secret too. It must end as it does without the agent, whose only line, on the crash,
    holds no secret."""
    words = [
        "-m",
        "perfagent",
        "run",
        "--name",
        f"try {BY_VALUE['github']}",
        "--tag",
        BY_VALUE["aws"],
        str(script),
        *ARGUMENTS,
    ]
    done = subprocess.run(
        [sys.executable, *words],
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: cannot log in" in done.stderr
    own = [line for line in done.stderr.replace(str(Path(__file__).parents[3]), "").splitlines() if "perfagent" in line]
    assert len(own) == 1, own
    assert own[0].startswith("perfagent: the job crashed after step")
    assert leaked(own[0]) == []


def leaked(content: str) -> list[str]:
    """The canaries in a text, whole, or of a private key any line of it."""
    flat = content.replace("\\n", "\n")
    pieces = [
        (name, line)
        for name, value in CANARIES.items()
        for line in value.split("\n")
        if len(line) > 8 and "-----" not in line
    ]
    pieces += [("argument", value) for value in IN_ARGUMENTS]
    return [
        f"{name}: {shown[max(0, (at := shown.index(piece)) - 60) : at + 60]!r}"
        for name, piece in pieces
        for shown in (content, flat)
        if piece in shown
    ]


def everything_in(*folders: Path) -> str:
    """All bytes of all files, and all that is compressed in them."""
    parts = []
    # A job that failed leaves its last frames to a process that sends them, and deletes their files meanwhile.
    for path in (Path(at) / name for folder in folders for at, _, names in os.walk(folder) for name in names):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        parts.append(data)
        at = data.find(b"\x78")
        while at >= 0:
            with contextlib.suppress(zlib.error):
                parts.append(zlib.decompressobj().decompress(data[at:]))
            at = data.find(b"\x78", at + 1)
    return b"\n".join(parts).decode("utf-8", "replace")


@pytest.mark.long
@pytest.mark.fault
def test_x10_no_secret_of_a_careless_job_is_in_its_recording(tmp_path: Path, repository: Path) -> None:
    record = tmp_path / "record"
    fails(tmp_path, repository / "secrets_job.py", PERFAGENT_RECORD=str(record))
    written = everything_in(record, tmp_path / "state")
    assert "9ee4a0bf527be1dfadf0713484afc43b44c543cc" in written, "what is no secret stays"
    assert leaked(written) == []

    recording = Recording(record)
    assert recording.series("loss")
    context: dict[str, Any] = {}
    for told in recording.events("context"):  # each adds to what was told before
        context |= told
    assert context["git"] == {
        "commit": context["git"]["commit"], "branch": "main", "remote": "https://example.com/team/repo.git", "dirty": False,
    }  # fmt: skip
    config = context["config"]
    assert config["argparse"] == {
        "lr": 0.25, "api_key": "[redacted]", "database": "mysql://me:[redacted]@db/x", "run_label": "baseline",
        "words": ["[redacted]"],
    }  # fmt: skip
    assert config["config"]["batch_size"] == 4
    assert config["config"]["login"]["nested"][0]["user"] == "me"
    assert config["config"]["auth"] == "[redacted]"
    assert (config["model"]["class"], config["model"]["parameters"]) == ("Linear", 5)
    assert config["optimizer"]["lr"] == 0.25
    assert context["packages"]["torch"].startswith("2.")
    # and what libraries of the test's own process left in it
    environment = recording.events("context")[0]["environment"]
    assert environment.items() >= {"NCCL_SECRET": "[redacted]", "OMP_NUM_THREADS": "1"}.items()
    last = recording.events("state")[-1]
    assert last["state"] == "failed"
    assert "secret=[redacted]" in last["traceback"]
    assert 'File "' in last["traceback"]


class Listening(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).bodies.append(zlib.decompress(body) if self.headers.get("Content-Encoding") == "deflate" else body)
        answer = b'{"stored":0,"duplicate":0,"rejected":[],"commands":[]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes everything: (its address, the bodies)."""
    handler = type("Handler", (Listening,), {"bodies": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.fault
def test_x10_no_secret_of_a_careless_job_is_sent(
    tmp_path: Path, repository: Path, listening: tuple[str, list[bytes]]
) -> None:
    address, bodies = listening
    fails(tmp_path, repository / "secrets_job.py", PERFAGENT_SERVER=address, PERFAGENT_API_KEY=BY_VALUE["perfagent"])
    until(lambda: b"cannot log in" in b"".join(bodies))
    sent = b"\n".join(bodies).decode("utf-8", "replace")
    assert "[redacted]" in sent
    assert leaked(sent) == []
    assert leaked(everything_in(tmp_path / "state")) == []
