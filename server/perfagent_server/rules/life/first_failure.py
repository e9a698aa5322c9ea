"""Decides which of several failed ranks failed first: the rank with the cause, not a rank that only lost the others.

The ranks' own clocks decide; on one host they resolve milliseconds. An error that says that another process is gone
may be seen before that process is seen dead, since its sockets close first, and before its exception is reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TOGETHER_S", "Failure", "first_of", "lost_a_peer"]

TOGETHER_S = 3.0
"""Such an error and the death behind it are milliseconds apart; what a launcher kills that does not heed SIGTERM ends
later."""
_PEER_GONE = re.compile(
    r"connection was likely closed|ncclRemoteError|communicator was aborted|remote (worker|process|peer) (crash|hang|exit)",
    re.IGNORECASE,
)
"""What NCCL and torch's store say on a rank when the process at the other end is gone."""
_CLOSED = re.compile(r"connection (was )?(closed|reset) by (remote )?peer", re.IGNORECASE)
_OF_RANKS = re.compile(
    r"pair\.cc|gloo|nccl|c10d|TCPStore|DistBackendError|DistNetworkError|ProcessGroup", re.IGNORECASE
)
"""Where those words are of the connection to another rank (gloo's are in pair.cc): any server's may be reset, a
dataset's too."""


class Failure(NamedTuple):
    time: float
    rank: int
    state: str
    said: str


def lost_a_peer(said: str) -> bool:
    return bool(_PEER_GONE.search(said) or (_CLOSED.search(said) and _OF_RANKS.search(said)))


def first_of(failures: Sequence[Failure]) -> int:
    """The place of the first among them."""
    earliest = min(failures)
    # A launcher sends SIGTERM to the others because one has failed: what it does to them is no cause.
    causes = [
        one
        for one in failures
        if one.time - earliest.time <= TOGETHER_S and one.state != "preempted" and not lost_a_peer(one.said)
    ]
    return failures.index(min(causes) if causes and lost_a_peer(earliest.said) else earliest)
