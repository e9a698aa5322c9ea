"""Keeps one sender from slowing down the others: token buckets for its requests, samples, bytes and new runs.

A bucket fills at the limit's rate and holds ten seconds of it. What comes is taken while one is left in the bucket, also
more than it holds: a frame that is larger than the limit of a second must come through some time, and the next one waits
for it. Refused is the whole request, with the time after which there is one again.

Runs that send with one key share its buckets. While such a bucket is less than half full, one run gets at most half of the
key's rate. So the other runs keep the other half. A run that is alone gets the whole rate.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from perfagent_server.limits import Limits
from perfagent_server.refusal import RefusalError

__all__ = ["AT_ONCE", "BURST_S", "Sender", "SenderLimits"]

BURST_S = 10.0
AT_ONCE = 0.1
"""The share of the runs of an hour that may begin at once."""
_MOST = 10_000  # senders whose buckets are in memory
_ENDLESS = 1e18  # instead of inf, which times 0 is no number

_KINDS = ("requests", "samples", "bytes", "runs")
_SETTINGS = ("requests_per_s", "samples_per_s", "bytes_per_s", "runs_per_hour")


@dataclass(frozen=True, slots=True)
class Sender:
    """name: "key 1a2b3c4d", or "run NAME" where a run sends without a key."""

    name: str
    limits: Limits


@dataclass(slots=True)
class _Buckets:
    """One of each kind. rates: a second; sizes: of full ones."""

    limits: Limits
    rates: tuple[float, ...]
    sizes: tuple[float, ...]
    at: float
    levels: list[float] = field(default_factory=list)

    def fill(self, now: float) -> None:
        passed, self.at = now - self.at, now
        self.levels = [
            min(size, level + passed * rate)
            for level, rate, size in zip(self.levels, self.rates, self.sizes, strict=True)
        ]


class SenderLimits:
    """Safe from any thread. `counters`: refused requests, by the limit that they met, for /self."""

    def __init__(self, defaults: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.defaults = defaults
        self.counters = dict.fromkeys((f"refused_by_{kind}" for kind in _KINDS), 0)
        self._clock = clock
        self._lock = threading.Lock()
        self._of: dict[str, _Buckets] = {}

    def check(self, sender: Sender) -> None:
        """Raises RefusalError when the sender has sent too much, whatever it sends now. Takes nothing."""
        with self._lock:
            self._checked(sender)

    def take(self, sender: Sender, *, samples: int, size_bytes: int, run: str | None = None) -> None:
        """Lets a request in. run: of a sender that is a key. Raises RefusalError when the sender, or the run, has sent too
        much."""
        with self._lock:
            concerned = [self._checked(sender)]
            if run is not None:
                concerned.append(self._checked_share(sender, run, concerned[0]))
            for buckets in concerned:
                for at, amount in enumerate((1, samples, size_bytes)):
                    buckets.levels[at] -= amount

    def begin_runs(self, sender: Sender, count: int = 1) -> None:
        """Lets so many runs begin. Raises RefusalError when the sender has begun too many."""
        with self._lock:
            buckets = self._filled(sender)
            if count > buckets.sizes[3]:
                raise RefusalError(
                    "bad_request",
                    f"this request begins {count} runs; {buckets.sizes[3]:.0f} are allowed at once (a tenth of "
                    f"runs_per_hour): send fewer, or raise it: {_where('runs_per_hour')}",
                )
            if buckets.levels[3] < count:
                raise self._refusal(sender, buckets, 3, count)
            buckets.levels[3] -= count

    def _checked(self, sender: Sender) -> _Buckets:
        buckets = self._filled(sender)
        for at in (0, 1, 2):
            if buckets.levels[at] < 1:
                raise self._refusal(sender, buckets, at)
        return buckets

    def _checked_share(self, key: Sender, run: str, whole: _Buckets) -> _Buckets:
        share = Sender(f"run {run[:80]!r} of {key.name}", key.limits.halved())
        buckets = self._filled(share)
        for at in (0, 1, 2):
            if whole.levels[at] < whole.sizes[at] / 2 and buckets.levels[at] < 1:
                raise self._refusal(
                    share, buckets, at, of="half of its key's limit, and the other half is for other runs"
                )
        return buckets

    def _filled(self, sender: Sender) -> _Buckets:
        now = self._clock()
        buckets = self._of.get(sender.name)
        if buckets is None or buckets.limits != sender.limits:
            self._make_room(now)
            rates = tuple(min(rate, _ENDLESS) for rate in _a_second(sender.limits))
            # a limit below one in ten seconds lets one through, too
            sizes = (*(max(1.0, BURST_S * rate) for rate in rates[:3]), max(1.0, AT_ONCE * 3600 * rates[3]))
            buckets = self._of[sender.name] = _Buckets(sender.limits, rates, sizes, now, list(sizes))
        else:
            buckets.fill(now)
        return buckets

    def _make_room(self, now: float) -> None:
        """Forgets the senders whose buckets are full: they are like new. If few are, the tenth that was here first: so not each
        new sender costs a look at all others."""
        if len(self._of) < _MOST:
            return
        for name, buckets in list(self._of.items()):
            buckets.fill(now)
            if buckets.levels == list(buckets.sizes):
                del self._of[name]
        for name in list(self._of)[: max(0, len(self._of) - _MOST + _MOST // 10)]:
            del self._of[name]

    def _refusal(
        self, sender: Sender, buckets: _Buckets, at: int, needed: int = 1, of: str = "its limit"
    ) -> RefusalError:
        kind, setting = _KINDS[at], _SETTINGS[at]
        self.counters[f"refused_by_{kind}"] += 1
        wait_s = max(1, math.ceil((needed - buckets.levels[at]) / buckets.rates[at]))
        return RefusalError(
            "too_many_requests",
            f"{sender.name} sends more than {getattr(sender.limits, setting):g} {kind} {_PER[at]}, which is {of}; send "
            f"again in {wait_s} s, or raise it: {_where(setting)}",
            retry_after_s=wait_s,
        )


_PER = ("a second", "a second", "a second", "an hour")


def _where(setting: str) -> str:
    """Where a limit is raised, in words."""
    return f"PERFAGENT_{setting.upper()} at the server for all, `perfagent keys limit ID {setting}=NUMBER` for one key"


def _a_second(limits: Limits) -> tuple[float, ...]:
    return limits.requests_per_s, limits.samples_per_s, limits.bytes_per_s, limits.runs_per_hour / 3600
