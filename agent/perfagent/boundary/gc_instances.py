"""The living objects of some types, found without disturbing any other thread.

The garbage collector's list holds tuples that another thread is still filling; while anybody else holds such a tuple, that
thread's `tuple(generator)` fails with a SystemError (python/cpython issue 59313). So nothing here may keep the list beyond one
call in C, during which no other thread runs: first the types of all objects, then what refers to the wanted ones among them, as
every instance of a class does.
"""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

__all__ = ["living"]


def living(*bases: type) -> list[Any]:
    """All objects of these classes and of those derived from them. Objects that `gc.freeze()` hid are not found.

    Types are compared by identity and never asked: `isinstance` would run `__class__` properties of arbitrary objects.
    100 ms of CPU at 170,000 objects.
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
