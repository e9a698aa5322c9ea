"""The clock of a device that a training moves away from, or shares with others. Streams and events are fakes."""

from __future__ import annotations

import torch
from fake_streams import Devices, Event, on_device

from perfagent.device import DeviceClock

FIRST, SECOND = torch.device("xpu", 0), torch.device("xpu", 1)


def test_a_clock_follows_the_loss_to_another_device(devices: Devices) -> None:
    clock = DeviceClock(FIRST)
    old = [clock.begin(on_device(0)), clock.mark()]
    begin = clock.begin(on_device(1))
    clock.release([mark for mark in old if mark])
    devices.work(0.5, 1)
    end = clock.mark()
    devices.finish()
    assert (clock.device, begin and begin.device, end and end.device) == (SECOND, SECOND, SECOND)
    assert begin
    assert end
    assert clock.seconds(begin, end) == 0.5
    assert old[0]
    assert clock.seconds(old[0], end) is None, "of two devices"


def test_events_are_used_again(devices: Devices) -> None:
    clock = DeviceClock(FIRST)
    for _ in range(10):
        clock.release([mark for mark in (clock.mark(), clock.mark()) if mark])
    assert Event.made == 2
