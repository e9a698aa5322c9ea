"""Another try, for errors that pass by themselves and for nothing else.

A file system that is remounted, a network file server that answers late, an interrupted call: these are tried again a
few times, with pauses that double. A full disk, a missing right and errors of the program are raised at once.
Not tenacity: this is part of the base install, whose training process gets no further dependency."""

from __future__ import annotations

import errno
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from perfagent_loop.checks import check_count
from perfagent_loop.events import count, tell

__all__ = ["TRANSIENT", "is_transient", "pauses", "retry"]

T = TypeVar("T")
TRANSIENT = frozenset((
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EINTR,
    errno.EIO, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENOBUFS, errno.ENOTCONN, errno.EPIPE, errno.EREMOTEIO,
    errno.ESTALE, errno.ETIMEDOUT,
))  # fmt: skip
"""Numbers of OSErrors that may pass by themselves."""


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment: an OSError of those kinds, or an error that says so itself."""
    if not isinstance(error, OSError):
        return bool(getattr(error, "transient", False))
    if isinstance(reason := getattr(error, "reason", None), OSError):  # urllib's URLError has the real one there
        return is_transient(reason)
    if isinstance(error, socket.gaierror):  # its numbers are not those of other OSErrors
        return error.errno == socket.EAI_AGAIN
    return isinstance(error, (TimeoutError, ConnectionError)) or error.errno in TRANSIENT


def pauses(tries: int, *, first_s: float, longest_s: float, seeded: random.Random | None = None) -> Iterator[float]:
    """Seconds before the second try, the third, ...: doubled each time, up to the longest, each 50 to 100 % of that by
    chance, so that many processes do not come back at the same moment. seeded: for ranks that must pause alike."""
    chance = (seeded or random.Random()).uniform  # noqa: S311 - no secret
    for number in range(tries - 1):
        yield min(longest_s, first_s * 2**number) * chance(0.5, 1.0)


def retry(
    call: Callable[[], T],
    *,
    tries: int = 4,
    first_s: float = 0.5,
    longest_s: float = 30.0,
    what: str = "",
    pause: Callable[[float], None] = time.sleep,
    seeded: random.Random | None = None,
) -> T:
    """Calls a function again if it fails with an error that may pass by itself. Other errors are raised at once.

    Such errors are: an interrupted call, a network file server that answers late, a refused connection. A full disk is
    none.

    Args:
        call: The function, without arguments.
        tries: How many calls at most.
        first_s: Seconds before the second call. Each pause is twice as long as the one before.
        longest_s: The longest pause, in seconds.
        what: A name for the run's events.
        pause: Waits for a number of seconds.
        seeded: A random generator, for ranks that must pause alike.

    Returns:
        The result of the call.
    """
    check_count("tries", tries)
    for number, wait_s in enumerate(pauses(tries, first_s=first_s, longest_s=longest_s, seeded=seeded), 1):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            name = what or getattr(call, "__qualname__", "a call")
            why = f"{type(error).__name__}: {error} (try {number} of {tries}, in {wait_s:.1f} s)"
            tell(f"{name} failed and is tried again", why)
            count("recovery/retries", 1.0)
        pause(wait_s)
    return call()
