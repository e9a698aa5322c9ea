"""Reads the state of the script's git repository from its files: no process is started, and git need not be there.

(A `git` of ours would be reaped by a script that waits for its own children, may take locks, and refuses repositories
that belong to somebody else, as in containers.) Formats: gitformat-index, gitrepository-layout and git-config of git's
documentation.
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
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from perfagent.redaction import redacted_text

__all__ = ["Repository", "find"]

MAX_INDEX_BYTES = 8 * 2**20
MAX_HASHED_BYTES = 32 * 2**20
_EMPTY_BLOB = bytes.fromhex("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")
_HEAD_OF_AN_OBJECT = 4096
"""Bytes of a stored object that are read where only its first line is wanted."""
_LINK, _SUBMODULE, _FOLDER = 0o120000, 0o160000, 0o040000
_HEXADECIMAL = frozenset("0123456789abcdef")


def find(start: Path | None = None) -> Repository | None:
    """The repository of a folder or of its parents; by default of the script's. None where there is none."""
    folder = start or _folder_of_script()
    if folder is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        return next(filter(None, map(_at, (folder, *folder.parents))), None)
    return None


def _at(folder: Path) -> Repository | None:
    """The repository whose working tree begins with this folder."""
    git = folder / ".git"
    if git.is_file():  # a worktree or submodule: "gitdir: <path>"
        git = (folder / git.read_text("utf-8").partition(":")[2].strip()).resolve()
    if not (git / "HEAD").is_file():
        return None
    shared = git / "commondir"
    common = (git / shared.read_text("utf-8").strip()).resolve() if shared.is_file() else git
    return Repository(folder, git, common)


