"""What one sender may send, and how many runs it may begin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, MSGPACK, api, frame, send
from clocks import Clock
from fastapi.testclient import TestClient

from perfagent.delivery.transport import Reply, judge
from perfagent.errors import ConfigError
from perfagent.wire import encode
from perfagent_server.ingest.sender_limits import Sender, SenderLimits
from perfagent_server.limits import Limits
from perfagent_server.refusal import RefusalError
from perfagent_server.settings import Settings

ENDLESS = dict.fromkeys(("requests_per_s", "samples_per_s", "bytes_per_s", "runs_per_hour"), math.inf)


class Gate:
    """Limits by a clock that is turned by hand, and their senders."""

    def __init__(self, **limits: float) -> None:
        self.clock, self.of_each = Clock(100.0), Limits(**{**ENDLESS, **limits})
        self.limits = SenderLimits(self.of_each, clock=self.clock)

    def take(self, samples: int = 1, size_bytes: int = 1, *, sender: str = "key 1", run: str | None = None) -> None:
        self.limits.take(Sender(sender, self.of_each), samples=samples, size_bytes=size_bytes, run=run)

    def refusal(self, samples: int = 1, size_bytes: int = 1) -> RefusalError:
        with pytest.raises(RefusalError) as refused:
            self.take(samples, size_bytes)
        return refused.value


def test_a_bucket_holds_ten_seconds_and_fills_at_its_rate() -> None:
    gate = Gate(requests_per_s=2.0)
    for _ in range(20):
        gate.take()
    refused = gate.refusal()
    assert (refused.why, refused.retry_after_s) == ("too_many_requests", 1)
    assert "key 1 sends more than 2 requests a second" in str(refused)
    gate.clock.at += 1.0
    gate.take()
    gate.take()
    gate.refusal()
    assert gate.limits.counters["refused_by_requests"] == 2


def test_a_frame_above_the_limit_passes_and_the_next_one_waits() -> None:
    gate = Gate(samples_per_s=100.0)
    gate.take(5000)
    refused = gate.refusal()
    assert refused.retry_after_s == 41  # 5000, of which the bucket held 1000
    assert "samples_per_s" in str(refused)
    gate.clock.at += 40.0
    gate.refusal()
    gate.clock.at += 0.02
    gate.take()


def test_a_refused_request_costs_nothing_and_nobody_else() -> None:
    gate = Gate(bytes_per_s=10.0)
    gate.take(1, 200)
    for _ in range(50):
        gate.refusal(1, 200)
    gate.take(sender="key 2")
    gate.clock.at += 10.11
    gate.take()
    endless = Gate()
    for _ in range(1000):
        endless.take(10**9, 10**9)
        endless.limits.begin_runs(Sender("key 1", endless.of_each), 1000)


@pytest.mark.parametrize("value", [0, math.nan])
def test_a_limit_that_is_none_is_refused(value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requests_per_s"):
        Settings(data=tmp_path, requests_per_s=value)
    with pytest.raises(ConfigError, match="requests_per_s"):
        Limits().but({"requests_per_s": value})


@pytest.mark.fault
def test_s06_a_noisy_run_leaves_half_of_its_key_to_the_others() -> None:
    gate = Gate(samples_per_s=100.0)
    taken = {"noisy": 0, "quiet": 0, "alone": 0}

    def offer(run: str, samples: int, key: str = "key 1") -> None:
        with contextlib.suppress(RefusalError):
            gate.take(samples, sender=key, run=run)
            taken[run] += samples

    for tenth in range(600):  # a minute in which only one of them is noisy
        gate.clock.at += 0.1
        offer("noisy", 50)
        offer("noisy", 50)
        offer("alone", 20, "key 2")
        if tenth % 10 == 0:
            offer("quiet", 40)
    assert taken["quiet"] == 40 * 60, "all that it sends"
    assert taken["noisy"] >= 50 * 59, "half of the limit"
    assert 6000 <= taken["alone"] <= 7020, "all of it"


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[TestClient]:
    """A server whose clock stands still, for tests with keys of their own."""
    settings = {"samples_per_s": 10.0, "requests_per_s": 5.0, "runs_per_hour": math.inf}
    with api(tmp_path_factory.mktemp("limits"), clocks={"monotonic": clock}, **settings) as running:
        yield running


def post(
    client: TestClient, run: str = "r1", seq: int = 1, samples: int = 1, key: dict[str, str] | None = None, **more: Any
) -> Any:
    sent = frame({"loss": [1.0] * samples}, run=run, seq=seq, **more)
    return client.post("/api/v1/ingest", content=encode(sent), headers={**MSGPACK, **(key or {})})


def log(client: TestClient, *rows: dict[str, Any]) -> Any:
    return client.post("/api/v1/log", json=rows)


def said(answer: Any) -> str:
    return str(answer.json()["error"]["message"])


def made_key(client: TestClient, headers: dict[str, str] = ADMIN, **body: Any) -> tuple[dict[str, str], str]:
    """The headers of a new key, and its address."""
    made = client.post("/api/v1/keys", json={"scope": "ingest", **body}, headers=headers)
    assert made.status_code == 201, made.text
    return {"Authorization": f"Bearer {made.json()['key']}"}, f"/api/v1/keys/{made.json()['id']}"


@pytest.mark.fault
def test_s06_too_much_is_429_with_a_time_that_agents_wait_for(client: TestClient) -> None:
    assert post(client, samples=1000).status_code == 200
    answer = post(client, seq=2, first_step=2000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
    assert "PERFAGENT_" in said(answer) and "samples_per_s" in said(answer)
    wait = int(answer.headers["Retry-After"])
    assert 80 <= wait <= 182  # 90 s, spread over a whole extra interval
    judged = judge(Reply(429, {"retry-after": str(wait)}, answer.content))
    assert (judged.kind, judged.pause_s) == ("retry", float(wait))
    assert post(client, "other").status_code == 200, "another run has its own limit"
    row = {"run": "by-json", "metrics": {f"m{at}": 1.0 for at in range(200)}}
    assert [log(client, row).status_code for _ in range(2)] == [200, 429]
    assert client.get("/api/v1/self").json()["counters"]["limits"]["refused_by_samples"] == 2
    assert client.get("/api/v1/runs/r1/latest").json()["loss"]["step"] == 1000, "nothing of it was stored"


def test_a_key_has_limits_of_its_own_that_can_be_changed(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        key, address = made_key(client, limits={"requests_per_s": 0.1})
        assert [post(client, seq=seq, key=key).status_code for seq in (1, 2)] == [200, 429]
        # too much: its body is not decoded any more
        assert client.post("/api/v1/ingest", content=b"nothing", headers={**MSGPACK, **key}).status_code == 429
        assert client.post("/api/v1/log", content=b"nothing", headers=key).status_code == 429
        other, _ = made_key(client)
        assert post(client, seq=2, key=other).status_code == 200
        assert client.post("/api/v1/ingest", content=b"nothing", headers={**MSGPACK, **other}).status_code == 400
        shown = client.get("/api/v1/keys", headers=ADMIN).json()["keys"]
        assert sorted(str(one["limits"]) for one in shown) == ["{'requests_per_s': 0.1}", "{}"]
    with api(tmp_path) as client:  # also after a restart
        assert [post(client, seq=seq, key=key).status_code for seq in (3, 4)] == [200, 429]

        def limit(limits: dict[str, Any], at: str = address) -> Any:
            return client.patch(at, json={"limits": limits}, headers=ADMIN)

        assert limit({"samples_per_s": 1000}).json()["limits"] == {"samples_per_s": 1000}
        assert [post(client, seq=seq, key=key).status_code for seq in (4, 5)] == [200, 200]
        for wrong, words in (({"requests": 1}, "'requests'"), ({"requests_per_s": 0}, "above 0")):
            made = client.post("/api/v1/keys", json={"scope": "ingest", "limits": wrong}, headers=ADMIN)
            for answer in (made, limit(wrong)):
                assert (answer.status_code, words in said(answer)) == (422, True)
        assert limit({}, "/api/v1/keys/nothing").status_code == 404
        assert limit({}).json()["limits"] == {}
        entries = client.get("/api/v1/audit?action=key.limit", headers=ADMIN).json()["entries"]
        assert [entry["detail"] for entry in entries] == ["", "samples_per_s 1000"]


def test_an_administrator_of_a_project_lifts_no_server_limit(client: TestClient) -> None:
    admin, _ = made_key(client, scope="admin", project="vision")
    _, address = made_key(client, admin, project="vision", limits={"requests_per_s": 5, "runs_per_hour": 1e300})
    lifted = {"scope": "ingest", "project": "vision", "limits": {"requests_per_s": 1e300}}
    for answer in (
        client.post("/api/v1/keys", json=lifted, headers=admin),
        client.patch(address, json={"limits": lifted["limits"]}, headers=admin),
    ):
        assert (answer.status_code, "requests_per_s may be at most 5" in said(answer)) == (403, True)
    assert client.patch(address, json={"limits": lifted["limits"]}, headers=ADMIN).status_code == 200


def test_a_sender_begins_so_many_runs_and_goes_on_in_others(tmp_path: Path) -> None:
    with api(tmp_path, runs_per_hour=30.0) as client:  # three at once
        assert [post(client, f"r{number}").status_code for number in range(4)] == [200, 200, 200, 429]
        answer = post(client, "r3")
        assert "runs_per_hour" in said(answer)
        assert int(answer.headers["Retry-After"]) >= 100
        assert post(client, "r0", 2).status_code == 200
        assert log(client, {"run": "new", "metrics": {"x": 1}}).status_code == 429
        assert post(client, "r3", key=made_key(client)[0]).status_code == 200
        assert len(client.get("/api/v1/runs").json()["runs"]) == 4
    with api(tmp_path, runs_per_hour=20.0) as client:  # two at once; runs that are there count again for nobody
        assert [post(client, f"r{number}", 9).status_code for number in range(3)] == [200] * 3
        assert post(client, "a").status_code == 200
        assert client.delete("/api/v1/runs/a", headers=ADMIN).status_code == 204
        assert post(client, "a", 2).status_code == 200, "a deleted run may begin again"
        assert post(client, "b").status_code == 429, "and counts again"


def test_one_request_does_not_begin_thousands_of_runs(tmp_path: Path) -> None:
    with api(tmp_path, runs_per_hour=10.0) as client:  # one at once
        answer = log(client, *({"run": f"r{number}", "metrics": {"x": 1}} for number in range(5000)))
        assert (answer.status_code, "5000 runs" in said(answer)) == (400, True)
        assert client.get("/api/v1/runs").json()["runs"] == []
        ranks = [{"run": "a", "rank": rank, "state": "starting"} for rank in range(65)]
        assert [log(client, *rows).status_code for rows in (ranks[:64], ranks[64:], ranks[3:4])] == [200, 200, 429]


def test_projects_ranks_and_names_are_bounded_by_settings(tmp_path: Path) -> None:
    with api(tmp_path, max_projects=2, max_ranks=8, max_names=2) as client:
        assert post(client, "a", project="p").status_code == 200
        assert log(client, {"project": "q", "run": "b", "metrics": {"x": 1}}).status_code == 200
        third = post(client, "c", project="r"), log(client, {"project": "r", "run": "d", "metrics": {"x": 1}})
        for answer in third:
            assert (answer.status_code, "PERFAGENT_MAX_PROJECTS" in said(answer)) == (403, True)
        assert post(client, "c", project="q", rank=7).status_code == 200
        ninth = {"run": "b", "project": "q", "rank": 8, "metrics": {"x": 1}}
        for answer in (post(client, "a", rank=8), log(client, ninth)):
            assert (answer.status_code, "ranks 0 to 7" in said(answer)) == (422, True)
            assert "PERFAGENT_MAX_RANKS" in said(answer)
        reply = send(client, frame({"a": [1.0], "b": [1.0], "c": [1.0]}, project="q", run="names"))
        assert (reply["stored"], [(one["name"], one["count"]) for one in reply["rejected"]]) == (2, [("c", 1)])
        assert "PERFAGENT_MAX_NAMES" in reply["rejected"][0]["reason"]
