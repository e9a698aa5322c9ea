"""A process group of one rank in the process of the tests, left in such a way that it does not hang.

A thread of gloo that has just done its work may still hold a tensor. Destroying the group waits for that thread with the
interpreter held, and the thread waits for the interpreter to drop its tensor: then no timeout ends the test, since a
timeout needs the interpreter, too. See perfagent_loop.collectives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["alone_in_group", "leave_group"]

_REST_S = 0.2
"""For gloo's threads to drop what they hold, also on a busy machine."""


@contextmanager
def alone_in_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    time.sleep(_REST_S)
    dist.destroy_process_group()
