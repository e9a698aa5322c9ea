"""The clock of a device that a training moves away from, or shares with others. Streams and events are fakes."""

from __future__ import annotations

import torch
from fake_streams import Devices, Event, on_device

from perfagent.device import DeviceClock, reached

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


def test_a_loss_on_the_host_says_nothing_of_the_device(devices: Devices) -> None:
    clock = DeviceClock(SECOND)
    assert clock.begin(torch.ones(()))
    assert clock.device == SECOND


def test_marks_of_several_devices_wait_for_all_of_them(devices: Devices) -> None:
    """Layers of one model on two devices: the stream of the loss is free before the other device is."""
    clock = DeviceClock(SECOND)
    clock.span([FIRST, SECOND])
    begin = clock.begin(on_device(1))
    devices.work(0.1, 1)
    devices.work(0.4, 0)
    end = clock.mark()
    assert begin
    assert end
    devices.streams[1].done = devices.streams[1].now
    assert not reached(end)
    devices.finish()
    assert reached(end)
    assert (clock.device, clock.seconds(begin, end)) == (SECOND, 0.4)
    assert clock.begin(on_device(0))
    assert clock.device == SECOND, "a loss on either of them is of the same training"
    clock.span([SECOND])
    devices.work(9.0, 0)
    assert (alone := clock.mark())
    assert alone.stream is devices.streams[1]
    assert not any(stream.waits for stream in devices.streams), "no stream of the script waits for the agent's events"


def test_events_are_used_again(devices: Devices) -> None:
    clock = DeviceClock(FIRST)
    for _ in range(10):
        clock.release([mark for mark in (clock.mark(), clock.mark()) if mark])
    assert Event.made == 2


def test_no_mark_becomes_part_of_a_graph(devices: Devices) -> None:
    clock = DeviceClock(FIRST)
    devices.capturing = True
    assert clock.begin(on_device(0)) is None
    devices.capturing = False
    assert clock.mark()
