"""Sends what is left of a spool whose process has ended: for `perfagent sync` and `perfagent run`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from perfagent.delivery.spool import Spool
from perfagent.delivery.transport import Answer, Transport, judge, packed
from perfagent.errors import ServerUnreachable, WireError
from perfagent.wire import encode

__all__ = ["Upload", "upload"]

_AWAY = "away"
_CURES = {
    "unauthorized": "set PERFAGENT_API_KEY to a key with the ingest scope, which `perfagent keys create ingest` on the server's "
    "machine makes; then the same command again",
    "foreign": "set PERFAGENT_SERVER to the address of a perfagent server",
}
"""What to do about the answers that another try does not change."""


@dataclass(slots=True)
class Upload:
    """What became of one source's frames. complete: none is left; reason: why not; cure: what to do then; away: because
    no server answered; hopeless: another source would get the same answer."""

    frames: int = 0
    samples: int = 0
    duplicate: int = 0
    refused: int = 0
    complete: bool = False
    away: bool = False
    hopeless: bool = False
    reason: str = ""
    cure: str = "the same command again sends the rest"


def upload(
    spool: Spool, transport: Transport, *, until: float, patience_s: float = 0.0, once: bool = False,
    waits: Callable[[str], None] | None = None,
) -> Upload:  # fmt: skip
    """Sends every frame of a spool, oldest first, until a point in (monotonic) time.

    patience_s: so much later than the last answer, where that is later still. once: no second try where no server
    answers. waits: is called with the reason before the first pause.
    """
    result = Upload()
    failures = 0
    while (outgoing := spool.next()) is not None:
        left = until - time.monotonic()
        if left <= 0:
            result.reason = result.reason or "out of time"
            return result
        try:
            body, encoding = packed(encode(spool.frame(outgoing)), loopback=bool(getattr(transport, "loopback", True)))
            answer = judge(transport.post(body, encoding=encoding, deadline_s=min(10.0, left)))
        except WireError as error:
            answer = Answer(kind="refused", reason=str(error))
        except ServerUnreachable as error:
            answer = Answer(kind=_AWAY, reason=str(error))
        result.away = answer.kind == _AWAY
        if answer.kind == "acked":
            failures = 0
            until = max(until, time.monotonic() + patience_s)
            result.frames += 1
            result.samples += answer.stored
            result.duplicate += answer.duplicate
            spool.ack(outgoing.seq)
        elif answer.kind == "too_large" and spool.split(outgoing.seq):
            continue
        elif answer.kind in ("refused", "too_large"):
            spool.quarantine(outgoing.seq, answer.reason)
            result.refused += 1
        else:
            result.reason = answer.reason
            result.hopeless = answer.kind in _CURES
            result.cure = _CURES.get(answer.kind, result.cure)
            if result.hopeless or (once and result.away):
                return result
            failures += 1
            if waits is not None and failures == 1:
                waits(result.reason)
            pause = answer.pause_s or random.uniform(0.2, min(10.0, 0.5 * 2.0 ** min(failures, 5)))  # noqa: S311
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
    result.complete, result.reason = True, ""
    return result
