"""One cached sample as bytes: its tensors as they lie in memory, the rest as MessagePack, a checksum over all.

    magic 8 · CRC-32 of all that follows 4 · length of the head 4 · head · tensors, each at a multiple of 64

Reading runs no code that is in the file, unlike pickle: a folder of cached samples may come from anywhere. Tensors and
arrays that are read share the memory that the file was read into, without another copy."""

from __future__ import annotations

import math
import struct
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from perfagent.errors import ConfigError

__all__ = ["DamagedEntry", "decode", "encode", "key_of"]

_MAGIC = b"pfsample"
_HEAD = struct.Struct("<8sII")
_ALIGNMENT = 64
_TENSOR, _ARRAY, _TUPLE = 1, 2, 3
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class DamagedEntry(Exception):  # noqa: N818 - it says what was found
    """The bytes are not what was written."""


def encode(key: str, sample: Any) -> bytes:
    """The bytes of a sample: tensors, numpy arrays, numbers, strings, bytes, None, lists, tuples and dicts of such.

    Raises ConfigError for anything else, which only running code could bring back.
    """
    tensors: list[torch.Tensor] = []
    places: list[int] = []
    end = 0

    def note(tensor: torch.Tensor) -> list[Any]:
        nonlocal end
        tensor = tensor.detach().cpu().contiguous()
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        tensors.append(tensor)
        places.append(begin)
        end = begin + tensor.nbytes
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin]

    try:
        head = msgspec.msgpack.encode([key, _flat(sample, note, "sample")])
    except OverflowError as error:
        raise ConfigError("the sample has a whole number of more than 64 bits, which a cache cannot hold") from error
    rest = bytearray(-(-(_HEAD.size + len(head)) // _ALIGNMENT) * _ALIGNMENT + end)
    rest[_HEAD.size : _HEAD.size + len(head)] = head
    first = len(rest) - end
    for tensor, begin in zip(tensors, places, strict=True):
        if tensor.nbytes:
            flat = torch.frombuffer(rest, dtype=torch.uint8, count=tensor.nbytes, offset=first + begin)
            flat.copy_(tensor.reshape(-1).view(torch.uint8))
            del flat
    struct.pack_into("<I", rest, 12, len(head))
    _HEAD.pack_into(rest, 0, _MAGIC, zlib.crc32(memoryview(rest)[12:]), len(head))
    return bytes(rest)


def decode(content: bytearray, key: str) -> Any:
    """The sample. content: the file's bytes, which its tensors go on using. Raises DamagedEntry when a byte differs
    from what was written, or when it is another key's entry."""
    if len(content) < _HEAD.size:
        raise DamagedEntry(f"it has {len(content)} bytes")
    magic, crc, length = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise DamagedEntry("it does not begin as a cached sample does")
    if zlib.crc32(memoryview(content)[12:]) != crc:
        raise DamagedEntry("its content differs from what was written (CRC-32)")
    found, tree = msgspec.msgpack.decode(memoryview(content)[_HEAD.size : _HEAD.size + length])
    if found != key:
        raise DamagedEntry(f"it is the entry of {found!r:.80}")
    first = -(-(_HEAD.size + length) // _ALIGNMENT) * _ALIGNMENT
    return _whole(tree, content, first)


def key_of(content: bytearray) -> str:
    """The key that an entry says it has; "" where it cannot be read."""
    if len(content) < _HEAD.size:
        return ""
    length = _HEAD.unpack_from(content)[2]
    try:
        return str(msgspec.msgpack.decode(memoryview(content)[_HEAD.size : _HEAD.size + length])[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return ""


def _flat(value: Any, note: Any, where: str) -> Any:
    """What MessagePack can say; each list says first what it stands for."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            raise ConfigError(f"{where} is a {value.layout} tensor, which a cache cannot hold; make it dense")
        return [_TENSOR, *note(value)]
    if type(value) is list or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        parts = (_flat(part, note, f"{where}[{number}]") for number, part in enumerate(value))
        return [0 if type(value) is list else _TUPLE, *parts]
    if isinstance(value, Mapping):
        for name in value:
            if type(name) not in (str, int):
                raise ConfigError(f"{where} has the key {name!r:.60}; keys in a cache are strings or whole numbers")
        return {name: _flat(part, note, f"{where}[{name!r:.40}]") for name, part in value.items()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _flat(value.item(), note, where)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return [_ARRAY, *note(torch.from_numpy(numpy.ascontiguousarray(value)))]
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a cache cannot hold: return tensors, arrays, "
        "numbers, strings, bytes, lists, tuples or dicts of such from the dataset"
    )


def _whole(tree: Any, content: bytearray, first: int) -> Any:
    if isinstance(tree, dict):
        return {name: _whole(part, content, first) for name, part in tree.items()}
    if not isinstance(tree, list):
        return tree
    kind, *parts = tree
    if kind == _TENSOR:
        return _tensor(parts, content, first)
    if kind == _ARRAY:
        return _tensor(parts, content, first).numpy()
    whole = [_whole(part, content, first) for part in parts]
    return tuple(whole) if kind == _TUPLE else whole


def _tensor(entry: list[Any], content: bytearray, first: int) -> torch.Tensor:
    name, shape, begin = entry
    dtype = _DTYPES[name]
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=first + begin).reshape(shape)
