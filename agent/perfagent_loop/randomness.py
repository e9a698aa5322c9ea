"""Saves and restores the state of every random generator of this process.

Each rank has its own. What a DataLoader's worker draws is not in here: workers are seeded anew from torch's generator.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perfagent_loop.kinds import Loader, State

__all__ = [
    "cuda_in_use", "generator_state", "generators_of_reading", "generators_of_samples", "is_same", "random_state",
    "restore_generators", "restore_random_state",
]  # fmt: skip


def cuda_in_use() -> bool:
    """Whether this process has begun to use a CUDA device."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_state() -> State:
    """Python's, numpy's (where it is imported), torch's and each CUDA device's generator, as tensors, numbers, lists
    and text, which weights_only=True loads again."""
    version, words, gauss = random.getstate()
    state: State = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [str(kind), [int(key) for key in keys], int(place), int(has_gauss), float(cached)]
    if cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def is_same(one: State, other: State) -> bool:
    """Whether nothing was drawn on the host between two states."""
    same = all(one.get(name) == other.get(name) for name in ("python", "numpy"))
    return same and torch.equal(one["torch"], other["torch"])


def restore_random_state(state: State) -> None:
    """Puts back what `random_state` took. A machine with fewer GPUs takes those that it has."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, place, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device.cpu(), device)


Generator: TypeAlias = Any  # torch's, Python's or numpy's
_DEEPEST, _LONGEST, _MOST = 6, 100, 2000
"""How far is looked: a dataset may hold a list of a million samples, which are no generators."""
_NOT_LOOKED_INTO = (str, bytes, int, float, torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, MethodType)


def generators_of_reading(loader: Loader) -> list[Generator]:
    """Those that decide which samples come: reading the loader anew draws the same again."""
    if not isinstance(loader, DataLoader):
        return _found([loader])
    parts = [loader.generator, loader.sampler, getattr(loader, "batch_sampler", None)]
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return _found([*parts, loader.dataset])
    return _found(parts, without=Dataset)


def generators_of_samples(loader: Loader) -> list[Generator]:
    """The others, from which a map-style dataset draws when a sample is loaded (augmentation)."""
    if not isinstance(loader, DataLoader):
        return []
    before = {id(one) for one in generators_of_reading(loader)}
    return [one for one in _found([loader.dataset, loader.collate_fn]) if id(one) not in before]


def generator_state(generator: Generator) -> Tensor | str:
    """A tensor, or text: both can be in a checkpoint."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    return json.dumps(_bits(generator).state, default=lambda array: array.tolist())


def restore_generators(generators: Iterable[Generator], states: Iterable[Any]) -> None:
    """Puts back what `generator_state` took of each."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state.cpu())
        elif isinstance(generator, random.Random):
            version, words, gauss = json.loads(state)
            generator.setstate((version, tuple(words), gauss))
        else:
            _bits(generator).state = json.loads(state)


def _bits(generator: Generator) -> Any:
    """The part of a generator of numpy that has the state."""
    return generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator


def _found(roots: Iterable[object], without: type | None = None) -> list[Generator]:
    seen: set[int] = set()
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))

    def within(one: object, depth: int) -> Iterator[Generator]:
        if one is None or id(one) in seen or len(seen) > _MOST or isinstance(one, _NOT_LOOKED_INTO):
            return
        seen.add(id(one))
        if isinstance(one, kinds):
            yield one
        elif depth < _DEEPEST and not (without is not None and isinstance(one, without)):
            for part in _parts(one):
                yield from within(part, depth + 1)

    return [one for root in roots for one in within(root, 0)]


def _parts(one: object) -> list[object]:
    if isinstance(one, dict):
        held = [*one.values()] if len(one) <= _LONGEST else []
    elif isinstance(one, (list, tuple, set, frozenset)):
        held = [*one] if len(one) <= _LONGEST else []
    else:
        held = [part for name, part in getattr(one, "__dict__", {}).items() if name != "_iterator"]
    return held
