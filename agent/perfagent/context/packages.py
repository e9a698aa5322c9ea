"""Lists the installed packages: names and versions, from the names of the metadata folders alone.

`importlib.metadata` reads the same folders but opens a file for each package, which takes a thousand times as long;
only where the name of the folder does not hold the version (an editable install of old) is a file opened.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence

__all__ = ["installed"]

_FOLDER = r"(?P<name>[A-Za-z0-9._-]+?)(?:-(?P<version>[0-9][^-]*))?(?:-py[0-9.]+)?\.(?:dist-info|egg-info)"


def installed(path: Sequence[str] | None = None) -> Iterator[dict[str, str]]:
    """name -> version of the packages on the import path, as one more folder of it has been read. Names as on PyPI, in
    lower case with hyphens; the first of a name is the one that is imported."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path if path is None else path):
        for name, version in sorted(_in(folder or ".")):
            found.setdefault(name, version)
        yield found


def _in(folder: str) -> Iterator[tuple[str, str]]:
    try:
        with os.scandir(folder) as entries:
            names = [(entry.name, entry.path) for entry in entries if entry.name.endswith("-info")]
    except OSError:  # a zip file, or nothing at all
        return
    for name, path in names:
        match = re.fullmatch(_FOLDER, name)
        version = match and (match["version"] or _written_version(path))
        if match and version:
            yield re.sub(r"[-_.]+", "-", match["name"]).lower(), version


def _written_version(path: str) -> str | None:
    for name in ("METADATA", "PKG-INFO"):
        try:
            with open(f"{path}/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - as scandir gave it
                head = file.read(4096)
        except OSError:
            continue
        match = re.search(r"^Version:\s*(\S+)", head, re.MULTILINE)
        return match[1] if match else None
    return None
