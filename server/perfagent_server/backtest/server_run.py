"""A run of a server, read through its API: all samples, and the events that rules read."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from perfagent.errors import WireError
from perfagent.wire import EVENT_KINDS, Event
from perfagent_server.backtest.exported import Exported, OfAttempt
from perfagent_server.backtest.moment import Moment

__all__ = ["Api", "read_server_run"]

_PAGE = 1000
_ALWAYS = frozenset(("state", "finding", "alert"))


class Api(Protocol):
    """Requests below /api/v1."""

    def request(self, method: str, path: str, body: Any = None) -> Any: ...

    def lines(self, path: str) -> Iterator[str]: ...


class _Sample(msgspec.Struct):
    name: str
    rank: int
    step: int
    time: float | str
    value: float | str


_decoder = msgspec.json.Decoder(_Sample)


def read_server_run(api: Api, run: str, kinds: Collection[str]) -> Iterator[Moment]:
    """run: its id. kinds: of the events that rules read, beside those that say how processes began and ended."""
    samples = Exported()
    path = f"/runs/{quote(run, safe='')}"
    for line in api.lines(f"{path}/export?format=jsonl"):
        try:
            one = _decoder.decode(line)
            samples.add(one.name, one.rank, one.step, float(one.time), float(one.value))
        except (msgspec.DecodeError, ValueError) as error:
            raise WireError(f"the server's export of run {run} has a line that is no sample: {error}") from error
    events = [
        event
        for kind in EVENT_KINDS
        if kind in _ALWAYS or kind in kinds
        for event in _events(api, f"{path}/events?kind={kind}&limit={_PAGE}")
    ]
    return samples.moments(events)


def _events(api: Api, path: str) -> list[OfAttempt]:
    """All events of a kind; the API gives the newest first, page by page."""
    found: list[OfAttempt] = []
    before = ""
    while True:
        page = api.request("GET", path + before)["events"]
        found += [
            OfAttempt(
                row["attempt"], row["rank"],
                Event(kind=row["kind"], time=float(row["time"]), step=row["step"], data=row["data"]),
            )
            for row in page
        ]  # fmt: skip
        if len(page) < _PAGE:
            return found
        before = f"&before={page[0]['id']}"
