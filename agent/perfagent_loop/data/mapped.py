"""Datasets in files that are mapped into memory: no copy a process, and nothing is read before it is used.

The page cache holds what is in use once for all processes of the machine. A mapping is private: writing into its
tensors never changes the file. A worker gets the path and maps the file itself."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from perfagent.errors import ConfigError
from perfagent_loop.kinds import State

__all__ = ["MappedLines", "MappedTokens", "bytes_of", "map_tokens", "place_of"]

StrPath: TypeAlias = str | os.PathLike[str]
_MAGIC = b"pftokens"
# magic, dtype, CRC of the rest of the head, documents, tokens, CRCs of offsets and tokens
_HEAD = struct.Struct("<8s12sIQQII")
_FIRST = 64
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: without it the kernel refuses a file larger than the memory, though it copies no page."""
_LINES_MAGIC = b"pflines1"
_LINES_HEAD = struct.Struct("<8sQqQI")  # magic, size and mtime of the text, lines, CRC of the offsets
_CHUNK = 1 << 24
_ANEW = "write it anew with map_tokens"


def map_tokens(path: StrPath, documents: Iterable[Any], *, dtype: torch.dtype = torch.int32) -> MappedTokens:
    """Writes documents into one file, and opens it. The file appears under its name when it is complete and on disk.

    Args:
        path: The file.
        documents: Sequences of token ids.
        dtype: The type in the file. uint16 halves it, for vocabularies below 65,536.

    Raises:
        ConfigError: The dtype cannot represent an id. The message names the document.
    """
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise ConfigError(f"token ids are whole: dtype {dtype} cannot hold them; use torch.uint16 or torch.int32")
    path, draft = Path(path), _draft_of(Path(path))
    lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    offsets, crc = [0], 0
    try:
        with draft.open("wb") as file:
            file.write(bytes(_FIRST))
            for number, document in enumerate(documents):
                ids = torch.as_tensor(document, dtype=torch.int64).reshape(-1)
                if len(ids) and not lowest <= int(ids.min()) <= int(ids.max()) <= highest:
                    ids_said = f"document {number} has ids from {ids.min()} to {ids.max()}"
                    raise ConfigError(f"{ids_said}, and {dtype} holds {lowest} to {highest}")
                content = bytes_of(ids.to(dtype))
                crc = zlib.crc32(content, crc)
                file.write(content)
                offsets.append(offsets[-1] + len(ids))
            file.write(bytes(-file.tell() % 8))
            index = bytes_of(torch.tensor(offsets, dtype=torch.int64))
            file.write(index)
            rest = struct.pack("<QQII", len(offsets) - 1, offsets[-1], zlib.crc32(index), crc)
            name = struct.pack("12s", str(dtype).removeprefix("torch.").encode())
            file.seek(0)
            file.write(_MAGIC + name + struct.pack("<I", zlib.crc32(name + rest)) + rest)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return MappedTokens(path)


