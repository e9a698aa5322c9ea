"""Counts requests: by route template, method and status, how long they took, and the bytes that agents sent.

It stands on the way of every frame. So a request costs one look-up, a bisection and a few additions on the event loop's
thread; Prometheus' families are made of it when they are asked for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CountRequests", "RequestCounts"]

_PREFIX = "/api/v1"
_INGEST = f"{_PREFIX}/ingest"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class _Tally:
    """buckets: how many took up to each of _SECONDS and no less, and longer than all."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_SECONDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(_SECONDS, seconds)] += 1
        self.seconds += seconds


class RequestCounts(Collector):
    """What was counted since the app was made."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str, int], _Tally] = {}
        self._frame_bytes = 0

    def add(self, route: str, method: str, status: int, seconds: float) -> None:
        """route: its template, such as /api/v1/runs/{run}."""
        key = (route, method, status)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally()
        tally.add(seconds)

    def add_frame(self, size: int) -> None:
        """size: of the body of a stored frame, in bytes, as it was sent."""
        self._frame_bytes += size

    def collect(self) -> Iterator[Metric]:
        tallies = sorted(self._tallies.items())
        requests = CounterMetricFamily(
            "perfagent_http_requests", "Requests that were answered.", labels=["route", "method", "status"]
        )
        seconds = HistogramMetricFamily(
            "perfagent_http_request_duration_seconds", "From a request's head to the end of its answer.",
            labels=["route", "method"],
        )  # fmt: skip
        by_route: dict[tuple[str, str], list[_Tally]] = {}
        for (route, method, status), tally in tallies:
            requests.add_metric([route, method, str(status)], sum(tally.buckets))
            by_route.setdefault((route, method), []).append(tally)
        for (route, method), mine in by_route.items():
            seconds.add_metric([route, method], *_histogram(mine))
        acks = HistogramMetricFamily(
            "perfagent_ingest_ack_seconds", "From the head of a frame to its acknowledgement, after the commit."
        )
        acks.add_metric(
            [], *_histogram([tally for (route, _, status), tally in tallies if (route, status) == (_INGEST, 200)])
        )
        received = CounterMetricFamily("perfagent_ingest_received_bytes", "Bodies of stored frames, as they were sent.")
        received.add_metric([], self._frame_bytes)
        yield from (requests, seconds, acks, received)


def _histogram(tallies: list[_Tally]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum of all values."""
    counts = [sum(column) for column in zip(*(tally.buckets for tally in tallies), strict=True)] or [0] * (
        len(_SECONDS) + 1
    )
    names = [*map(str, _SECONDS), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True)), sum(tally.seconds for tally in tallies)


class CountRequests:
    """Pure ASGI. before_routing: paths that are answered before the framework looks for a route. What no route takes is
    counted as one route, so that nobody can make names."""

    def __init__(self, app: ASGIApp, counts: RequestCounts, before_routing: frozenset[str] = frozenset()) -> None:
        self._app, self._counts, self._before_routing = app, counts, before_routing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            method = scope["method"]
            route = self._route(scope)
            counts = self._counts
            counts.add(route, method if method in _METHODS else "other", status, time.perf_counter() - begin)
            if status == 200 and route == _INGEST:
                counts.add_frame(_size(scope))

    def _route(self, scope: Scope) -> str:
        """The template of the route that took the request, with the prefix of its router, which the route does not know."""
        asked: str = scope["path"]
        if asked in self._before_routing:
            return asked
        path: str | None = getattr(scope.get("route"), "path", None)
        if path is None:
            return "none"
        is_below = asked.startswith(_PREFIX) and not path.startswith(_PREFIX)
        return f"{_PREFIX}{path}" if is_below and path.startswith("/") and "{rest" not in path else path


def _size(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0
