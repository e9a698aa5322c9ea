"""Guesses at passwords are slowed down, per address and per name; nobody is locked out for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from api_builders import ADMIN, api
from clocks import Clock
from data_folder import place_of
from engine_bench import NOW
from fastapi.testclient import TestClient

from perfagent_server.database import Database, open_database
from perfagent_server.security.login_limits import LoginLimits, of_address, of_device, of_name
from perfagent_server.settings import Settings

PASSWORD = "correct horse battery"
ADA, HERE = of_name("ada"), of_address("192.0.2.1")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(open_database(Settings(**place_of(tmp_path)))) as opened:
        yield opened


def log_in(client: TestClient, password: str, name: str = "ada") -> int:
    return client.post("/login", data={"name": name, "password": password}).status_code


def browser_of_ada(client: TestClient) -> dict[str, str]:
    """The cookie of a browser in which the new user ada has logged in."""
    body = {"name": "ada", "password": PASSWORD, "roles": [{"role": "viewer"}]}
    assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
    assert log_in(client, PASSWORD) == 303
    known = {"perfagent_device": client.cookies["perfagent_device"]}
    client.cookies.clear()
    return known


def test_the_right_password_waits_too_but_not_in_a_known_browser(tmp_path: Path) -> None:
    clock = Clock(NOW)
    with api(tmp_path, clocks={"clock": clock}) as client:
        known = browser_of_ada(client)
        assert [log_in(client, "a wrong one") for _ in range(6)] == [401] * 5 + [429]
        client.cookies.update(known)
        assert log_in(client, PASSWORD) == 303, "a stranger does not keep out who has logged in here before"
        client.cookies.clear()
        answer = client.post("/login", data={"name": "ada", "password": PASSWORD})
        assert answer.status_code == 429 and "too many wrong passwords" in answer.text.lower()
        clock.at += int(answer.headers["Retry-After"])
        assert log_in(client, PASSWORD) == 303
        client.cookies.clear()
        assert log_in(client, "a wrong one") == 401, "a right password clears the count of its name"


def test_a_stranger_at_the_same_address_keeps_no_browser_out(tmp_path: Path) -> None:
    with api(tmp_path, clocks={"clock": Clock(NOW)}) as client:
        known = browser_of_ada(client)
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
def test_x08_waits_double_up_to_a_minute_and_are_forgotten(database: Database) -> None:
    """Those of all servers on one database."""
    clock, waits = Clock(NOW), []
    limits, other = LoginLimits(database, clock=clock), LoginLimits(database, clock=clock)
    while len(waits) < 7:
        if wait := limits.begin([ADA]):
            assert [other.begin([ADA]) for _ in range(20)] == [wait] * 20, "asking again makes it no longer"
            waits.append(wait)
            clock.at += wait
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    clock.at += 901
    assert limits.begin([ADA]) == 0.0 == limits.begin([ADA])


@pytest.mark.parametrize("own", [False, True])
def test_an_address_that_tries_many_names_waits_too(database: Database, own: bool) -> None:
    """One's own right password makes no room for guesses at others."""
    limits = LoginLimits(database, clock=Clock(NOW))
    assert [limits.begin([HERE, of_name(f"name {number}")]) for number in range(9)] == [0.0] * 9
    if own:
        limits.begin([HERE, of_name("mine")])
        limits.succeeded([HERE, of_name("mine")])
    assert limits.begin([HERE, of_name("yet another")]) == 0.0
    assert limits.begin([HERE, of_name("and another")]) > 0
    assert limits.begin([of_address("192.0.2.2"), of_name("name 0")]) == 0.0
    assert of_address("2001:db8::1") == of_address("2001:db8::2") != of_address("2001:db8:0:1::1")
    assert of_device("a").key != of_name("a").key