def _folder_of_script() -> Path | None:
    """For a program that is installed (`accelerate`, `python -m package`) the working folder: what it trains lies
    there."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    with contextlib.suppress(OSError):
        folder = Path(script).resolve().parent if script else Path.cwd()
        programs = Path(sys.prefix, "bin").resolve()
        installed = folder == programs or not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)
        return Path.cwd() if installed else folder
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
        if not head.startswith("ref: ") or self._references_elsewhere():
            return None
        return head.removeprefix("ref: ").removeprefix("refs/heads/")

    def _references_elsewhere(self) -> bool:
        """Whether they are in tables of git's newer format, which we cannot read: HEAD then names a branch that cannot
        be."""
        return _read(self.git / "HEAD") == "ref: refs/heads/.invalid"

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
        text = f"{_read(self.common / 'config')}\n{_read(self.git / 'config.worktree')}"
        for line in map(str.strip, text.splitlines()):
            if line.startswith("[") and "]" in line:
                values = sections.setdefault(line[1 : line.rindex("]")], {})
            elif line and not line.startswith(("#", ";")):
                name, _, value = line.partition("=")
                values[name.strip().lower()] = value.strip().strip('"')
        return sections

    # ---- the working tree

    def changes(self) -> Iterator[bool | None]:
        """Whether tracked files differ from the commit, staged or not, those of submodules too. Yields None after each
        piece of work, the answer at last; no answer at all where it cannot be known (an unusual index, more than 32 MB
        to compare, or content that filters change)."""
        path = self.git / "index"
        try:
            index = (
                _Index(path.read_bytes(), path.stat().st_mtime_ns) if path.stat().st_size <= MAX_INDEX_BYTES else None
            )
        except (OSError, ValueError, struct.error, IndexError):
            return
        if index is None or self._references_elsewhere() or len(self.commit() or "") == 64:  # objects named by SHA-256
            return
        yield None
        staged = yield from self._staged(index)
        if staged is None:
            return
        if staged:
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
                differs = self._differs_in_content(entry, index) if room >= 0 else None
            if differs is None:
                return
            if differs:
                yield True
                return
        for module in index.submodules:
            differs = yield from self._differs_in_submodule(module)
            if differs is None:
                return
            if differs:
                yield True
                return
        yield False

    def _differs_in_submodule(self, entry: _Entry) -> Generator[None, None, bool | None]:
        """Whether another commit is checked out there than the index names, or its files differ from it."""
        with contextlib.suppress(OSError, ValueError):
            folder = self.root / os.fsdecode(entry.path)
            inner = _at(folder)
            if inner is None:  # not checked out, which is no change as long as there is a folder for it
                return folder.is_symlink() or not folder.is_dir()
            commit, answer = inner.commit(), None
            if commit is None or commit != entry.oid.hex():
                return None if commit is None else True
            for answer in inner.changes():
                if answer is None:
                    yield
            return answer
        return None

    def _differs_in_content(self, entry: _Entry, index: _Index) -> bool | None:
        content = entry.content(self.root)
        if content is None:
            return True
        if _named(b"blob", content) == entry.oid:
            return False
        if b"\r\n" in content and _named(b"blob", content.replace(b"\r\n", b"\n")) == entry.oid:
            # whether ends of lines count is said by attributes, and by configurations of the user and the machine
            return None
        return None if self._has_filters(index) else True

    def _has_filters(self, index: _Index) -> bool:
        """Whether files as they are stored and as they are checked out may differ (line ends, LFS)."""
        config = self._config()
        if config.get("core", {}).get("autocrlf", "false") not in ("false", "no", "off", "0"):
            return True
        places = [
            self.root / os.fsdecode(entry.path) for entry in index.entries if entry.path.endswith(b".gitattributes")
        ]
        attributes = "".join(map(_read, [self.root / ".gitattributes", self.common / "info" / "attributes", *places]))
        return any(word in attributes for word in ("filter=", "text", "eol=", "ident", "crlf"))

    def _staged(self, index: _Index) -> Generator[None, None, bool | None]:
        """Whether the index is of another tree than the commit; None where that cannot be known."""
        commit = self.commit()
        if index.unsettled or commit is None:  # before the first commit all that is in the index is new
            return index.unsettled or bool(index.entries)
        committed, tree = self._tree_of(commit), index.tree()
        if tree is None and committed is not None:
            tree = yield from index.rebuilt_tree()
        if committed is None:  # deep in a pack: an index that knows its tree was hardly ever changed by hand
            return None if tree is None else False
        return tree != committed

    def _tree_of(self, commit: str) -> bytes | None:
        """The id of the commit's tree, None where the commit is not found or is stored as what differs from another
        one."""
        folders = [self.common / "objects"]
        folders += [folders[0] / other for other in _read(folders[0] / "info" / "alternates").splitlines() if other]
        for folder in folders:
            with contextlib.suppress(OSError, zlib.error, ValueError, struct.error, IndexError):
                stored = _loose(folder / commit[:2] / commit[2:]) or _from_packs(folder / "pack", bytes.fromhex(commit))
                if stored is not None and stored.startswith(b"tree "):
                    return bytes.fromhex(stored[5:45].decode("ascii"))
        return None


def _loose(path: Path) -> bytes | None:
    """The beginning of an object that has a file of its own."""
    try:
        with path.open("rb") as file:
            stored = file.read(_HEAD_OF_AN_OBJECT)
    except FileNotFoundError:
        return None
    return zlib.decompressobj().decompress(stored, _HEAD_OF_AN_OBJECT).partition(b"\0")[2]


def _from_packs(folder: Path, oid: bytes) -> bytes | None:
    """The beginning of a commit in a pack: of those that are stored whole, as the newest of each pack are."""
    for index in folder.glob("*.idx"):
        offset = _offset_in_pack(index, oid)
        if offset is None:
            continue
        with index.with_suffix(".pack").open("rb") as file:
            file.seek(offset)
            stored = file.read(_HEAD_OF_AN_OBJECT)
        if stored[0] >> 4 & 7 != 1:  # not a commit, but what differs from one
            return None
        start = next((at for at, byte in enumerate(stored) if byte < 128), 0) + 1  # after the size
        return zlib.decompressobj().decompress(stored[start:], _HEAD_OF_AN_OBJECT)
    return None


def _offset_in_pack(index: Path, oid: bytes) -> int | None:
    """Version 2 of gitformat-pack: how many names begin with up to each byte, the names, checksums, offsets, long
    offsets."""
    with index.open("rb") as file:
        magic, version, *counts = struct.unpack(">4sI256I", file.read(8 + 4 * 256))
        if magic != b"\xfftOc" or version != 2:
            return None
        first, end, total = counts[oid[0] - 1] if oid[0] else 0, counts[oid[0]], counts[255]
        names = file.tell()
        while first < end:
            middle = (first + end) // 2
            file.seek(names + 20 * middle)
            found = file.read(20)
            if found == oid:
                file.seek(names + 24 * total + 4 * middle)
                (offset,) = struct.unpack(">I", file.read(4))
                if offset >> 31:
                    file.seek(names + 28 * total + 8 * (offset & 0x7FFFFFFF))
                    (offset,) = struct.unpack(">Q", file.read(8))
                return int(offset)
            first, end = (middle + 1, end) if found < oid else (first, middle)
    return None


class _Entry(NamedTuple):
    """A file as the index knows it."""

    path: bytes
    mode: int
    size: int
    mtime_ns: int
    oid: bytes

    def differs(self, root: Path, written_ns: int, *, modes: bool) -> bool | None:
        """Whether the file is another one; None when only a look at its content can decide.
        written_ns: when the index was written; modes: whether the file system keeps them."""
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

    def content(self, root: Path) -> bytes | None:
        """None where it cannot be read."""
        path = os.fsencode(root) + b"/" + self.path
        try:
            if self.mode & 0o170000 == _LINK:
                return os.readlink(path)  # noqa: PTH115 - a path in bytes
            with open(path, "rb") as file:  # noqa: PTH123 - a path in bytes
                return file.read(MAX_HASHED_BYTES)
        except OSError:
            return None


class _Index:
    """What git knows of the working tree, in version 2 to 4 of the format. Raises ValueError for any other kind of
    index."""

    def __init__(self, data: bytes, written_ns: int) -> None:
        self.written_ns = written_ns
        self.entries: list[_Entry] = []
        """The files that are to be looked at."""
        self.submodules: list[_Entry] = []
        self.unsettled = False
        """Whether something in it belongs to no tree: a conflict, or a new file without content (`git add -N`)."""
        self._all: list[_Entry] = []
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
            entry = _Entry(path, mode, size, mtime * 10**9 + mtime_ns, oid)
            self._all.append(entry)
            self.unsettled = self.unsettled or bool(flags & 0x3000 or extended & 0x2000)
            kind = mode & 0o170000
            if not skipped and kind == _SUBMODULE:
                self.submodules.append(entry)
            elif not skipped and kind != _FOLDER:
                self.entries.append(entry)
        self._extensions: dict[bytes, bytes] = {}
        while at + 8 <= len(data) - 20:
            name, length = struct.unpack_from(">4sI", data, at)
            self._extensions[name] = data[at + 8 : at + 8 + length]
            at += 8 + length
        if b"link" in self._extensions:
            raise ValueError("a split index")

    def tree(self) -> bytes | None:
        """The tree that the whole index stands for, None where it remembers none. `git add` marks it as out of date,
        and what takes the change back leaves it so."""
        match = re.match(rb"\0(-?\d+) \d+\n", self._extensions.get(b"TREE", b""))
        if match is None or match[1] == b"-1":
            return None
        return self._extensions[b"TREE"][match.end() : match.end() + 20]

    def rebuilt_tree(self) -> Generator[None, None, bytes]:
        """The tree that the entries make, as `git write-tree` names it; yields after each piece of work. Entries and
        trees have the same order, so that a folder is complete when the next path lies outside of it."""
        folders: list[bytes] = []
        contents: list[list[bytes]] = [[]]  # of the root, and of each of the folders

        def leave(depth: int) -> None:
            while len(folders) > depth:
                made = _named(b"tree", b"".join(contents.pop()))
                contents[-1].append(b"40000 %s\0%s" % (folders.pop(), made))

        for number, entry in enumerate(self._all):
            if number % 1000 == 999:
                yield
            *parents, name = entry.path.rstrip(b"/").split(b"/")  # a folder that is not checked out ends with a slash
            if parents != folders:
                leave(
                    next((at for at, (a, b) in enumerate(zip(folders, parents, strict=False)) if a != b), len(parents))
                )
                contents += [[] for _ in parents[len(folders) :]]
                folders += parents[len(folders) :]
            contents[-1].append(b"%o %s\0%s" % (entry.mode, name, entry.oid))
        leave(0)
        return _named(b"tree", b"".join(contents[0]))


def _named(kind: bytes, content: bytes) -> bytes:
    """An object's id."""
    return hashlib.sha1(b"%s %d\0" % (kind, len(content)) + content, usedforsecurity=False).digest()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 127
    while data[at] & 128:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 127)
    return value, at + 1


def _without_credentials(address: str) -> str:
    return re.sub(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s]*@", r"\1", address)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
