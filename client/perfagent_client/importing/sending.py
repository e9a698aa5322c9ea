"""Sends the frames of an import, each until the server has stored it."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from perfagent.delivery.transport import Answer, HttpTransport, judge, packed
from perfagent.endpoint.admin_proof import AdminProof
from perfagent.errors import PerfagentError, ServerUnreachable
from perfagent.wire import Frame, encode

__all__ = ["Behind", "Sender"]

_PATIENCE_S = 120.0
_LONGEST_PAUSE_S = 10.0
_DEADLINE_S = 60.0
_MOST_WAITING = 4


class Sender:
    """Sends frames, and tries again until the server answers.

    rejected: the reason of the server -> the number of samples that it refused. waits: is called once, with the reason, before
        the second try.
    """

    def __init__(self, server: str, key: str | AdminProof | None, *, waits: Callable[[str], None]) -> None:
        self._transport, self._waits = HttpTransport(server, key), waits
        self.rejected: Counter[str] = Counter()
        self._has_waited = False

    def send(self, frame: Frame) -> None:
        """Raises PerfagentError for a frame that the server refuses, or has of another import of the same run, and
        ServerUnreachable where it does not take any for two minutes."""
        body, encoding = encode(frame), None
        if not self._transport.loopback:
            body, encoding = packed(body, loopback=False)
        until, pause, is_again = time.monotonic() + _PATIENCE_S, 0.25, False
        while (answer := self._answer(body, encoding)).kind != "acked":
            if answer.kind != "retry":
                raise PerfagentError(f"the server refused a frame of {frame.name!r}: {answer.reason}")
            if time.monotonic() > until:
                raise ServerUnreachable(
                    f"the server takes nothing: {answer.reason}; the same command again sends the rest"
                )
            if not self._has_waited:
                self._waits(answer.reason)
            self._has_waited = is_again = True
            time.sleep(min(answer.pause_s or pause, _LONGEST_PAUSE_S))
            pause *= 2
        if answer.duplicate and not is_again:
            raise PerfagentError(f"another command imports {frame.name!r} now; the same command again sends the rest")
        for one in answer.rejected:
            self.rejected[one.reason] += one.count

    def _answer(self, body: bytes, encoding: str | None) -> Answer:
        try:
            return judge(self._transport.post(body, encoding=encoding, deadline_s=_DEADLINE_S))
        except ServerUnreachable as error:
            return Answer(kind="retry", reason=str(error))

    def close(self) -> None:
        self._transport.close()


class Behind:
    """Does one thing after the other on a thread of its own, while the caller reads on. Once one has failed, it does no more."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "perfagent-import")
        self._waiting: deque[Future[None]] = deque()
        self._has_failed = False

    def do(self, task: Callable[[], None]) -> None:
        """Raises what an earlier task raised. Waits where many are left."""
        while len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._one, task))

    def finish(self) -> None:
        """Waits for all. Raises what one of them raised."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        self._has_failed = True
        self._thread.shutdown(cancel_futures=True)

    def _one(self, task: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            task()
        except BaseException:
            self._has_failed = True
            raise
