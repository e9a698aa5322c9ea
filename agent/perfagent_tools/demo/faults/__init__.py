"""The faults of the demo, each with a real cause, and what the monitor must say about it."""

from __future__ import annotations

from perfagent.errors import ConfigError
from perfagent_tools.demo.faults import learning, life, pace
from perfagent_tools.demo.faults.fault import Fault, Job

__all__ = ["FAULTS", "Fault", "Job", "named"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="none", story="nothing goes wrong", expects=("healthy",)),
        *learning.FAULTS,
        *pace.FAULTS,
        *life.FAULTS,
    )
}


def named(name: str) -> Fault:
    """The fault of that name. Raises ConfigError for one that is not there."""
    if name in FAULTS:
        return FAULTS[name]
    raise ConfigError(f"there is no fault {name!r}; there are: {', '.join(FAULTS)}")
