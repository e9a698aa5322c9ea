"""Guesses at passwords are slowed down, per address and per name; nobody is locked out for good."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from api_builders import ADMIN, api
from clocks import Clock
from engine_bench import NOW
from fastapi.testclient import TestClient
from sqlalchemy import Connection

from perfagent_server.security.login_limits import LoginLimits, of_address, of_device, of_name

PASSWORD = "correct horse battery"


def limits_of(client: TestClient) -> LoginLimits:
    limits: LoginLimits = client.app.state.services.people.limits  # type: ignore[attr-defined]
    return limits


def log_in(client: TestClient, password: str, name: str = "ada") -> int:
    return client.post("/login", data={"name": name, "password": password}).status_code


def test_the_right_password_is_refused_during_the_wait_and_taken_after_it(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        clock = limits_of(client)._clock = Clock(NOW)
        body = {"name": "ada", "password": PASSWORD, "roles": [{"role": "viewer"}]}
        assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
        assert [log_in(client, "a wrong one") for _ in range(6)] == [401] * 5 + [429]
        answer = client.post("/login", data={"name": "ada", "password": PASSWORD})
        assert answer.status_code == 429 and "too many wrong passwords" in answer.text.lower()
        clock.at += int(answer.headers["Retry-After"])
        assert log_in(client, PASSWORD) == 303
        client.cookies.clear()
        assert log_in(client, "a wrong one") == 401, "a right password clears the count of its name"


def test_guesses_during_the_wait_need_no_turn_of_the_writer(tmp_path: Path) -> None:
    """And neither does a logout with a cookie that is no session's."""
    with api(tmp_path) as client:
        limits_of(client)._clock = Clock(NOW)
        assert [log_in(client, "a wrong one") for _ in range(6)] == [401] * 5 + [429]
        turn, done = threading.Event(), threading.Event()

        def holds(_connection: Connection) -> None:
            turn.set()
            done.wait(60)

        held = client.app.state.services.database.submit(holds)  # type: ignore[attr-defined]
        turn.wait(60)
        with ThreadPoolExecutor(2) as strangers:
            guess = strangers.submit(log_in, client, "a wrong one")
            leave = strangers.submit(client.delete, "/api/v1/session", headers={"Cookie": "perfagent_session=x"})
            try:
                assert guess.result(timeout=30) == 429
                assert leave.result(timeout=30).status_code == 204
            finally:
                done.set()
        held.result(timeout=60)


def known_browser(client: TestClient) -> dict[str, str]:
    """The cookie of a browser in which ada has logged in. The client has no cookies."""
    limits_of(client)._clock = Clock(NOW)
    body = {"name": "ada", "password": PASSWORD, "roles": [{"role": "viewer"}]}
    assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
    assert log_in(client, PASSWORD) == 303
    cookie = {"perfagent_device": client.cookies["perfagent_device"]}
    client.cookies.clear()
    return cookie


def test_who_has_logged_in_here_before_is_not_kept_out_by_a_stranger(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        known = known_browser(client)
        statuses = [log_in(client, "a guess of a stranger") for _ in range(6)]
        assert statuses[-1] == 429
        client.cookies.update(known)
        assert log_in(client, PASSWORD) == 303


def test_a_stranger_behind_the_same_address_does_not_keep_out_who_has_logged_in_here_before(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        known = known_browser(client)
        assert [log_in(client, "a guess", f"name {number}") for number in range(11)] == [401] * 10 + [429]
        assert log_in(client, PASSWORD) == 429, "a browser that is not known waits with its address"
        client.cookies.update(known)
        assert log_in(client, "a guess", "name 0") == 429, "a browser is known for its own user only"
        assert log_in(client, PASSWORD) == 303
        client.cookies.clear()
        client.cookies.update(known)
        assert [log_in(client, "a wrong one") for _ in range(6)] == [401] * 5 + [429], "its own guesses count there"


@pytest.mark.sql
@pytest.mark.fault
def test_x08_waits_double_up_to_a_minute_and_are_forgotten(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        limits = limits_of(client)
        clock = limits._clock = Clock(NOW)
        name = [of_name("ada")]
        waits: list[float] = []
        while len(waits) < 7:
            if wait := limits.begin(name):
                waits.append(wait)
                clock.at += wait
        assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
        clock.at += 901
        assert limits.begin(name) == 0.0 == limits.begin(name)


def test_asking_again_during_a_wait_does_not_make_it_longer(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        limits = limits_of(client)
        clock = limits._clock = Clock(NOW)
        name = [of_name("ada")]
        while not (wait := limits.begin(name)):
            pass
        for _ in range(20):
            assert limits.begin(name) == wait
        clock.at += wait
        assert limits.begin(name) == 0.0


def test_an_address_that_tries_many_names_waits_too(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        limits = limits_of(client)
        limits._clock = Clock(NOW)
        tried = [limits.begin([of_address("192.0.2.1"), of_name(f"name {number}")]) for number in range(11)]
        assert tried[:10] == [0.0] * 10 and tried[10] > 0
        assert limits.begin([of_address("192.0.2.2"), of_name("name 0")]) == 0.0
        assert of_address("2001:db8::1") == of_address("2001:db8::2") != of_address("2001:db8:0:1::1")
        assert of_device("a").key != of_name("a").key


def test_ones_own_right_password_makes_no_room_for_guesses_at_others(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        limits = limits_of(client)
        limits._clock = Clock(NOW)
        here = of_address("192.0.2.1")
        for number in range(9):
            limits.begin([here, of_name(f"name {number}")])
        limits.begin([here, of_name("mine")])
        limits.succeeded([here, of_name("mine")])
        assert limits.begin([here, of_name("yet another")]) == 0.0
        assert limits.begin([here, of_name("and another")]) > 0


def test_servers_on_one_database_count_together(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        limits = limits_of(client)
        clock = limits._clock = Clock(NOW)
        other = LoginLimits(limits._database, clock=clock)
        for each in (limits, other, limits, other, limits):
            assert each.begin([of_name("ada")]) == 0.0
        assert other.begin([of_name("ada")]) > 0
