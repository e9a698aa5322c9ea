"""Finds the live objects of given types without disturbing any other thread.

The garbage collector's list includes tuples that another thread is still filling. While anybody else holds such a
tuple, that thread's `tuple(generator)` fails with a SystemError (python/cpython issue 59313). So nothing here may keep
the list beyond a single call in C, during which no other thread runs: the first call collects the types of all objects;
the second finds the objects that refer to a wanted type, as every instance of a class does.

Python code within such a call would let other threads run. Two things keep it out. The collector is off: up to Python
3.11 any allocation may start a collection, which runs callbacks and finalizers. And `object.__hash__` gives the address of
a type: `id` would raise an audit event for each type, and a hook of the script may listen to it.
"""

from __future__ import annotations

import gc
from itertools import chain, compress, starmap, tee
from typing import Any

__all__ = ["instances_of"]

_address = object.__hash__


def instances_of(*bases: type) -> list[Any]:
    """Returns all objects of these classes and of their subclasses, except those that `gc.freeze()` hid.

    Compares types by identity, since `isinstance` would run `__class__` properties of arbitrary objects. Takes 100 ms
    of CPU with 170,000 objects.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        alive = set(map(_address, map(type, chain.from_iterable(map(gc.get_objects, (None,))))))
        kinds = [kind for kind in _derived(bases) if _address(kind) in alive]
        wanted = set(map(_address, kinds))
        found, same = tee(chain.from_iterable(starmap(gc.get_referrers, [kinds] if kinds else [])))
        return [*compress(found, map(wanted.__contains__, map(_address, map(type, same))))]
    finally:
        if collects:
            gc.enable()


def _derived(bases: tuple[type, ...]) -> set[type]:
    found: set[type] = set()
    waiting = [*bases]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting.extend(type.__subclasses__(kind))
    return found
