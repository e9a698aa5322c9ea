"""Sends what dead processes left in the spool for this same server: found and opened on the courier's thread, sent at
low priority.

A day's outage takes half a second to open. On the sender's thread the spool's next tick would have to wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from perfagent.delivery.records import folders, owner
from perfagent.delivery.segments import SpoolBusyError
from perfagent.delivery.spool import Spool

__all__ = ["Orphans"]

MAX_AGE_S = 7 * 86400.0
AT_A_TIME_S = 0.1
"""How long to look through what was meant for other servers (0.3 ms each) between two requests."""


class Orphans:
    """The sources under `root` whose process is gone, one at a time. own: this process's own folder.

    current: the one that is being sent. Only `look` runs on another thread, and only while `current` is None.
    """

    def __init__(self, root: Path, own: Path, server: str) -> None:
        self.own = own
        self._root, self._server = root, server
        self._folders: list[Path] | None = None
        self._looking = self._closed = False
        self.current: Spool | None = None

    @property
    def done(self) -> bool:
        """Whether everything that was there has been sent or passed by."""
        return self._folders == [] and self.current is None and not self._looking

    def errand(self) -> Callable[[], None] | None:
        """What the courier should do to find the next one; None when there is none, or it is being looked for."""
        if self._looking or self._folders == []:
            return None
        self._looking = True
        return self.look

    def look(self) -> None:
        """Opens the next one that is worth sending, if it is found soon; else it is looked for again."""
        until = time.monotonic() + AT_A_TIME_S
        try:
            if self._folders is None:
                self._folders = [folder for folder in folders(self._root, max_age_s=MAX_AGE_S) if folder != self.own]
            while self._folders and self.current is None and not self._closed:
                self.current = self._opened(self._folders[0])
                self._folders.pop(0)
                if time.monotonic() >= until:
                    break
        finally:
            self._looking = False
        if self._closed:
            self.close()

    def _opened(self, folder: Path) -> Spool | None:
        try:
            header = owner(folder)
            spool = Spool.open(folder) if header is None or header.server == self._server else None
        except (SpoolBusyError, OSError):
            return None
        if spool is not None and (spool.header.server != self._server or not spool.header.run):
            spool.close()
            return None
        return spool

    def sent(self) -> None:
        """Nothing is left of the current one."""
        spool, self.current = self.current, None
        if spool is not None:
            spool.remove()

    def close(self) -> None:
        """Lets go of the current one; another process may have it."""
        self._closed = True
        spool, self.current = self.current, None
        if spool is not None:
            spool.close()
