"""The examples run as they are printed."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import standardwebhooks
from builders import ServerProcess, free_port, job_environment, sync, until, web
from e2e.launching import python
from preloaded import run

pytestmark = pytest.mark.real
EXAMPLES = Path(__file__).parents[2] / "examples"


def one_new_run(server: ServerProcess, known: set[str], name: str, steps: int) -> None:
    """A training made one run, which is finished, with all that any run has."""
    runs = until(lambda: [run for run in server.get("/runs")["runs"] if run["run"] not in known])
    assert [run["name"] for run in runs] == [name]
    assert server.wait_for_state(runs[0]["run"], "finished")["step"] == steps
    latest = server.get(f"/runs/{runs[0]['run']}/latest")
    assert {"loss", "lr", "step_time_s", "phase/forward_s", "phase/backward_s", "phase/optimizer_s"} <= set(latest)


def known_runs(server: ServerProcess) -> set[str]:
    return {run["run"] for run in server.get("/runs")["runs"]}


@pytest.mark.parametrize(
    ("script", "steps", "options", "name"),
    [
        ("plain_loop.py", 60, (), "plain loop"),
        pytest.param("huggingface.py", 12, ("--output", "OUTPUT"), "hugging face", marks=pytest.mark.long),
        ("loop.py", 60, ("--checkpoints", "OUTPUT"), "loop"),
        ("lightning_trainer.py", 30, (), "lightning"),
    ],
)
def test_an_example_trains_and_its_run_is_finished(
    shared_server: ServerProcess, tmp_path: Path, script: str, steps: int, options: tuple[str, ...], name: str
) -> None:
    known = known_runs(shared_server)
    more = [str(tmp_path / "output") if option == "OUTPUT" else option for option in options]
    environment = job_environment(tmp_path, PERFAGENT_SERVER=shared_server.url, HF_HUB_OFFLINE="1")
    [ended] = run([str(EXAMPLES / script), "--steps", str(steps), *more], tmp_path, [environment])
    assert ended.returncode == 0, ended
    sync(environment)
    one_new_run(shared_server, known, name, steps)


def test_example_that_breaks_is_explained_by_the_models_input(shared_server: ServerProcess, tmp_path: Path) -> None:
    known = known_runs(shared_server)
    python(str(EXAMPLES / "nan.py"), folder=tmp_path, PERFAGENT_SERVER=shared_server.url)
    sync(job_environment(tmp_path, PERFAGENT_SERVER=shared_server.url))
    one_new_run(shared_server, known, "nan", 300)
    (run,) = {run["run"] for run in shared_server.get("/runs")["runs"]} - known

    def explained() -> bool:
        verdict = shared_server.get(f"/runs/{run}/verdict")
        return bool(verdict["rule"] == "nonfinite_loss" and "The batch of step 200 itself" in verdict["message"])

    assert until(explained)


@pytest.mark.parametrize(
    "name", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long), pytest.param("zero", marks=pytest.mark.long)]
)
def test_an_example_of_several_ranks_trains_and_is_one_run(
    shared_server: ServerProcess, tmp_path: Path, name: str
) -> None:
    known, port = known_runs(shared_server), str(free_port())
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job |= {"PERFAGENT_SERVER": shared_server.url, "TORCHELASTIC_RUN_ID": name}  # as torchrun says it
    ranks = [job_environment(tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(2)]
    ended = run([str(EXAMPLES / f"{name}.py"), "--steps", "30"], tmp_path, ranks)
    assert [one.returncode for one in ended] == [0, 0], ended
    sync(ranks[0])
    one_new_run(shared_server, known, name, 30)


@pytest.mark.long
def test_the_example_for_torchrun_is_started_by_it(shared_server: ServerProcess, tmp_path: Path) -> None:
    known = known_runs(shared_server)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python(
        *launcher, str(EXAMPLES / "torchrun.py"), "--steps", "30", folder=tmp_path, PERFAGENT_SERVER=shared_server.url
    )
    one_new_run(shared_server, known, "torchrun", 30)


SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def signed(port: int, ident: str, body: str, *, sent: str = "", **changes: str) -> int | None:
    """The status of the answer to a signed message, or None where nobody answers. sent: another text than was signed."""
    now = datetime.datetime.now(datetime.UTC)
    headers = {"webhook-id": ident, "webhook-timestamp": str(int(now.timestamp()))}
    headers["webhook-signature"] = standardwebhooks.Webhook(SECRET).sign(ident, now, body)
    try:
        return web().post(f"http://127.0.0.1:{port}/", content=sent or body, headers=headers | changes).status_code
    except httpx.TransportError:
        return None


def test_receiver_accepts_what_is_signed_and_refuses_the_rest(tmp_path: Path) -> None:
    port = free_port()
    over = {"resolved": "the run ended (finished)"}
    data = {"alert": {"message": "fine"}, "run_name": "nan", "evidence": over, "url": "http://127.0.0.1:8420/run/r"}
    command = [sys.executable, str(EXAMPLES / "receive_webhook.py"), SECRET, str(port)]
    receiver = subprocess.Popen(command, env=job_environment(tmp_path), stdout=subprocess.PIPE)
    try:
        body = json.dumps({"type": "alert.firing", "data": {"alert": {"message": "hello"}}})
        assert until(lambda: signed(port, "msg_1", body)) == 204
        assert signed(port, "msg_1", body) == 204  # the same message again
        assert signed(port, "msg_3", json.dumps({"type": "alert.resolved", "data": data})) == 204
        assert signed(port, "msg_2", body, sent=body + " ") == 401
        assert signed(port, "msg_2", body, **{"webhook-timestamp": "1700000000"}) == 401
        assert signed(port, "msg_2", body, **{"webhook-signature": ""}) == 401
    finally:
        receiver.terminate()
        output = receiver.communicate(timeout=10)[0].decode()
    assert output.splitlines() == ["alert.firing hello", f"alert.resolved ({over['resolved']}) nan: fine {data['url']}"]


def test_script_runs_once_a_message_although_its_receiver_dies(tmp_path: Path) -> None:
    port, handled, ran = free_port(), tmp_path / "handled.sqlite", tmp_path / "ran"
    script = f"import os; open({str(ran)!r}, 'a').write(os.environ['WEBHOOK_ID'] + chr(10))"
    words = [str(EXAMPLES / "alert_to_script.py"), SECRET, str(port), str(handled), sys.executable, "-c", script]

    def done() -> int:
        with contextlib.closing(sqlite3.connect(handled)) as connection:
            return int(connection.execute("SELECT count(*) FROM message WHERE done").fetchone()[0])

    for _ in range(2):
        receiver = subprocess.Popen([sys.executable, *words], env=job_environment(tmp_path), stdout=subprocess.DEVNULL)
        try:
            for ident in ("msg_1", "msg_2", "msg_1"):
                assert until(lambda ident=ident: signed(port, ident, '{"type": "alert.firing"}')) == 204
            assert signed(port, "msg_3", '{"type": "alert.resolved"}') == 204
            until(lambda: done() == 2)  # a command under way would be started again
        finally:
            receiver.kill()
            receiver.wait()
    assert ran.read_text().split() == ["msg_1", "msg_2"]
