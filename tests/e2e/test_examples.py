"""The examples run as they are printed."""

from __future__ import annotations

import base64
import datetime
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import standardwebhooks
from builders import ServerProcess, free_port, job_environment, until
from e2e.launching import python

RANKS = ("torchrun", "ddp", "fsdp2", "zero")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("plain_loop.py", "--steps", "60"), "plain loop"),
        (("huggingface.py", "--steps", "12", "--output", "OUTPUT"), "hugging face"),
        (("torchrun.py", "--steps", "30"), "torchrun"),
        (("loop.py", "--steps", "60", "--checkpoints", "OUTPUT"), "loop"),
        (("ddp.py", "--steps", "30"), "ddp"),
        (("fsdp2.py", "--steps", "30"), "fsdp2"),
        (("zero.py", "--steps", "30"), "zero"),
        (("lightning_trainer.py", "--steps", "30"), "lightning"),
    ],
)
def test_an_example_trains_and_its_run_is_finished(
    server: ServerProcess, tmp_path: Path, arguments: tuple[str, ...], name: str
) -> None:
    script, *rest = arguments
    rest = [str(tmp_path / "output") if argument == "OUTPUT" else argument for argument in rest]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name in RANKS else []
    python(*launcher, str(EXAMPLES / script), *rest, folder=tmp_path, PERFAGENT_SERVER=server.url, HF_HUB_OFFLINE="1")
    runs = until(lambda: server.get("/runs")["runs"])
    assert [run["name"] for run in runs] == [name]
    summary = server.wait_for_state(runs[0]["run"], "finished")
    assert summary["step"] == int(rest[1])
    latest = server.get(f"/runs/{runs[0]['run']}/latest")
    assert {"loss", "lr", "step_time_s", "phase/forward_s", "phase/backward_s", "phase/optimizer_s"} <= set(latest)


def test_the_receiver_accepts_what_is_signed_and_refuses_what_is_not(tmp_path: Path) -> None:
    secret = "whsec_" + base64.b64encode(bytes(range(32))).decode()
    port = free_port()
    receiver = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "receive_webhook.py"), secret, str(port)],
        env=job_environment(tmp_path),
        stdout=subprocess.PIPE,
    )
    try:
        now = datetime.datetime.now(datetime.UTC)
        body = json.dumps({"type": "alert.firing", "data": {"alert": {"message": "hello"}}})
        good = {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": standardwebhooks.Webhook(secret).sign("msg_1", now, body),
        }

        def send(text: str, headers: dict[str, str]) -> int | None:
            try:
                return httpx.post(f"http://127.0.0.1:{port}/", content=text, headers=headers, trust_env=False).status_code
            except httpx.TransportError:
                return None

        assert until(lambda: send(body, good)) == 204
        assert send(body, good) == 204  # the same message again
        assert send(body + " ", good) == 401
        assert send(body, good | {"webhook-timestamp": str(int(now.timestamp()) - 3600)}) == 401
        assert send(body, {}) == 401
    finally:
        receiver.terminate()
        output = receiver.communicate(timeout=10)[0].decode()
    assert output.splitlines() == ["alert.firing hello"]
