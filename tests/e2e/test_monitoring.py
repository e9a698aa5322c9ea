"""From a training process to the verdict and the signed webhook, over real processes."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
import standardwebhooks
from builders import Receiver, ServerProcess, job_environment, server_process, sync, until
from e2e.launching import JOBS, python, values

pytestmark = pytest.mark.real

NAN_JOB = Path(__file__).parents[2] / "benchmarks" / "nan_job.py"


def test_loader_that_sleeps_is_data_wait_and_the_verdict(server: ServerProcess, tmp_path: Path) -> None:
    variables = {"PERFAGENT_SERVER": server.url, "PERFAGENT_RUN_ID": "slow"}
    output = python(str(JOBS / "slow_loader.py"), "60", folder=tmp_path, **variables)
    sync(job_environment(tmp_path, PERFAGENT_SERVER=server.url))
    server.wait_for_state("slow", "finished")
    own = [float(wait) for wait in re.search(r"^WAITS (.+)", output, re.MULTILINE)[1].split()]
    waits = values(server, "slow", "phase/data_s")
    assert sorted(waits) == list(range(1, 61))
    # Step by step, and of the differences the middle one: where the machine stops this process between the two clocks,
    # for once, neither of them is wrong.
    apart = statistics.median(waits[step] - own[step - 1] for step in range(2, 61))
    assert abs(apart) <= 0.05 * statistics.median(own[1:])

    verdict = until(
        lambda: (one := server.get("/runs/slow/verdict"))["rule"] == "data_bound" and one, why="no data wait"
    )
    assert verdict["evidence"]["share_pct"] > 50
    assert "worker" in verdict["fix"]


def test_a_nan_loss_arrives_as_one_signed_webhook(receiver: Receiver, tmp_path: Path) -> None:
    with server_process(tmp_path / "server", PERFAGENT_WEBHOOK_ALLOW=receiver.address) as server:
        channel = server.admin("POST", "/channels", {"name": "test", "kind": "webhook", "url": receiver.url})
        python(str(NAN_JOB), "20", "3", folder=tmp_path, PERFAGENT_SERVER=server.url, PERFAGENT_RUN_ID="nan")
        delivery = until(lambda: receiver.of_type("alert.firing"), why="no webhook arrived")[0]
        standardwebhooks.Webhook(channel["secret"]).verify(delivery.body, delivery.headers)
        data = delivery.json["data"]
        assert (data["alert"]["rule"], data["alert"]["severity"]) == ("nonfinite_loss", "critical")
        assert data["run"] == "nan" and data["fix"]
        # NaN in the loss and in the gradients of the same step have one cause: one alert, on whatever ranks.
        alerts = server.get("/runs/nan/alerts")["alerts"]
        assert [alert["rule"] for alert in alerts].count("nonfinite_loss") == 1
        assert len({delivery.headers["webhook-id"] for delivery in receiver.of_type("alert.firing")}) == 1


@pytest.mark.fault
def test_a01_without_a_server_training_goes_on_and_is_recorded(tmp_path: Path) -> None:
    output = python(str(JOBS / "slow_loader.py"), "3", folder=tmp_path, PERFAGENT_SERVER="http://127.0.0.1:9")
    assert "WAITS" in output
    assert list((tmp_path / "state" / "perfagent").rglob("*")), "nothing was recorded"
