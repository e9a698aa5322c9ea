"""What a run has taken: hours of GPUs and cores, energy, and money at its project's price."""

from __future__ import annotations

from typing import Any

import pytest
from api_builders import ADMIN, send
from fastapi.testclient import TestClient

from perfagent.wire import Event, Frame, Group

BEGIN = 1_700_000_000.0
HOUR_S = 3600.0


def process(
    client: TestClient, rank: int, host: str, *, hours: float, attempt: int = 1, begin: float = BEGIN, run: str = "r1",
    end: str | None = "finished", **values: float,
) -> None:  # fmt: skip
    """A process that ran for so long, and whose last readings were these."""
    times = [begin, begin + hours * HOUR_S]
    columns = {name.replace("__", "/"): [0.0, value] for name, value in values.items()}
    events = [Event(kind="state", time=begin, step=0, data={"state": "running", "host": host, "world_size": 4})]
    if end is not None:
        events.append(Event(kind="state", time=times[1], step=10, data={"state": end}))
    group = Group(step=[1, 10], time=times, monotonic=times, values=columns)
    source = f"{run}-{attempt}-{rank}"
    made = Frame(
        project="p", run=run, source=source, attempt=attempt, rank=rank, seq=1, groups=[group], events=events
    )  # fmt: skip
    send(client, made)


def spent(client: TestClient, run: str = "r1") -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{run}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["spent"]
    return found


def put_price(client: TestClient, project: str = "", **price: Any) -> None:
    answer = client.put("/api/v1/prices", params={"project": project}, json=price, headers=ADMIN)
    assert answer.status_code == 200, answer.text


def on_two_hosts(client: TestClient, attempt: int, begin: float, hours: float, energy_j: float) -> None:
    """Four ranks; on each host one of them tells the cores."""
    for rank in range(4):
        leads = {"host__cores": 16.0} if rank % 2 == 0 else {}
        process(
            client, rank, f"node{rank // 2}", hours=hours, attempt=attempt, begin=begin,
            gpu__memory_used_bytes=1e9, gpu__energy_j=energy_j, **leads,
        )  # fmt: skip


@pytest.mark.sql
def test_hours_and_energy_of_all_ranks_and_attempts_add_up(client: TestClient) -> None:
    """A price makes money of them, and an average hour once the run has ended."""
    on_two_hosts(client, 1, BEGIN, 2.0, 1.8e6)
    on_two_hosts(client, 2, BEGIN + 10 * HOUR_S, 1.0, 0.9e6)  # what lies between is nobody's
    found = spent(client)
    hours = [found[name] for name in ("hours", "gpu_hours", "cpu_core_hours", "gpu_energy_kwh")]
    assert hours == pytest.approx([3.0, 12.0, 96.0, 4 * 2.7e6 / 3.6e6])
    assert (found["money"], found["money_per_hour"], found["currency"]) == (None, None, "")
    put_price(client, "p", gpu_hour=2.5, cpu_core_hour=0.01, kwh=0.4, currency="EUR")
    found, whole = spent(client), 12 * 2.5 + 96 * 0.01 + 3.0 * 0.4
    assert [found["money"], found["money_per_hour"]] == pytest.approx([whole, whole / 3])
    assert found["currency"] == "EUR"


def test_hour_of_a_live_run_is_that_of_its_present_processes(client: TestClient) -> None:
    put_price(client, gpu_hour=2.0, currency="USD")
    on_two_hosts(client, 1, BEGIN, 2.0, 0.0)
    process(client, 0, "node0", hours=1.0, attempt=2, begin=BEGIN + 2 * HOUR_S, end=None, gpu__memory_used_bytes=1e9)
    found = spent(client)
    assert found["money"] == pytest.approx((8 + 1) * 2.0)
    assert found["money_per_hour"] == pytest.approx(2.0)


def test_a_projects_own_price_comes_before_that_of_all(client: TestClient) -> None:
    process(client, 0, "laptop", hours=1.0, host__cores=8.0)
    put_price(client, cpu_core_hour=0.02, currency="USD")
    assert spent(client)["money"] == pytest.approx(0.16)
    put_price(client, "p", cpu_core_hour=0.05, currency="EUR")
    assert (spent(client)["money"], spent(client)["currency"]) == (pytest.approx(0.4), "EUR")
    assert client.delete("/api/v1/prices?project=p", headers=ADMIN).status_code == 204
    assert spent(client)["currency"] == "USD"
    assert client.delete("/api/v1/prices?project=p", headers=ADMIN).status_code == 404


def test_what_is_not_known_has_no_price(client: TestClient) -> None:
    put_price(client, gpu_hour=2.0, cpu_core_hour=1.0, currency="USD")
    answer = client.post("/api/v1/log", json={"project": "p", "run": "by hand", "step": 1, "metrics": {"loss": 1.0}})
    assert answer.status_code == 200
    [run] = client.get("/api/v1/runs").json()["runs"]
    found = spent(client, run["run"])
    assert (found["gpu_hours"], found["cpu_core_hours"], found["money"]) == (None, None, None)


def test_joules_a_token_are_of_all_gpus_over_a_steps_tokens(client: TestClient) -> None:
    for rank in range(2):
        process(
            client, rank, "node", hours=0.01, tokens_per_s=1000.0, step_time_s=0.5, gpu__energy_per_step_j=100.0
        )  # fmt: skip
    timing = client.get("/api/v1/runs/r1/timing").json()
    tokens = timing["rates"]["tokens_per_s"]["mean"] * timing["series"]["step_time_s"]["mean"]
    assert spent(client)["gpu_energy_per_token_j"] == pytest.approx(200.0 / tokens)


def test_a_price_that_cannot_be_is_refused(client: TestClient) -> None:
    for body in (
        {"currency": "EUR"}, {"currency": "EUR", "gpu_hour": -1}, {"currency": "", "gpu_hour": 1}, {"gpu_hour": 1},
        {"currency": "two words", "gpu_hour": 1}, {"currency": "EUR", "gpu_hours": 1},
    ):  # fmt: skip
        assert client.put("/api/v1/prices", json=body, headers=ADMIN).status_code == 422, body
    assert client.get("/api/v1/prices").json() == {"prices": []}


def test_a_row_that_comes_a_week_after_the_end_adds_no_hours(client: TestClient) -> None:
    put_price(client, cpu_core_hour=1.0, currency="EUR")
    process(client, 0, "node", hours=2.0, host__cores=4.0)
    before = spent(client)
    late = Group(step=[11], time=[BEGIN + 200 * HOUR_S], monotonic=[1.0], values={"test/acc": [0.9]})
    send(client, Frame(project="p", run="r1", source="r1-1-0", attempt=1, rank=0, seq=2, groups=[late]))
    send(client, Frame(project="p", run="r1", source="http-late", attempt=1, rank=0, seq=1, groups=[late]))
    assert spent(client) == before
    assert before["money_per_hour"] == pytest.approx(4.0)
