"""What one sender may send, and how many runs it may begin."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, MSGPACK, api, frame, send
from fastapi.testclient import TestClient

from perfagent.delivery.transport import Reply, judge
from perfagent.errors import ConfigError
from perfagent.wire import Frame, encode
from perfagent_server.ingest.sender_limits import Sender, SenderLimits
from perfagent_server.limits import Limits
from perfagent_server.refusal import RefusalError
from perfagent_server.settings import Settings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits_of(clock: Clock, **limits: float) -> tuple[SenderLimits, Sender]:
    endless = dict.fromkeys(("requests_per_s", "samples_per_s", "bytes_per_s", "runs_per_hour"), math.inf)
    made = Limits(**{**endless, **limits})
    return SenderLimits(made, clock=clock), Sender("key 1", made)


def test_a_bucket_holds_ten_seconds_and_fills_at_the_rate_of_the_limit() -> None:
    clock = Clock()
    limits, sender = limits_of(clock, requests_per_s=2.0)
    for _ in range(20):
        limits.take(sender, samples=1, size_bytes=1)
    with pytest.raises(RefusalError, match="key 1 sends more than 2 requests a second") as refused:
        limits.take(sender, samples=1, size_bytes=1)
    assert refused.value.why == "too_many_requests"
    assert refused.value.retry_after_s == 1
    clock.now += 1.0
    limits.take(sender, samples=1, size_bytes=1)
    limits.take(sender, samples=1, size_bytes=1)
    with pytest.raises(RefusalError):
        limits.take(sender, samples=1, size_bytes=1)
    assert limits.counters["refused_by_requests"] == 2


def test_a_frame_above_the_limit_comes_through_and_the_next_one_waits_for_it() -> None:
    clock = Clock()
    limits, sender = limits_of(clock, samples_per_s=100.0)
    limits.take(sender, samples=5000, size_bytes=1)
    with pytest.raises(RefusalError, match=r"100 samples a second.*samples_per_s") as refused:
        limits.take(sender, samples=1, size_bytes=1)
    assert refused.value.retry_after_s == 41  # 5000, of which the bucket held 1000
    clock.now += 40.02
    limits.take(sender, samples=1, size_bytes=1)


def test_a_refused_request_costs_nothing_and_senders_do_not_share() -> None:
    clock = Clock()
    limits, sender = limits_of(clock, bytes_per_s=10.0)
    limits.take(sender, samples=1, size_bytes=200)
    for _ in range(50):
        with pytest.raises(RefusalError):
            limits.take(sender, samples=1, size_bytes=200)
    limits.take(Sender("key 2", sender.limits), samples=1, size_bytes=1)
    clock.now += 10.11
    limits.take(sender, samples=1, size_bytes=1)


def test_without_limits_nothing_is_refused() -> None:
    limits, sender = limits_of(Clock())
    for _ in range(1000):
        limits.take(sender, samples=10**9, size_bytes=10**9)
        limits.begin_runs(sender, 1000)


def test_the_senders_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, sender = limits_of(Clock(), requests_per_s=1.0)
    for number in range(10_500):
        limits.take(Sender(f"run {number}", sender.limits), samples=1, size_bytes=1)
    assert len(limits._of) <= 10_000


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_a_limit_that_is_none_is_refused(value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requests_per_s"):
        Settings(data=tmp_path, requests_per_s=value)
    with pytest.raises(ConfigError, match="requests_per_s"):
        Limits().but({"requests_per_s": value})


# --- over HTTP ------------------------------------------------------------------------------------------------------------


def post(client: TestClient, sent: Frame, **headers: str) -> Any:
    return client.post("/api/v1/ingest", content=encode(sent), headers={**MSGPACK, **headers})


def made_key(client: TestClient, **body: Any) -> dict[str, str]:
    made = client.post("/api/v1/keys", json={"scope": "ingest", **body}, headers=ADMIN)
    assert made.status_code == 201, made.text
    return {"Authorization": f"Bearer {made.json()['key']}"}


@pytest.mark.fault
def test_s06_a_noisy_run_leaves_half_of_its_key_to_the_others() -> None:
    clock = Clock()
    limits, sender = limits_of(clock, samples_per_s=100.0)
    taken = {"noisy": 0, "quiet": 0}

    def send(run: str, samples: int) -> None:
        with contextlib.suppress(RefusalError):
            limits.take(sender, samples=samples, size_bytes=1, run=run)
            taken[run] += samples

    for _ in range(600):  # a minute in which only one of them is noisy
        clock.now += 0.1
        send("noisy", 50)
        send("noisy", 50)
        if clock.now - int(clock.now) < 0.1:
            send("quiet", 40)
    assert taken["quiet"] >= 40 * 59, "all that it sends"
    assert taken["noisy"] >= 50 * 59, "half of the limit"


def test_a_run_that_is_alone_with_its_key_has_all_of_its_limit() -> None:
    clock = Clock()
    limits, sender = limits_of(clock, samples_per_s=100.0)
    taken = 0
    for _ in range(600):
        clock.now += 0.1
        with contextlib.suppress(RefusalError):
            limits.take(sender, samples=20, size_bytes=1, run="alone")
            taken += 20
    assert 6000 <= taken <= 7020


@pytest.mark.fault
def test_s06_too_much_is_429_with_a_time_that_the_agent_waits_for(tmp_path: Path) -> None:
    with api(tmp_path, samples_per_s=10.0) as client:
        send(client, frame({"loss": [1.0] * 1000}))
        answer = post(client, frame({"loss": [1.0]}, seq=2, first_step=2000))
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert error["code"] == "too_many_requests"
        assert "PERFAGENT_" in error["message"] and "samples_per_s" in error["message"]
        wait = int(answer.headers["Retry-After"])
        assert 80 <= wait <= 182  # 90 s, spread over a whole extra interval
        told = judge(Reply(429, {"retry-after": str(wait)}, answer.content))
        assert (told.kind, told.pause_s) == ("retry", float(wait))
        assert post(client, frame({"loss": [1.0]}, run="other")).status_code == 200, "another run has its own limit"
        row = {"run": "by-json", "metrics": {f"m{at}": 1.0 for at in range(200)}}
        assert client.post("/api/v1/log", json=row).status_code == 200
        assert client.post("/api/v1/log", json=row).status_code == 429
        counters = client.get("/api/v1/self").json()["counters"]["limits"]
        assert counters["refused_by_samples"] == 2
        assert client.get("/api/v1/runs/r1/latest").json()["loss"]["step"] == 1000, "nothing of it was stored"


def test_a_key_may_have_limits_of_its_own(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        limited = made_key(client, limits={"requests_per_s": 0.1})
        assert post(client, frame({"loss": [1.0]}, seq=1), **limited).status_code == 200
        assert post(client, frame({"loss": [1.0]}, seq=2), **limited).status_code == 429
        assert post(client, frame({"loss": [1.0]}, seq=2), **made_key(client)).status_code == 200
        shown = client.get("/api/v1/keys", headers=ADMIN).json()["keys"]
        assert sorted(map(str, (key["limits"] for key in shown))) == ["{'requests_per_s': 0.1}", "{}"]
        for wrong, said in (
            ({"requests": 1}, "there is no limit 'requests'"),
            ({"requests_per_s": 0}, "must be above 0"),
        ):
            answer = client.post("/api/v1/keys", json={"scope": "ingest", "limits": wrong}, headers=ADMIN)
            assert answer.status_code == 422
            assert said in answer.json()["error"]["message"]
        wrong_id = client.patch("/api/v1/keys/nothing", json={"limits": {}}, headers=ADMIN)
        assert wrong_id.status_code == 404
    with api(tmp_path) as client:  # also after a restart
        assert [post(client, frame({"loss": [1.0]}, seq=seq), **limited).status_code for seq in (3, 4)] == [200, 429]


def test_an_administrator_of_a_project_does_not_lift_the_servers_limits(tmp_path: Path) -> None:
    with api(tmp_path, requests_per_s=5.0, runs_per_hour=math.inf) as client:
        admin = made_key(client, scope="admin", project="vision")

        def make(limits: dict[str, float], headers: dict[str, str]) -> Any:
            body = {"scope": "ingest", "project": "vision", "limits": limits}
            return client.post("/api/v1/keys", json=body, headers=headers)

        made = make({"requests_per_s": 5, "runs_per_hour": 1e300}, admin)
        assert made.status_code == 201, made.text
        address = f"/api/v1/keys/{made.json()['id']}"
        lifted = {"requests_per_s": 1e300}
        for answer in (make(lifted, admin), client.patch(address, json={"limits": lifted}, headers=admin)):
            assert answer.status_code == 403
            assert "requests_per_s may be at most 5, the server's own" in answer.json()["error"]["message"]
        assert client.patch(address, json={"limits": {"requests_per_s": 2}}, headers=admin).status_code == 200
        assert make(lifted, ADMIN).status_code == 201
        assert client.patch(address, json={"limits": lifted}, headers=ADMIN).status_code == 200


def test_limits_of_a_key_can_be_changed(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        key = made_key(client, limits={"requests_per_s": 0.1})
        address = "/api/v1/keys/" + key["Authorization"].split("_")[2]

        def limit(limits: dict[str, Any]) -> Any:
            return client.patch(address, json={"limits": limits}, headers=ADMIN)

        assert [post(client, frame({"loss": [1.0]}, seq=seq), **key).status_code for seq in (1, 2)] == [200, 429]
        assert limit({"samples_per_s": 1000}).json()["limits"] == {"samples_per_s": 1000}
        assert [post(client, frame({"loss": [1.0]}, seq=seq), **key).status_code for seq in (2, 3)] == [200, 200]
        assert limit({"samples": 1}).status_code == 422
        assert limit({}).json()["limits"] == {}
        entries = client.get("/api/v1/audit?action=key.limit", headers=ADMIN).json()["entries"]
        assert [entry["detail"] for entry in entries] == ["", "samples_per_s 1000"]


@pytest.mark.fault
def test_s06_runs_of_a_key_have_room_beside_a_noisy_one(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        client.app.state.services.sender_limits._clock = Clock()  # type: ignore[attr-defined] # it stands still
        key = made_key(client, limits={"requests_per_s": 0.5})
        answers = [post(client, frame({"loss": [1.0]}, run="noisy", seq=seq), **key) for seq in range(1, 9)]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert "run 'noisy' of key" in answers[-1].json()["error"]["message"]
        assert post(client, frame({"loss": [1.0]}, run="quiet"), **key).status_code == 200


@pytest.mark.parametrize("route", ["ingest", "log"])
def test_a_key_that_has_sent_too_much_is_refused_before_its_body_is_decoded(tmp_path: Path, route: str) -> None:
    with api(tmp_path) as client:
        limited = made_key(client, limits={"requests_per_s": 0.1})
        assert post(client, frame({"loss": [1.0]}), **limited).status_code == 200
        media = MSGPACK if route == "ingest" else {"Content-Type": "application/json"}
        answer = client.post(f"/api/v1/{route}", content=b"nothing", headers={**media, **limited})
        assert answer.status_code == 429
        answer = client.post(f"/api/v1/{route}", content=b"nothing", headers={**media, **made_key(client)})
        assert answer.status_code == 400


def test_a_sender_begins_so_many_runs_and_goes_on_in_those_that_are_there(tmp_path: Path) -> None:
    with api(tmp_path, runs_per_hour=30.0) as client:  # three at once
        for number in range(3):
            assert post(client, frame({"loss": [1.0]}, run=f"r{number}")).status_code == 200
        answer = post(client, frame({"loss": [1.0]}, run="r3"))
        assert answer.status_code == 429
        assert "runs_per_hour" in answer.json()["error"]["message"]
        assert int(answer.headers["Retry-After"]) >= 100
        assert post(client, frame({"loss": [1.0]}, run="r0", seq=2)).status_code == 200
        assert client.post("/api/v1/log", json={"run": "new", "metrics": {"x": 1}}).status_code == 429
        assert post(client, frame({"loss": [1.0]}, run="r3"), **made_key(client)).status_code == 200
        assert len(client.get("/api/v1/runs").json()["runs"]) == 4
    with api(tmp_path, runs_per_hour=10.0) as client:  # runs that are there count again for nobody
        for number in range(3):
            assert post(client, frame({"loss": [1.0]}, run=f"r{number}", seq=9)).status_code == 200


@pytest.mark.parametrize("starts", [False, True])
def test_one_request_does_not_begin_thousands_of_runs(tmp_path: Path, starts: bool) -> None:
    rows = [
        {"run": "a", "state": "starting"} if starts else {"run": f"r{number}", "metrics": {"x": 1}}
        for number in range(5000)
    ]
    with api(tmp_path) as client:
        answer = client.post("/api/v1/log", json=rows)
        assert answer.status_code == 400
        assert "this request begins 5000 runs; 2000 are allowed at once" in answer.json()["error"]["message"]
        assert client.get("/api/v1/runs").json()["runs"] == []


def test_ranks_that_start_one_run_count_as_one(tmp_path: Path) -> None:
    with api(tmp_path, runs_per_hour=10.0) as client:  # one at once
        rows = [{"run": "a", "rank": rank, "state": "starting"} for rank in range(64)]
        assert client.post("/api/v1/log", json=rows).status_code == 200
        assert client.post("/api/v1/log", json={"run": "a", "rank": 64, "state": "starting"}).status_code == 200
        assert client.post("/api/v1/log", json={"run": "a", "rank": 3, "state": "starting"}).status_code == 429


def test_projects_and_ranks_are_bounded_with_a_word_of_the_setting(tmp_path: Path) -> None:
    with api(tmp_path, max_projects=2, max_ranks=8) as client:
        assert post(client, frame({"loss": [1.0]}, run="a", project="p")).status_code == 200
        assert client.post("/api/v1/log", json={"project": "q", "run": "b", "metrics": {"x": 1}}).status_code == 200
        for answer in (
            post(client, frame({"loss": [1.0]}, run="c", project="r")),
            client.post("/api/v1/log", json={"project": "r", "run": "d", "metrics": {"x": 1}}),
        ):
            assert answer.status_code == 403
            assert "PERFAGENT_MAX_PROJECTS" in answer.json()["error"]["message"]
        assert post(client, frame({"loss": [1.0]}, run="c", project="q")).status_code == 200
        for answer in (
            post(client, frame({"loss": [1.0]}, run="a", rank=8)),
            client.post("/api/v1/log", json={"run": "b", "project": "q", "rank": 8, "metrics": {"x": 1}}),
        ):
            assert answer.status_code == 422
            assert "ranks 0 to 7" in answer.json()["error"]["message"]
            assert "PERFAGENT_MAX_RANKS" in answer.json()["error"]["message"]


def test_one_key_does_not_use_up_the_projects_of_all_others(tmp_path: Path) -> None:
    with api(tmp_path, max_projects=100) as client:
        clock = client.app.state.services.new_runs._clock = Clock()  # type: ignore[attr-defined]
        keys = [made_key(client), made_key(client)]

        def begin(number: int, key: dict[str, str]) -> Any:
            return post(client, frame({"loss": [1.0]}, run=f"run {number}", project=f"project {number}"), **key)

        assert [begin(number, keys[0]).status_code for number in range(11)] == [200] * 10 + [429]
        refused = begin(10, keys[0])
        assert int(refused.headers["Retry-After"]) >= 3600
        assert "more than 10 projects within an hour" in refused.json()["error"]["message"]
        assert begin(5, keys[0]).status_code == 200, "a project that is there may get more"
        assert begin(10, keys[1]).status_code == 200
        clock.now += 3600
        assert begin(11, keys[0]).status_code == 200


def test_names_beyond_the_limit_are_counted_and_say_the_setting(tmp_path: Path) -> None:
    with api(tmp_path, max_names=2) as client:
        reply = send(client, frame({"a": [1.0], "b": [1.0], "c": [1.0]}))
        assert reply["stored"] == 2
        assert [(item["name"], item["count"]) for item in reply["rejected"]] == [("c", 1)]
        assert "2 names already" in reply["rejected"][0]["reason"]
        assert "PERFAGENT_MAX_NAMES" in reply["rejected"][0]["reason"]


def test_a_deleted_run_may_begin_again_and_counts_again(tmp_path: Path) -> None:
    with api(tmp_path, runs_per_hour=20.0) as client:  # two at once
        assert post(client, frame({"loss": [1.0]}, run="a")).status_code == 200
        assert client.delete("/api/v1/runs/a", headers=ADMIN).status_code == 204
        assert post(client, frame({"loss": [1.0]}, run="a", seq=2)).status_code == 200
        assert post(client, frame({"loss": [1.0]}, run="b")).status_code == 429
