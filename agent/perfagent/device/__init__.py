"""What the agent asks of a device, whatever kind it is: values on their way (readings.py), time (clock.py), and what
differs from kind to kind (backends.py). Nothing here waits for a device on the training thread."""

from perfagent.device.backends import (
    Backend,
    Event,
    accelerator,
    backend_of,
    devices_of,
    ran_out_of_memory,
    reached,
    tolerating_out_of_memory,
)  # fmt: skip
from perfagent.device.clock import DeviceClock
from perfagent.device.readings import (
    Reading,
    Value,
    collect,
    duplicate,
    fetched,
    immortal,
    is_captured,
    is_tensor,
    listen_here,
    ready,
    snapshot,
    take,
    take_if_any,
    to_host,
    value_of,
    waiting,
)  # fmt: skip

__all__ = [
    "Backend", "DeviceClock", "Event", "Reading", "Value", "accelerator", "backend_of", "collect", "devices_of", "duplicate",
    "fetched", "immortal", "is_captured", "is_tensor", "listen_here", "ran_out_of_memory", "reached", "ready", "snapshot",
    "take", "take_if_any", "to_host", "tolerating_out_of_memory", "value_of", "waiting",
]  # fmt: skip
