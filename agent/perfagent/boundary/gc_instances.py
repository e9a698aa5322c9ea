"""Finds the live objects of given types without disturbing any other thread.

The garbage collector's list includes tuples that another thread is still filling. While anybody else holds such a
tuple, that thread's `tuple(generator)` fails with a SystemError (python/cpython issue 59313). So nothing here may keep
the list beyond a single call in C, during which no other thread runs: the first call collects the types of all objects;
the second finds the objects that refer to a wanted type, as every instance of a class does.
"""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

__all__ = ["living"]


def living(*bases: type) -> list[Any]:
    """Returns all objects of these classes and of their subclasses, except those that `gc.freeze()` hid.

    Compares types by identity, since `isinstance` would run `__class__` properties of arbitrary objects. Takes 100 ms
    of CPU with 170,000 objects.
    """
    alive = set(map(id, map(type, chain.from_iterable(map(gc.get_objects, (None,))))))
    kinds = {kind for kind in _derived(bases) if id(kind) in alive}
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds] if kinds else []


def _derived(bases: tuple[type, ...]) -> set[type]:
    found: set[type] = set()
    waiting = [*bases]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting.extend(type.__subclasses__(kind))
    return found
