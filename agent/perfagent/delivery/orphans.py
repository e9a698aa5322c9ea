"""Sends what dead processes left in the spool for this same server: found and opened on the courier's thread, sent at
low priority.

A day's outage takes half a second to open. On the sender's thread the spool's next tick would have to wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from perfagent.delivery.records import folders, owner
from perfagent.delivery.segments import SpoolBusyError
from perfagent.delivery.spool import Spool

__all__ = ["Orphans"]

MAX_AGE_S = 7 * 86400.0


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
        """Opens the next one, if it is worth sending; between two requests there may be time for that (0.3 ms)."""
        try:
            if self._folders is None:
                self._folders = [folder for folder in folders(self._root, max_age_s=MAX_AGE_S) if folder != self.own]
            if self._folders and not self._closed:
                self.current = self._opened(self._folders[0])
                self._folders.pop(0)
        finally:
            self._looking = False
        if self._closed:
            self.close()

    def _opened(self, folder: Path) -> Spool | None:
        with contextlib.suppress(SpoolBusyError, OSError):
            header = owner(folder)
            if header is None or header.server == self._server:
                spool = Spool.open(folder)
                if spool.header.server == self._server and spool.header.run:
                    return spool
                spool.close()
        return None

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
