"""A24: names that do not resolve, resolve slowly or never. Proxies, IPv6 and addresses that swallow everything are in
tests/agent/delivery/test_transport.py."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from builders import until
from faults.accounts import Accounts, ends_in_time, row

pytestmark = [pytest.mark.fault, pytest.mark.real]
URL = "http://monitor.example:8420"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """names(answer): what socket.getaddrinfo does; no proxy of the machine is in the way."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda answer: monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_a24_slow_names_keep_only_the_courier_waiting(fault: Accounts, names: Callable[..., None]) -> None:
    """Afterwards the name is found."""
    server = fault.server()
    release, asked, answered = threading.Event(), [], []

    def slow(*_: Any, **__: Any) -> Any:
        asked.append(threading.current_thread().name)
        release.wait(30)
        answered.append(True)
        if len(answered) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]

    names(slow)
    at_its_end, goes_on = (fault.sender(URL, pause_s=lambda _: 0.05) for _ in range(2))
    for sender in (at_its_end, goes_on):
        sender.rows.append(row(1))
        until(lambda s=sender: s.spool.on_disk > 0 and s.counters["spooled"] > 0, why="the spool waits for a name")
    until(lambda: len(asked) == 2, why="no name was looked up")
    with ends_in_time(at_its_end):
        at_its_end.close("finished")
    assert not answered, "the start or the end has waited for a name"
    release.set()
    until(lambda: sorted(server.values("loss", source=goes_on.identity.source)) == [1])
    assert {*asked} == {"perfagent-courier"}
