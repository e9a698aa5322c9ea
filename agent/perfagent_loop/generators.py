"""Finds the random generators that a loader holds besides those of the process, and saves and restores their states.

A generator may be an attribute of the loader, of a sampler within a sampler, of a dataset within a dataset, or of an
object of the user's own: torch's, numpy's or Python's.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["of_reading", "of_samples", "restore", "state_of"]

_DEEPEST, _LONGEST, _MOST = 6, 100, 2000
"""How far is looked: a dataset may hold a list of a million samples, which are no generators."""
_NOT_LOOKED_INTO = (str, bytes, int, float, torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, MethodType)


def of_reading(loader: Any) -> list[Any]:
    """Those that decide which samples come: reading the loader anew draws the same again."""
    if not isinstance(loader, DataLoader):
        return _found([loader])
    parts = [loader.generator, loader.sampler, getattr(loader, "batch_sampler", None)]
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return _found([*parts, loader.dataset])
    return _found(parts, without=Dataset)


def of_samples(loader: Any) -> list[Any]:
    """The others, from which a map-style dataset draws when a sample is loaded (augmentation)."""
    if not isinstance(loader, DataLoader):
        return []
    before = {id(one) for one in of_reading(loader)}
    return [one for one in _found([loader.dataset, loader.collate_fn]) if id(one) not in before]


def state_of(generator: Any) -> Any:
    """A tensor, or text: both can be in a checkpoint."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    return json.dumps(_bits(generator).state, default=lambda array: array.tolist())


def restore(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Puts back what `state_of` took of each."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state.cpu())
        elif isinstance(generator, random.Random):
            version, words, gauss = json.loads(state)
            generator.setstate((version, tuple(words), gauss))
        else:
            _bits(generator).state = json.loads(state)


def _bits(generator: Any) -> Any:
    """The part of a generator of numpy that has the state."""
    return generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator


def _found(roots: Iterable[Any], without: type | None = None) -> list[Any]:
    seen: set[int] = set()
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))

    def within(one: Any, depth: int) -> Iterator[Any]:
        if one is None or id(one) in seen or len(seen) > _MOST or isinstance(one, _NOT_LOOKED_INTO):
            return
        seen.add(id(one))
        if isinstance(one, kinds):
            yield one
        elif depth < _DEEPEST and not (without is not None and isinstance(one, without)):
            for part in _parts(one):
                yield from within(part, depth + 1)

    return [one for root in roots for one in within(root, 0)]


def _parts(one: Any) -> list[Any]:
    if isinstance(one, dict):
        held = [*one.values()] if len(one) <= _LONGEST else []
    elif isinstance(one, (list, tuple, set, frozenset)):
        held = [*one] if len(one) <= _LONGEST else []
    else:
        held = [part for name, part in getattr(one, "__dict__", {}).items() if name != "_iterator"]
    return held
