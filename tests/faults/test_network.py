"""A24: names that do not resolve or resolve slowly, proxies of the environment, IPv6. The transport by itself is in
tests/agent/delivery/test_transport.py."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from builders import free_port, until
from faults.accounts import Accounts, ends_in_time, row

from perfagent.delivery import courier, transport
from perfagent.delivery.send_loop import MOST_LEFT_BEHIND

pytestmark = pytest.mark.fault


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """names(answer): what socket.getaddrinfo does; no proxy of the machine is in the way."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda answer: monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_a24_slow_names_keep_only_the_courier_waiting(fault: Accounts, names: Callable[..., None]) -> None:
    release, asked, answered = threading.Event(), [], []

    def slow(*_: Any, **__: Any) -> Any:
        asked.append(threading.current_thread().name)
        release.wait(30)
        answered.append(True)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    names(slow)
    sender = fault.sender("http://monitor.example:8420")
    until(lambda: asked, why="no name was looked up")
    sender.rows.append(row(1))
    until(lambda: sender.spool.on_disk > 0 and sender.counters["rows"] == 1, why="the spool waits for a name")
    assert set(asked) == {"perfagent-courier"}
    with ends_in_time(sender):
        sender.close("finished")
    assert not answered, "the start or the end has waited for a name"
    release.set()


def test_a24_a_name_that_comes_back_is_found_again(fault: Accounts, names: Callable[..., None]) -> None:
    server = fault.server()
    answers: list[Any] = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2

    def look_up(*_: Any, **__: Any) -> Any:
        if answers:
            raise answers.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]

    names(look_up)
    sender = fault.sender("http://monitor.example:8420")
    sender._dispatch()._random.uniform = lambda a, b: 0.05  # type: ignore[method-assign]
    sender.rows.append(row(1))
    until(lambda: sorted(server.values("loss")) == [1])
    assert sender.counters["failed"] >= 2


def test_a24_the_look_up_of_a_name_takes_no_time_from_the_request_behind_it(
    fault: Accounts, names: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nameserver that is away takes 5 s of every look-up, two of them 10 s; the clock stands in for them."""
    server = fault.server()
    passed, monotonic = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])

    def look_up(*_: Any, **__: Any) -> Any:
        passed[0] += 15.0
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]

    names(look_up)
    sender = fault.sender("http://monitor.example:8420")
    sender.rows.append(row(1))
    until(lambda: sorted(server.values("loss")) == [1], within_s=60)  # by the same clock
    assert sender.counters["failed"] == 0


def test_a24_a_look_up_that_never_ends_is_told_and_costs_a_few_threads(
    fault: Accounts, names: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = fault.server()
    release = threading.Event()

    def look_up(*_: Any, **__: Any) -> Any:
        release.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]

    names(look_up)
    monkeypatch.setattr(courier, "STUCK_S", 0.1)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender("http://monitor.example:8420", spool_tick_s=0.02)
        sender._dispatch()._random.uniform = lambda a, b: 0.02  # type: ignore[method-assign]
        sender.rows.append(row(1))
        until(lambda: sender.counters["failed"] == MOST_LEFT_BEHIND, why="nobody notices that the request hangs")
        until(lambda: sender._dispatch()._courier is not None)
        handed = sender._dispatch()._courier
        for step in range(2, 30):
            sender.rows.append(row(step))
            time.sleep(0.02)
        assert sender._dispatch()._courier is handed, "one thread after the other is left behind"
        assert sender.counters["failed"] == MOST_LEFT_BEHIND
    (told,) = [record.message for record in caplog.records]
    assert "unreachable (no end of the request" in told
    release.set()
    until(lambda: sorted(server.values("loss")) == list(range(1, 30)))


def test_a24_an_address_that_swallows_everything_leaves_time_for_the_next(
    names: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fault: Accounts
) -> None:
    """A name with an IPv6 address that nobody routes and an IPv4 address that works; and a kernel without IPv6."""
    server = fault.server()
    real = socket.socket
    tried: list[tuple[int, float]] = []

    class Swallowing(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int = -1, *arguments: Any, **more: Any) -> None:
            if family == 99:
                raise OSError(97, "Address family not supported by protocol")
            super().__init__(family, *arguments, **more)

        def connect(self, address: Any) -> None:
            tried.append((self.family, self.gettimeout() or 0.0))
            if self.family == socket.AF_INET6:
                raise TimeoutError("timed out")
            super().connect(address)

    monkeypatch.setattr(socket, "socket", Swallowing)
    names(
        lambda *_, **__: [
            (99, socket.SOCK_STREAM, 0, "", ("?", server.port)),
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("2001:db8::1", server.port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port)),
        ]
    )
    sender = fault.sender("http://monitor.example:8420")
    sender.rows.append(row(1))
    assert sender.flush(10)
    assert sorted(server.values("loss")) == [1]
    six, four = tried[:2]
    assert six[0] == socket.AF_INET6
    assert six[1] <= transport.CONNECT_S / 2 + 0.01
    assert four[0] == socket.AF_INET


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a24_proxies_of_the_environment_are_not_asked_for_loopback(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    server = fault.server()
    sender = fault.sender(server)
    sender.rows.append(row(1))
    assert sender.flush(10)
    assert sorted(server.values("loss")) == [1]


def test_a24_a_proxy_of_the_environment_carries_what_goes_elsewhere(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    proxy = fault.server()  # it takes the absolute address of a request to a proxy as well
    monkeypatch.setenv("http_proxy", proxy.url)
    sender = fault.sender("http://monitor.invalid:8420")
    sender.rows.append(row(1))
    assert sender.flush(10)
    assert proxy.headers[0]["host"] == "monitor.invalid:8420"
    assert sorted(proxy.values("loss")) == [1]


def test_a24_a_server_with_nothing_but_ipv6_gets_everything(fault: Accounts) -> None:
    server = fault.server()
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as listener:
        try:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()
        port = listener.getsockname()[1]
        ended = threading.Event()

        def relay() -> None:
            """IPv6 on this side, the server's IPv4 on the other."""
            while not ended.is_set():
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                other = socket.create_connection(("127.0.0.1", server.port))
                for source, target in ((one, other), (other, one)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        sender = fault.sender(f"http://[::1]:{port}")
        for step in range(20):
            sender.rows.append(row(step))
        assert sender.flush(10)
        sender.close("finished")
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    assert sorted(server.values("loss")) == list(range(20))


def _pump(source: socket.socket, target: socket.socket) -> None:
    with source:
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
