"""Which boards of this node the ranks of a job report themselves: a file a board in the job's folder.

A scheduler may show each rank its own GPU only (CUDA_VISIBLE_DEVICES of one entry), so that no rank's own environment
shows which boards belong to the others.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["Claims"]

LOOK_EVERY_S = 10.0


class Claims:
    """folder, key: of the job; key None for a job of one process, which shares with nobody."""

    def __init__(self, folder: Path, key: str | None) -> None:
        self._folder, self._prefix = folder, f"{key}.gpu-" if key else ""
        self._taken: frozenset[str] = frozenset()
        self._look_at = 0.0

    def claim(self, board: str) -> None:
        """This rank reports that board."""
        if self._prefix:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                (self._folder / f"{self._prefix}{board}").touch(mode=0o600)
            except OSError:
                return  # then it may be told twice

    def taken(self, now: float) -> frozenset[str]:
        """Boards that some rank reports, as of at most ten seconds ago. now: monotonic seconds."""
        if self._prefix and now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            try:
                names = [path.name for path in self._folder.iterdir()]
            except OSError:
                names = []
            self._taken = frozenset(name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))
        return self._taken
