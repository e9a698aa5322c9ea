from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from builders import until

from perfagent.samplers import cgroup
from perfagent.samplers.cgroup import ControlGroup, GroupReader
from perfagent.samplers.host import HostReader
from perfagent.samplers.kernel_file import KernelFile
from perfagent.wire import CATALOGUE

STAT = "cpu  {user} 0 0 {idle} {waiting} 0 0 0 0 0\ncpu0 1 1 1 1\n"
MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    6000000 kB\n"
DISKS = (
    "   8       0 sda 10 0 {read} 0 10 0 {written} 0 0 0 0\n   8       1 sda1 10 0 9999 0 10 0 9999 0 0 0 0\n"
    "   7       0 loop0 1 0 9999 0 0 0 9999 0 0 0 0\n 259       0 nvme0n1 1 0 {read} 0 0 0 {written} 0 0 {busy} 0\n"
)
LINKS = (
    "Inter-|   Receive\n face |bytes\n    lo: 999 0 0 0 0 0 0 0 999 0\n  eth0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
    "eth0.100: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n   br0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
    "   wg0: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
)


class Machine:
    """A /proc of our own making."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        (self.proc / "net").mkdir(parents=True)
        self.write(user=0, idle=0, read=0, written=0, received=0, sent=0)

    def write(
        self,
        *,
        user: int,
        idle: int,
        read: int,
        written: int,
        received: int,
        sent: int,
        waiting: int = 0,
        busy: int = 0,
    ) -> None:
        (self.proc / "stat").write_text(STAT.format(user=user, idle=idle, waiting=waiting))
        (self.proc / "meminfo").write_text(MEMINFO)
        (self.proc / "diskstats").write_text(DISKS.format(read=read, written=written, busy=busy))
        (self.proc / "net" / "dev").write_text(LINKS.format(received=received, sent=sent))


NO_GROUP = ControlGroup(usage=None, limit_bytes=None, inactive=None, events=None, cores=None)


def test_rates_need_two_readings_and_count_whole_disks_and_real_links_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    reader = HostReader(machine.proc, NO_GROUP)
    first = reader.read(10.0)
    assert not any(name.endswith("_per_s") or name == "host/cpu_pct" for name in first)
    machine.write(user=75, idle=25, read=100, written=50, received=3000, sent=1000)
    second = reader.read(12.0)
    assert second["host/cpu_pct"] == 75.0
    assert second["host/disk_read_bytes_per_s"] == 2 * 100 * 512 / 2.0
    assert second["host/disk_write_bytes_per_s"] == 2 * 50 * 512 / 2.0
    assert second["host/net_received_bytes_per_s"] == 1500.0
    assert second["host/net_sent_bytes_per_s"] == 500.0
    assert second["host/memory_used_bytes"] == 10_000_000 * 1024


def test_bytes_that_two_interfaces_count_are_told_once(tmp_path: Path) -> None:
    """On Azure a virtual function carries what eth0 above it counts, too; a bridge may bear any name."""
    machine = Machine(tmp_path)
    for name, above in (("enP1s1", "eth0"), ("eno1", "vmbr0"), ("eno2", "bond0"), ("eth0", ""), ("vmbr0", "")):
        (tmp_path / "net" / name).mkdir(parents=True)
        if above:
            (tmp_path / "net" / name / "master").symlink_to(f"../{above}")
    reader = HostReader(machine.proc, NO_GROUP, interfaces=tmp_path / "net")
    for now in (10.0, 12.0):
        counted = int(1000 * (now - 10.0))
        lines = [
            f"{name}: {counted} 0 0 0 0 0 0 0 {counted}\n"
            for name in ("eth0", "enP1s1", "vmbr0", "eno1", "bond0", "eno2")
        ]
        (machine.proc / "net" / "dev").write_text("".join(lines))
        told = reader.read(now)
    assert told["host/net_received_bytes_per_s"] == told["host/net_sent_bytes_per_s"] == 3 * 1000.0


def test_waiting_for_a_disk_is_not_work_and_the_busiest_disk_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    reader = HostReader(machine.proc, NO_GROUP)
    reader.read(10.0)
    machine.write(user=50, idle=20, waiting=30, busy=1500, read=1, written=1, received=1, sent=1)
    told = reader.read(12.0)
    assert (told["host/cpu_pct"], told["host/iowait_pct"], told["host/disk_busy_pct"]) == (50.0, 30.0, 75.0)


def test_a_list_of_the_kernel_is_read_to_its_end_though_a_read_gives_a_page() -> None:
    """A host of many disks, loop devices or virtual interfaces has more lines in /proc than a page holds."""
    mappings = Path("/proc/self/maps")
    read = KernelFile(mappings, 2**20)
    for _ in range(2):
        there = mappings.read_bytes()
        assert len(there) > os.sysconf("SC_PAGE_SIZE")
        assert (read.read() or b"").splitlines()[-1] == there.splitlines()[-1]
    assert len(KernelFile(mappings, 8000).read() or b"") <= 8000


def test_what_is_dear_on_this_host_is_read_rarely(tmp_path: Path) -> None:
    spent = [0.0]
    machine = Machine(tmp_path)
    reader = HostReader(machine.proc, NO_GROUP, cost=lambda: spent[0])
    original = reader._parts[0].read

    def dear(values: dict[str, float], now: float) -> None:
        spent[0] += 0.0005  # /proc/stat of 256 cores
        original(values, now)

    reader._parts[0].read = dear
    told = 0
    for second in range(20):
        machine.write(user=75 * second, idle=25 * second, read=0, written=0, received=0, sent=0)
        told += "host/cpu_pct" in reader.read(float(second))
    assert told == 4  # at 1, 6, 11 and 16 s: half a millisecond every five seconds


def test_one_dear_reading_changes_nothing_and_memory_is_read_whatever_it_costs(tmp_path: Path) -> None:
    spent = [0.0]
    machine = Machine(tmp_path)
    reader = HostReader(machine.proc, NO_GROUP, cost=lambda: spent[0])
    memory, load, cold = reader._parts[1].read, reader._parts[4].read, [1.0, 0.0]

    def always_dear(values: dict[str, float], now: float) -> None:
        spent[0] += 1.0
        memory(values, now)

    def first_cold(values: dict[str, float], now: float) -> None:
        spent[0] += cold.pop(0)
        load(values, now)

    reader._parts[1].read, reader._parts[4].read = always_dear, first_cold
    rows = [reader.read(float(second)) for second in range(10)]
    assert sum("host/load1" in row for row in rows) == 2
    assert sum("host/memory_used_bytes" in row for row in rows) == 10


def test_memory_is_tight_when_it_will_be_used_up_soon(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    reader = HostReader(machine.proc, NO_GROUP)

    def tight(now: float, used_kb: int) -> bool:
        (machine.proc / "meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {1000 - used_kb} kB\n")
        reader.memory(now)
        return reader.tight

    assert [tight(now, used) for now, used in ((0.0, 700), (1.0, 710), (2.0, 500), (3.0, 660), (4.0, 840))] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert [tight(now, used) for now, used in ((5.0, 500), (6.0, 700), (6.2, 740), (6.4, 745))] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.fault
def test_a18_counters_that_go_back_leave_a_gap_and_never_a_negative_rate(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    reader = HostReader(machine.proc, NO_GROUP)
    machine.write(user=50, idle=50, read=1000, written=1000, received=1000, sent=1000)
    reader.read(10.0)
    machine.write(user=40, idle=40, read=10, written=10, received=10, sent=10)
    found = reader.read(11.0)
    assert not any(name.endswith("_per_s") or name == "host/cpu_pct" for name in found)
    assert all(value >= 0 for value in reader.read(5.0).values())


def test_in_a_limited_group_the_limit_is_the_memory_there_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "usage").write_text("3000\n")
    (tmp_path / "stat").write_text("anon 1\ninactive_file 700\nactive_file 300\n")
    group = ControlGroup(
        usage=tmp_path / "usage", limit_bytes=4000, inactive=tmp_path / "stat", events=None, cores=None
    )
    found = HostReader(machine.proc, group).read(1.0)
    assert (found["host/memory_total_bytes"], found["host/memory_used_bytes"]) == (4000, 2000)


def test_what_cannot_be_read_is_absent_and_never_zero(tmp_path: Path) -> None:
    found = HostReader(tmp_path / "nothing", NO_GROUP).read(1.0)
    assert set(found) <= {"host/load1", "host/cores"}


def test_the_real_host_agrees_with_psutil() -> None:
    found = HostReader(group=NO_GROUP).read(1.0)
    memory = psutil.virtual_memory()
    assert found["host/memory_total_bytes"] == memory.total
    assert abs(found["host/memory_used_bytes"] - (memory.total - memory.available)) < 0.05 * memory.total


def test_the_groups_of_both_versions_are_understood(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "two"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    folder = root / "job" / "step"
    folder.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory\n")
    (folder / "memory.max").write_text("max\n")
    (folder.parent / "memory.max").write_text("8192\n")
    (folder / "memory.current").write_text("100\n")
    (folder / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (folder / "cpu.max").write_text("150000 100000\n")
    two = cgroup.find(root=root, proc=proc)
    assert two is not None
    assert (two.limit_bytes, two.used_bytes(), two.oom_kills(), two.cores) == (8192, 100, 1, 1.5)

    (proc / "self" / "cgroup").write_text("5:memory:/job\n3:cpu,cpuacct:/job\n")
    one_root = tmp_path / "one"
    (one_root / "memory" / "job").mkdir(parents=True)
    (one_root / "cpu" / "job").mkdir(parents=True)
    (one_root / "memory" / "job" / "memory.limit_in_bytes").write_text("4096\n")
    (one_root / "memory" / "job" / "memory.usage_in_bytes").write_text("300\n")
    (one_root / "memory" / "job" / "memory.stat").write_text("total_inactive_file 100\n")
    (one_root / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (one_root / "cpu" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (one_root / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    (one_root / "cpu" / "job" / "cpu.stat").write_text("nr_periods 10\nnr_throttled 2\nthrottled_time 99\n")
    one = cgroup.find(root=one_root, proc=proc)
    assert one is not None
    assert (one.limit_bytes, one.used_bytes(), one.oom_kills(), one.cores) == (4096, 200, 3, None)
    assert cgroup.find(root=one_root, proc=tmp_path / "nothing") is None
    assert cgroup.find(os.getpid()) is None or isinstance(cgroup.find(os.getpid()), ControlGroup)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_limit_further_up_is_compared_with_what_that_group_uses(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "two"
    write(proc / "self", cgroup="0::/slurmstepd.scope/job_42/step_0/user/task_0\n")
    write(root, cgroup__controllers="memory cpu\n")
    write(root / "slurmstepd.scope", memory__max="max\n", memory__current="9000\n", cpu__max="max 100000\n")
    job = root / "slurmstepd.scope" / "job_42"
    write(job, memory__max="6400\n", memory__current="6000\n", memory__stat="anon 1\ninactive_file 500\n")
    write(job, memory__events="oom_kill 2\n", cpu__max="800000 100000\n", cpu__stat="nr_periods 10\nnr_throttled 5\n")
    write(job / "step_0", memory__max="6400\n", memory__current="5900\n", cpu__max="1600000 100000\n")
    task = job / "step_0" / "user" / "task_0"
    write(
        task,
        memory__max="max\n",
        memory__current="3000\n",
        memory__stat="inactive_file 100\n",
        memory__events="oom_kill 1\n",
    )
    write(task, cpu__max="max 100000\n", cpu__stat="nr_periods 0\nnr_throttled 0\n")
    found = cgroup.find(root=root, proc=proc)
    assert found is not None
    assert (found.limit_bytes, found.used_bytes(), found.oom_kills(), found.cores) == (6400, 5500, 2, 8.0)
    assert found.cpu == job / "cpu.stat"
    (job / "memory.max").write_text("max\n")
    (job / "step_0" / "memory.max").write_text("max\n")
    unlimited = cgroup.find(root=root, proc=proc)
    assert unlimited is not None
    assert (unlimited.limit_bytes, unlimited.used_bytes()) == (None, 2900)


def test_a_limit_further_up_in_version_1_is_told_with_the_groups_own_kills(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "one"
    write(proc / "self", cgroup="5:memory:/slurm/job_42/task_0\n3:cpu,cpuacct:/slurm/job_42/task_0\n")
    job = root / "memory" / "slurm" / "job_42"
    write(job, memory__limit_in_bytes="6400\n", memory__usage_in_bytes="6000\n", memory__oom_control="oom_kill 0\n")
    write(job, memory__stat="inactive_file 0\ntotal_inactive_file 500\n")
    write(job / "task_0", memory__limit_in_bytes=f"{2**63 - 4096}\n", memory__usage_in_bytes="3000\n")
    write(job / "task_0", memory__oom_control="oom_kill 3\n", memory__stat="inactive_file 0\ntotal_inactive_file 0\n")
    cpu = root / "cpu" / "slurm" / "job_42"
    write(cpu, cpu__cfs_quota_us="800000\n", cpu__cfs_period_us="100000\n", cpu__stat="nr_periods 10\n")
    write(cpu / "task_0", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n", cpu__stat="nr_periods 0\n")
    found = cgroup.find(root=root, proc=proc)
    assert found is not None
    assert (found.limit_bytes, found.used_bytes(), found.oom_kills(), found.cores) == (6400, 5500, 3, 8.0)
    assert found.cpu == cpu / "cpu.stat"


def test_a_quota_in_version_1_is_told_where_memory_is_not_limited_by_groups(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "one"
    write(proc / "self", cgroup="3:cpu,cpuacct:/job\n1:name=systemd:/job\n")
    write(
        root / "cpu" / "job", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n", cpu__stat="nr_periods 10\n"
    )
    found = cgroup.find(root=root, proc=proc)
    assert found is not None
    assert (found.limit_bytes, found.used_bytes(), found.oom_kills(), found.cores) == (None, None, None, 1.5)
    assert found.cpu == root / "cpu" / "job" / "cpu.stat"


def test_a_group_tells_kills_since_we_looked_and_how_often_its_quota_was_used_up(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 4\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1\nnr_periods 100\nnr_throttled 10\nthrottled_usec 5\n")
    group = ControlGroup(
        usage=None, limit_bytes=None, inactive=None, events=tmp_path / "events", cores=1.5, cpu=tmp_path / "cpu.stat"
    )
    reader = GroupReader(group)
    first: dict[str, float] = {}
    reader.events(first, 1.0)
    assert first == {"host/oom_kills": 0}
    (tmp_path / "events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 6\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1\nnr_periods 200\nnr_throttled 35\nthrottled_usec 5\n")
    second: dict[str, float] = {}
    reader.events(second, 6.0)
    assert second == {"host/oom_kills": 2, "host/cpu_throttled_pct": 25.0}


STALLED = "some avg10=1.00 avg60=2.00 avg300=3.00 total={some}\nfull avg10=9.00 avg60=9.00 avg300=9.00 total=999\n"


def test_pressure_is_the_share_of_the_time_in_which_some_task_waited(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.proc / "pressure").mkdir()
    (tmp_path / "cpu.pressure").write_text(STALLED.format(some=7_000_000))
    for name in ("cpu", "memory", "io"):
        (machine.proc / "pressure" / name).write_text(STALLED.format(some=4_000_000))
    reader = HostReader(machine.proc, NO_GROUP._replace(pressure={"cpu": tmp_path / "cpu.pressure"}))
    assert not any("pressure" in name for name in reader.read(10.0))
    (tmp_path / "cpu.pressure").write_text(STALLED.format(some=8_000_000))
    (machine.proc / "pressure" / "memory").write_text(STALLED.format(some=4_250_000))
    (machine.proc / "pressure" / "io").write_text(STALLED.format(some=9_500_000))
    told = reader.read(15.0)
    assert (told["host/cpu_pressure_pct"], told["host/memory_pressure_pct"], told["host/io_pressure_pct"]) == (
        20.0,
        5.0,
        100.0,
    )
    (tmp_path / "cpu.pressure").write_text(STALLED.format(some=10))
    assert "host/cpu_pressure_pct" not in reader.read(20.0)  # another group's counter, or a kernel's from its start


def test_pressure_is_read_of_the_groups_whose_limits_hold(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "two"
    write(proc / "self", cgroup="0::/job/task\n")
    write(root, cgroup__controllers="memory cpu\n", io__pressure="")
    write(root / "job", cpu__max="200000 100000\n", cpu__pressure="", memory__pressure="", io__pressure="")
    write(root / "job" / "task", memory__max="4096\n", cpu__pressure="", memory__pressure="", io__pressure="")
    found = cgroup.find(root=root, proc=proc)
    assert found is not None
    job, task = root / "job", root / "job" / "task"
    assert found.pressure == {
        "cpu": job / "cpu.pressure",
        "memory": task / "memory.pressure",
        "io": task / "io.pressure",
    }

    one = tmp_path / "one"
    write(proc / "self", cgroup="5:memory:/job\n3:cpu,cpuacct:/job\n0::/job\n")
    write(one / "memory" / "job", memory__usage_in_bytes="3000\n")
    plain = cgroup.find(root=one, proc=proc)
    assert plain is not None
    assert plain.pressure == {}
    write(one / "unified" / "job", cpu__pressure="", memory__pressure="", io__pressure="")
    beside = cgroup.find(root=one, proc=proc)
    assert beside is not None
    assert beside.pressure == {name: one / "unified" / "job" / f"{name}.pressure" for name in ("cpu", "memory", "io")}


@pytest.mark.skipif(not Path("/proc/pressure/cpu").exists(), reason="a kernel without pressure stall information")
def test_pressure_is_what_this_kernel_has_counted() -> None:
    def stalled_s() -> float:
        return 1e-6 * int(Path("/proc/pressure/cpu").read_text().split()[4].removeprefix("total="))

    reader, found = HostReader(group=NO_GROUP), dict[str, float]()
    before_first = stalled_s()
    reader._pressure.read(found, 0.0)
    after_first = stalled_s()
    assert found == {}
    until(lambda: stalled_s() > after_first or None)  # somebody waits for a processor now and then, on any machine
    before_second = stalled_s()
    reader._pressure.read(found, 1000.0)
    after_second = stalled_s()
    told_s = found["host/cpu_pressure_pct"] * 1000.0 / 100.0
    assert before_second - after_first - 1e-5 <= told_s <= after_second - before_first + 1e-5
    assert {"host/memory_pressure_pct", "host/io_pressure_pct"} <= set(found)


def test_the_reclaimable_cache_is_looked_at_anew_when_memory_is_short(tmp_path: Path) -> None:
    usage, stat = tmp_path / "usage", tmp_path / "stat"
    usage.write_text("3000\n")
    stat.write_text("anon 1\ninactive_file 1000\ntotal_inactive_file 1200\n")
    reader = GroupReader(ControlGroup(usage=usage, limit_bytes=10_000, inactive=stat, events=None, cores=None))
    assert reader.used_bytes(1.0) == 1800
    usage.write_text("5000\n")
    stat.write_text("anon 1\ninactive_file 1000\ntotal_inactive_file 2500\n")
    assert reader.used_bytes(2.0) == 3800  # the cache's size is five seconds old at most
    assert reader.used_bytes(7.0) == 2500
    usage.write_text("9900\n")
    stat.write_text("anon 1\ninactive_file 1000\ntotal_inactive_file 7000\n")
    assert reader.used_bytes(7.2) == 2900


@pytest.mark.fault
def test_a22_what_may_not_be_read_is_absent(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").mkdir()  # a read of it fails, as one that the kernel refuses does
    assert set(HostReader(tmp_path / "proc", NO_GROUP).read(1.0)) <= {"host/load1", "host/cores"}


def test_every_name_is_in_the_catalogue() -> None:
    reader = HostReader()
    names = set(reader.read(0.0)) | set(reader.read(10.0))
    now = iter(range(20, 10_000, 10))
    # the kernel's next tick
    names |= until(lambda: (told := set(reader.read(float(next(now))))) & {"host/cpu_pct"} and told)
    assert names - CATALOGUE.keys() == set()
