"""The manifest of a checkpoint: every file of its folder with size and SHA-256, guarded by a checksum of its own.

A checkpoint is whole when the manifest is as it was written, each file that it names has the bytes it names, and the
folder holds no other file. So a change of any single byte, a file cut short, lost or put in between is found before
anything is loaded. The sums show damage, not malice: loading never unpickles code."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from perfagent.errors import CheckpointError

__all__ = ["FORMAT", "NAME", "DamagedCheckpoint", "FileSum", "Manifest", "check_file", "check_list", "sum_of"]

FORMAT = 1
NAME = "manifest.json"
_VERSIONS = {"torch": str(torch.__version__), "python": sys.version.split()[0]}


class DamagedCheckpoint(CheckpointError):  # noqa: N818 - it says what was found
    """A folder does not hold what was saved: the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """bytes: size of the file; sha256: of its content, in hex."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    step: optimizer steps done. number: counts the saves into a folder, over restarts too: the greater one is the newer
    one, also where a run was rolled back and saves the same steps again. kind: plain, sharded
    (torch.distributed.checkpoint) or deepspeed. reason: why it was saved (every, asked, sigterm, exception, nan,
    stopped). metric: what `best` compares. created: Unix seconds."""

    step: int
    kind: str
    world_size: int
    reason: str
    number: int = 0
    created: float = 0.0
    files: dict[str, FileSum] = field(default_factory=dict)
    run: str | None = None
    metric: float | None = None
    versions: dict[str, str] = field(default_factory=_VERSIONS.copy)

    @property
    def total_bytes(self) -> int:
        return sum(one.bytes for one in self.files.values())

    def encode(self) -> bytes:
        """The sum of the body, a line end, the body, a line end."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """Raises DamagedCheckpoint when a byte differs from what encode() gave, or when a newer format is given."""
        expected, _, rest = content.partition(b"\n")
        body = rest[:-1]
        if rest[-1:] != b"\n" or hashlib.sha256(body).hexdigest().encode() != expected:
            raise DamagedCheckpoint(f"{NAME} is not as it was written")
        fields: dict[str, Any] = json.loads(body)
        if fields.pop("format") != FORMAT:
            raise DamagedCheckpoint(f"{NAME} has another format than {FORMAT}: another version of perfagent wrote it")
        files = {name: FileSum(**one) for name, one in fields.pop("files").items()}
        return cls(files=files, **fields)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises DamagedCheckpoint, also where there is none."""
        try:
            return cls.decode((folder / NAME).read_bytes())
        except OSError as error:
            raise DamagedCheckpoint(f"{NAME} cannot be read: {error.strerror or error}") from error


def sum_of(path: Path) -> FileSum:
    """Size and SHA-256 of a file; other threads run meanwhile."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileSum(os.fstat(file.fileno()).st_size, digest.hexdigest())


def check_list(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises DamagedCheckpoint when the folder holds other files than the manifest names."""
    found, listed = set(names), set(manifest.files)
    if listed - found:
        raise DamagedCheckpoint(f"{min(listed - found)} is missing in {folder.name}")
    if found - listed:
        raise DamagedCheckpoint(f"{min(found - listed)} in {folder.name} is no part of the checkpoint")


def check_file(folder: Path, name: str, expected: FileSum) -> None:
    """Raises DamagedCheckpoint when the file is not what the manifest says."""
    try:
        found = sum_of(folder / name)
    except OSError as error:
        raise DamagedCheckpoint(f"{name} in {folder.name} cannot be read: {error.strerror or error}") from error
    if found.bytes != expected.bytes:
        raise DamagedCheckpoint(f"{name} in {folder.name} has {found.bytes} bytes, {expected.bytes} were written")
    if found.sha256 != expected.sha256:
        raise DamagedCheckpoint(f"{name} in {folder.name} has other content than was written (SHA-256 differs)")
