"""A training process whose loader is slow, in a project with a price: its data wait is told in money an hour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import Receiver, server_process, until
from commands import perfagent_process
from e2e.launching import JOBS, python

PRICE_OF_A_CORE = 0.25


@pytest.mark.long
def test_a_run_with_a_price_is_told_what_its_data_wait_costs_an_hour(receiver: Receiver, tmp_path: Path) -> None:
    with server_process(tmp_path / "server", PERFAGENT_WEBHOOK_ALLOW=receiver.address) as server:
        server.admin("POST", "/channels", {"name": "test", "kind": "webhook", "url": receiver.url})
        here = {"PERFAGENT_SERVER": server.url, "PERFAGENT_ADMIN_TOKEN": server.admin_token}
        options = ("--cpu-core-hour", str(PRICE_OF_A_CORE), "--currency", "EUR")
        said = perfagent_process(tmp_path, "prices", "set", *options, **here)
        assert said.stdout == "all projects: 0.25 EUR a CPU core hour\n", said.stderr
        # Long enough that it is judged while it goes on, on a busy machine too: a run that has ended costs nothing any more.
        python(str(JOBS / "slow_loader.py"), "160", folder=tmp_path, PERFAGENT_RUN_ID="slow", **here)
        server.wait_for_state("slow", "finished")

        verdict = until(lambda: _data_bound(server.get("/runs/slow/verdict")))
        cores = server.get("/runs/slow/latest")["host/cores"]["value"]
        share = verdict["evidence"]["share_pct"] / 100
        assert verdict["money_per_hour"] == pytest.approx(share * cores * PRICE_OF_A_CORE, rel=1e-6)
        assert verdict["cost"].endswith("EUR an hour") and verdict["currency"] == "EUR"

        told = until(lambda: _about_data(receiver), why="no webhook arrived")
        its_share = told["evidence"]["share_pct"] / 100  # of the steps at which it fired
        assert told["alert"]["money_per_hour"] == pytest.approx(its_share * cores * PRICE_OF_A_CORE, rel=1e-6)

        spent = server.get("/runs/slow")["spent"]
        assert spent["money"] == pytest.approx(spent["cpu_core_hours"] * PRICE_OF_A_CORE)
        shown = perfagent_process(tmp_path, "show", "slow", **here).stdout
        assert "EUR an hour" in shown and "Costs: " in shown and "CPU core hours; cost" in shown
        told = json.loads(perfagent_process(tmp_path, "show", "slow", "--json", **here).stdout)
        assert told["verdict"]["money_per_hour"] == verdict["money_per_hour"]


def _data_bound(found: dict[str, Any]) -> dict[str, Any] | None:
    return found if found["rule"] == "data_bound" else None


def _about_data(receiver: Receiver) -> dict[str, Any] | None:
    told = (one.json["data"] for one in receiver.of_type("alert.firing"))
    return next((data for data in told if data["alert"]["rule"] == "data_bound"), None)
