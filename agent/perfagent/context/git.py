"""The state of the git repository that the script lies in, read from its files: no process is started and git need not be there.

(A `git` of ours would be reaped by a script that waits for its own children, may take locks, and refuses repositories that
belong to somebody else, as in containers.) Formats: gitformat-index, gitrepository-layout and git-config of git's documentation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perfagent.redaction import redacted_text

__all__ = ["Repository", "find"]

MAX_INDEX_BYTES = 8 * 2**20
MAX_HASHED_BYTES = 32 * 2**20
_EMPTY_BLOB = bytes.fromhex("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
_LINK, _SUBMODULE, _FOLDER = 0o120000, 0o160000, 0o040000
_HEXADECIMAL = frozenset("0123456789abcdef")


def find(start: Path | None = None) -> Repository | None:
    """The repository of a folder or of its parents; by default of the script's. None where there is none."""
    folder = start or _folder_of_script()
    if folder is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        for candidate in (folder, *folder.parents):
            git = candidate / ".git"
            if git.is_file():  # a worktree or submodule: "gitdir: <path>"
                git = (candidate / git.read_text("utf-8").partition(":")[2].strip()).resolve()
            if (git / "HEAD").is_file():
                shared = git / "commondir"
                common = (git / shared.read_text("utf-8").strip()).resolve() if shared.is_file() else git
                return Repository(candidate, git, common)
    return None


def _folder_of_script() -> Path | None:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError):
        return Path(script).resolve().parent if script else Path.cwd()
    return None


class Repository(NamedTuple):
    """root: the working tree; git: its .git; common: what worktrees share (refs, configuration, objects)."""

    root: Path
    git: Path
    common: Path

    def describe(self) -> dict[str, str]:
        """commit, branch (absent when detached) and remote (without credentials), as far as they are known."""
        found = {"commit": self.commit(), "branch": self.branch(), "remote": self.remote()}
        return {name: value for name, value in found.items() if value}

    def branch(self) -> str | None:
        head = _read(self.git / "HEAD")
        return head.removeprefix("ref: ").removeprefix("refs/heads/") if head.startswith("ref: ") else None

    def commit(self) -> str | None:
        """The commit that is checked out; None before the first one."""
        text = _read(self.git / "HEAD")
        for _ in range(5):  # a symbolic reference may name another
            if not text.startswith("ref: "):
                return text if len(text) in (40, 64) and _HEXADECIMAL.issuperset(text) else None
            text = self._reference(text[5:])
        return None

    def _reference(self, name: str) -> str:
        for place in (self.git, self.common):
            if text := _read(place / name):
                return text
        for line in _read(self.common / "packed-refs").splitlines():
            if line.endswith(" " + name):
                return line.split(" ", 1)[0]
        return ""

    def remote(self) -> str | None:
        """Where the branch is pushed to, else `origin`, else the only remote; user and password are left out."""
        config = self._config()
        addresses = {
            section[8:-1]: values["url"]
            for section, values in config.items()
            if section.startswith('remote "') and values.get("url")
        }
        tracked = config.get(f'branch "{self.branch()}"', {}).get("remote")
        first = next(iter(addresses.values()), None) if len(addresses) == 1 else None
        address = addresses.get(tracked or "") or addresses.get("origin") or first
        return redacted_text(_without_credentials(address)) if address else None

    def _config(self) -> dict[str, dict[str, str]]:
        """Section, as between the brackets, -> name in lower case -> value. (configparser takes 3 ms to import.)"""
        sections: dict[str, dict[str, str]] = {}
        values: dict[str, str] = {}
        for line in map(str.strip, _read(self.common / "config").splitlines()):
            if line.startswith("[") and "]" in line:
                values = sections.setdefault(line[1 : line.rindex("]")], {})
            elif line and not line.startswith(("#", ";")):
                name, _, value = line.partition("=")
                values[name.strip().lower()] = value.strip()
        return sections

    # ---- the working tree

    def changes(self) -> Iterator[bool | None]:
        """Whether tracked files differ from the commit, staged or not. Yields None after each piece of work, the answer at last;
        no answer at all where it cannot be known (an unusual index, more than 32 MB to compare, or content that filters change).
        """
        path = self.git / "index"
        try:
            index = _Index(path.read_bytes(), path.stat().st_mtime_ns) if path.stat().st_size <= MAX_INDEX_BYTES else None
        except (OSError, ValueError, struct.error, IndexError):
            return
        if index is None or len(self.commit() or "") == 64:  # objects named by SHA-256
            return
        yield None
        if self._staged(index):
            yield True
            return
        modes = self._config().get("core", {}).get("filemode", "true") == "true"
        room = MAX_HASHED_BYTES
        for number, entry in enumerate(index.entries):
            if number % 100 == 99:
                yield None
            differs = entry.differs(self.root, index.written_ns, modes=modes)
            if differs is None:
                room -= entry.size
                differs = self._differs_in_content(entry) if room >= 0 else None
            if differs is None:
                return
            if differs:
                yield True
                return
        yield False

    def _differs_in_content(self, entry: _Entry) -> bool | None:
        same = entry.same_content(self.root)
        return False if same else None if self._has_filters() else True

    def _has_filters(self) -> bool:
        """Whether the file as it is stored and as it is checked out may differ (line ends, LFS)."""
        config = self._config()
        if config.get("core", {}).get("autocrlf", "false") not in ("false", "no", "off", "0"):
            return True
        attributes = _read(self.root / ".gitattributes") + _read(self.common / "info" / "attributes")
        return any(word in attributes for word in ("filter=", "text", "eol=", "ident", "crlf"))

    def _staged(self, index: _Index) -> bool:
        """Whether the index is of another tree than the commit. `git add` marks the tree that the index remembers as old."""
        tree, commit = index.tree(), self.commit()
        if tree is None:
            return False  # what differs shows in the files
        if not tree or commit is None:
            return True
        try:
            stored = zlib.decompress((self.common / "objects" / commit[:2] / commit[2:]).read_bytes())
        except (OSError, zlib.error):
            return False  # the commit is in a pack
        return not stored.partition(b"\0")[2].startswith(b"tree " + tree.hex().encode())


