"""To whom files belong that root writes into the folder of a service with a user of its own."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["give_to_owner_of"]


def give_to_owner_of(folder: Path, file: Path | int) -> None:
    """As root: the file, or descriptor, belongs to whoever the folder belongs to. As another user: nothing is done. A path must
    be one that nobody else can replace."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(file, owner.st_uid, owner.st_gid)
