"""The figures of the host, from a /proc of our own making and from the real one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from builders import until

from perfagent.samplers.cgroup import ControlGroup
from perfagent.samplers.host import HostReader
from perfagent.wire import CATALOGUE

STAT = "cpu  {user} 0 0 {idle} {waiting} 0 0 0 0 0\ncpu0 1 1 1 1\n"
MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n"
DISKS = (
    "   8       0 sda 10 0 {read} 0 10 0 {written} 0 0 0 0\n   8       1 sda1 10 0 9999 0 10 0 9999 0 0 0 0\n"
    "   7       0 loop0 1 0 9999 0 0 0 9999 0 0 0 0\n 259       0 nvme0n1 1 0 {read} 0 0 0 {written} 0 0 {busy} 0\n"
)
LINKS = (
    "Inter-|   Receive\n face |bytes\n    lo: 999 0 0 0 0 0 0 0 999 0\n  eth0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
    "eth0.100: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n   br0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
    "   wg0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
)
NO_GROUP = ControlGroup(usage=None, limit_bytes=None, inactive=None, events=None, cores=None)


class Machine:
    """A /proc of our own making."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        (self.proc / "net").mkdir(parents=True)
        self.write()

    def write(
        self, *, user: int = 0, idle: int = 0, waiting: int = 0, read: int = 0, written: int = 0, busy: int = 0,
        received: int = 0, sent: int = 0,
    ) -> None:  # fmt: skip
        (self.proc / "stat").write_text(STAT.format(user=user, idle=idle, waiting=waiting))
        self.memory(16_000_000, 10_000_000)
        (self.proc / "diskstats").write_text(DISKS.format(read=read, written=written, busy=busy))
        (self.proc / "net" / "dev").write_text(LINKS.format(received=received, sent=sent))

    def memory(self, total_kb: int, used_kb: int) -> None:
        (self.proc / "meminfo").write_text(MEMINFO.format(total=total_kb, available=total_kb - used_kb))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_rates_need_two_readings_of_whole_disks_and_real_links(machine: Machine) -> None:
    reader = HostReader(machine.proc, NO_GROUP)
    first = reader.read(10.0)
    assert not any(name.endswith("_per_s") or name == "host/cpu_pct" for name in first)
    machine.write(user=50, idle=20, waiting=30, busy=1500, read=100, written=50, received=3000, sent=1000)
    told = reader.read(12.0)
    expected = {
        "cpu_pct": 50.0, "iowait_pct": 30.0, "disk_busy_pct": 75.0,  # waiting is no work, and the busiest disk counts
        "disk_read_bytes_per_s": 2 * 100 * 512 / 2.0, "disk_write_bytes_per_s": 2 * 50 * 512 / 2.0,
        "net_received_bytes_per_s": 1500.0, "net_sent_bytes_per_s": 500.0, "memory_used_bytes": 10_000_000 * 1024,
    }  # fmt: skip
    assert {name: told[f"host/{name}"] for name in expected} == expected


def test_bytes_of_a_link_below_another_count_once(machine: Machine, tmp_path: Path) -> None:
    """A virtual function has the bytes of the interface above it."""
    links = "eth0: {0} 0 0 0 0 0 0 0 {0} 0\nenP1: {0} 0 0 0 0 0 0 0 {0} 0\n"
    (tmp_path / "net" / "enP1").mkdir(parents=True)
    (tmp_path / "net" / "enP1" / "master").symlink_to(tmp_path / "net" / "eth0")
    reader = HostReader(machine.proc, NO_GROUP, tmp_path / "net")
    for now, count in ((10.0, 0), (12.0, 3000)):
        (machine.proc / "net" / "dev").write_text(links.format(count))
        values = reader.read(now)
    assert values["host/net_received_bytes_per_s"] == values["host/net_sent_bytes_per_s"] == 1500.0


def test_memory_is_tight_when_it_will_be_used_up_soon(machine: Machine) -> None:
    reader = HostReader(machine.proc, NO_GROUP)

    def tight(now: float, used_kb: int) -> bool:
        machine.memory(1000, used_kb)
        reader.memory(now)
        return reader.tight

    readings = ((0.0, 700), (1.0, 710), (2.0, 500), (3.0, 660), (4.0, 840))
    assert [tight(*reading) for reading in readings] == [False, False, False, False, True]
    readings = ((5.0, 500), (6.0, 700), (6.2, 740), (6.4, 745))
    assert [tight(*reading) for reading in readings] == [False, True, True, False]


@pytest.mark.fault
def test_a18_counters_that_go_back_leave_a_gap(machine: Machine) -> None:
    reader = HostReader(machine.proc, NO_GROUP)
    machine.write(user=50, idle=50, read=1000, written=1000, received=1000, sent=1000)
    reader.read(10.0)
    machine.write(user=40, idle=40, read=10, written=10, received=10, sent=10)
    found = reader.read(11.0)
    assert not any(name.endswith("_per_s") or name == "host/cpu_pct" for name in found)
    assert all(value >= 0 for value in reader.read(5.0).values())


def test_in_a_limited_group_the_limit_is_the_memory_there_is(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("3000\n")
    (tmp_path / "stat").write_text("anon 1\ninactive_file 700\nactive_file 300\n")
    group = NO_GROUP._replace(usage=tmp_path / "usage", limit_bytes=4000, inactive=tmp_path / "stat")
    found = HostReader(machine.proc, group).read(1.0)
    assert (found["host/memory_total_bytes"], found["host/memory_used_bytes"]) == (4000, 2000)


def test_the_real_host_agrees_with_psutil_and_the_catalogue() -> None:
    reader, memory = HostReader(group=NO_GROUP), psutil.virtual_memory()
    found = reader.read(0.0)
    assert found["host/memory_total_bytes"] == memory.total
    assert abs(found["host/memory_used_bytes"] - (memory.total - memory.available)) < 0.05 * memory.total
    names, now = set(found), iter(range(10, 10_000, 10))
    # the kernel's next tick
    names |= until(lambda: (told := set(reader.read(float(next(now))))) & {"host/cpu_pct"} and told)
    assert names <= CATALOGUE.keys()


# ---- pressure

STALLED = "some avg10=1.00 avg60=2.00 avg300=3.00 total={some}\nfull avg10=9.00 avg60=9.00 avg300=9.00 total=999\n"


def test_pressure_is_the_share_of_time_in_which_a_task_waited(machine: Machine, tmp_path: Path) -> None:
    def write(cpu: int, memory: int = 4_000_000, io: int = 4_000_000) -> None:
        (tmp_path / "cpu.pressure").write_text(STALLED.format(some=cpu))
        for name, some in (("cpu", 4_000_000), ("memory", memory), ("io", io)):
            (machine.proc / "pressure" / name).write_text(STALLED.format(some=some))

    (machine.proc / "pressure").mkdir()
    write(7_000_000)
    reader = HostReader(machine.proc, NO_GROUP._replace(pressure={"cpu": tmp_path / "cpu.pressure"}))
    assert not any("pressure" in name for name in reader.read(10.0))
    write(8_000_000, memory=4_250_000, io=9_500_000)
    told = reader.read(15.0)
    assert [told[f"host/{name}_pressure_pct"] for name in ("cpu", "memory", "io")] == [20.0, 5.0, 100.0]
    write(10)  # another group's counter, or a kernel's from its start
    assert "host/cpu_pressure_pct" not in reader.read(20.0)