class _Entry(NamedTuple):
    """A file as the index knows it."""

    path: bytes
    mode: int
    size: int
    mtime_ns: int
    oid: bytes

    def differs(self, root: Path, written_ns: int, *, modes: bool) -> bool | None:
        """Whether the file is another one; None when only its content can tell. written_ns: when the index was written; modes:
        whether the file system keeps them."""
        try:
            found = os.lstat(os.fsencode(root) + b"/" + self.path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return None
        if stat.S_ISLNK(found.st_mode) != (self.mode & 0o170000 == _LINK):
            return True
        if modes and stat.S_ISREG(found.st_mode) and bool(found.st_mode & 0o100) != bool(self.mode & 0o100):
            return True
        smudged = self.size == 0 and self.oid != _EMPTY_BLOB  # git's own mark for "look at the content"
        if found.st_size != self.size and not smudged:
            return True
        whole_seconds = self.mtime_ns % 10**9 == 0 and found.st_mtime_ns // 10**9 == self.mtime_ns // 10**9
        if smudged or (found.st_mtime_ns != self.mtime_ns and not whole_seconds):
            return None
        return None if self.mtime_ns >= written_ns else False  # changed while git wrote the index

    def same_content(self, root: Path) -> bool:
        path = os.fsencode(root) + b"/" + self.path
        try:
            if self.mode & 0o170000 == _LINK:
                content = os.readlink(path)  # noqa: PTH115 - a path in bytes
            else:
                with open(path, "rb") as file:  # noqa: PTH123 - a path in bytes
                    content = file.read(MAX_HASHED_BYTES)
        except OSError:
            return False
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).digest() == self.oid


class _Index:
    """What git knows of the working tree, in version 2 to 4 of the format. Raises ValueError for any other kind of index."""

    def __init__(self, data: bytes, written_ns: int) -> None:
        self.written_ns = written_ns
        self.entries: list[_Entry] = []
        magic, version, count = struct.unpack_from(">4sII", data)
        if magic != b"DIRC" or version not in (2, 3, 4):
            raise ValueError(f"index version {version}")
        at, path = 12, b""
        for _ in range(count):
            begin = at
            _, _, mtime, mtime_ns, _, _, mode, _, _, size, oid, flags = struct.unpack_from(">10I20sH", data, at)
            at += 62
            extended = struct.unpack_from(">H", data, at)[0] if flags & 0x4000 else 0
            at += 2 if flags & 0x4000 else 0
            if version == 4:
                drop, at = _varint(data, at)
                end = data.index(b"\0", at)
                path = path[: len(path) - drop] + data[at:end]
                at = end + 1
            else:
                end = data.index(b"\0", at)
                path = data[at:end]
                at = begin + (end - begin + 8) // 8 * 8
            skipped = flags & 0x8000 or extended & 0x4000  # "assume unchanged", "skip worktree"
            if not skipped and mode & 0o170000 not in (_SUBMODULE, _FOLDER):
                self.entries.append(_Entry(path, mode, size, mtime * 10**9 + mtime_ns, oid))
        self._extensions: dict[bytes, bytes] = {}
        while at + 8 <= len(data) - 20:
            name, length = struct.unpack_from(">4sI", data, at)
            self._extensions[name] = data[at + 8 : at + 8 + length]
            at += 8 + length
        if b"link" in self._extensions:
            raise ValueError("a split index")

    def tree(self) -> bytes | None:
        """The tree that the whole index stands for: b"" when it is out of date, None when the index remembers none."""
        match = re.match(rb"\0(-?\d+) \d+\n", self._extensions.get(b"TREE", b""))
        if match is None:
            return None
        return b"" if match[1] == b"-1" else self._extensions[b"TREE"][match.end() : match.end() + 20]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 127
    while data[at] & 128:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 127)
    return value, at + 1


def _without_credentials(address: str) -> str:
    return re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@\s]*@", r"\1", address)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