class MappedTokens(Dataset[Tensor]):
    """Documents of token ids in a file that `map_tokens` wrote: `dataset[i]` is a tensor in the memory-mapped file.

    Args:
        path: The file.

    Attributes:
        tokens: All tokens in a row, for windows that cross the ends of documents.

    Raises:
        ConfigError: The file was not written by `map_tokens`, is cut short, or its head is damaged.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        head, self._map = _mapped(self.path, _HEAD.size)
        magic, name, crc, documents, count, index_crc, self._crc = _HEAD.unpack(head)
        if magic != _MAGIC:
            raise ConfigError(f"{self.path} is no file of tokens; {_ANEW}")
        if zlib.crc32(name + head[24:]) != crc:
            raise ConfigError(f"{self.path} is damaged: its head is not as it was written; {_ANEW}")
        dtype = getattr(torch, name.rstrip(b"\0").decode())
        index = -(-(_FIRST + count * dtype.itemsize) // 8) * 8
        if len(self._map) != index + 8 * (documents + 1):
            wanted = index + 8 * (documents + 1)
            raise ConfigError(f"{self.path} has {len(self._map)} bytes of {wanted}: it was cut short; {_ANEW}")
        self._offsets = torch.frombuffer(self._map, dtype=torch.int64, count=documents + 1, offset=index)
        if zlib.crc32(memoryview(self._map)[index:]) != index_crc:
            raise ConfigError(f"{self.path} is damaged: its list of documents is not as it was written; {_ANEW}")
        self.tokens = (
            torch.frombuffer(self._map, dtype=dtype, count=count, offset=_FIRST)
            if count
            else torch.empty(0, dtype=dtype)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        place = place_of(index, len(self))
        begin, end = self._offsets[place : place + 2].tolist()
        return self.tokens[begin:end]

    @property
    def lengths(self) -> list[int]:
        """The length of each document in tokens, for the samplers."""
        return self._offsets.diff().tolist()

    def verify(self) -> None:
        """Reads every token.

        Raises:
            ConfigError: A token differs from what was written.
        """
        crc, end = 0, _FIRST + self.tokens.nbytes
        view = memoryview(self._map)
        for begin in range(_FIRST, end, _CHUNK):
            crc = zlib.crc32(view[begin : min(begin + _CHUNK, end)], crc)
        if crc != self._crc:
            raise ConfigError(f"{self.path} is damaged: its tokens are not as they were written; {_ANEW}")

    def __getstate__(self) -> State:
        return {"path": self.path}

    def __setstate__(self, state: State) -> None:
        self.path = state["path"]
        self._open()


class MappedLines(Dataset[Any]):
    """The lines of a text file as samples: `dataset[i]` is `parse(line)`, without reading the file into memory.

    Empty lines at the end are no samples.

    Args:
        path: The file.
        parse: Called with the bytes of a line, without its end: `json.loads` for JSON lines (default), `bytes.decode`
            for text.
        index: The file with the positions of the lines (8 bytes a line); `FILE.lines` by default. It is made again if
            the text's size or time changes, or if it is damaged, and kept in memory only if it cannot be written.
    """

    def __init__(
        self, path: StrPath, parse: Callable[[bytes], Any] = json.loads, *, index: StrPath | None = None
    ) -> None:
        self.path, self.parse = Path(path), parse
        self.index = self.path.with_name(self.path.name + ".lines") if index is None else Path(index)
        self._open()

    def _open(self) -> None:
        _, self._map = _mapped(self.path, 0)
        status = self.path.stat()
        ends = _read_ends(self.index, status)
        if ends is None:
            _write_ends(self.index, status, ends := _find_ends(self._map))
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        place = place_of(index, len(self))
        begin = int(self._ends[place - 1]) + 1 if place else 0
        return self.parse(self._map[begin : int(self._ends[place])].rstrip(b"\r"))

    def __getstate__(self) -> State:
        return {"path": self.path, "parse": self.parse, "index": self.index}

    def __setstate__(self, state: State) -> None:
        self.path, self.parse, self.index = state["path"], state["parse"], state["index"]
        self._open()


def _draft_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _mapped(path: Path, head: int) -> tuple[bytes, Any]:
    """The first bytes, and the mapping; an empty file, which cannot be mapped, is no bytes."""
    try:
        with path.open("rb") as file:
            first = file.read(head)
            if len(first) < head:
                raise ConfigError(f"{path} has {len(first)} bytes: it is no file of tokens; {_ANEW}")
            if not os.fstat(file.fileno()).st_size:
                return first, b""
            flags, rights = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return first, mmap.mmap(file.fileno(), 0, flags=flags, prot=rights)
    except OSError as error:
        raise ConfigError(f"{path} cannot be mapped: {error.strerror}") from error


def place_of(index: int, length: int) -> int:
    """Counted from 0. Raises IndexError."""
    place = index.__index__()
    if not -length <= place < length:
        raise IndexError(f"sample {place} of {length}")
    return place % length


def bytes_of(tensor: Tensor) -> bytearray:
    """A tensor's numbers as they lie in memory."""
    content = bytearray(tensor.nbytes)
    if content:
        torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return content


def _find_ends(text: Any) -> Tensor:
    """Where each line's end is, and the text's, if it does not end with one."""
    found = []
    for begin in range(0, len(text), _CHUNK):
        chunk = torch.frombuffer(bytearray(text[begin : begin + _CHUNK]), dtype=torch.uint8)
        found.append((chunk == 10).nonzero().reshape(-1) + begin)
    ends = torch.cat([*found, torch.tensor([len(text)])]) if found else torch.empty(0, dtype=torch.int64)
    while len(ends) and not text[(int(ends[-2]) + 1 if len(ends) > 1 else 0) : int(ends[-1])].strip():
        ends = ends[:-1]
    return ends


def _read_ends(path: Path, text: os.stat_result) -> Tensor | None:
    try:
        content = bytearray(path.read_bytes())
        magic, size, mtime, lines, crc = _LINES_HEAD.unpack_from(content)
    except (OSError, struct.error):
        return None
    body = memoryview(content)[_LINES_HEAD.size :]
    same = (magic, size, mtime) == (_LINES_MAGIC, text.st_size, text.st_mtime_ns)
    if not same or len(body) != 8 * lines or zlib.crc32(body) != crc:
        return None
    return torch.frombuffer(body, dtype=torch.int64) if lines else torch.empty(0, dtype=torch.int64)


def _write_ends(path: Path, text: os.stat_result, ends: Tensor) -> None:
    body = bytes_of(ends)
    draft = _draft_of(path)
    try:
        head = _LINES_HEAD.pack(_LINES_MAGIC, text.st_size, text.st_mtime_ns, len(ends), zlib.crc32(body))
        draft.write_bytes(head + body)
        draft.replace(path)
    except OSError:  # a folder that cannot be written: this process keeps what it found
        with contextlib.suppress(OSError):
            draft.unlink()
