"""Control groups of both versions, as folders of our own making: which limits hold, and what they say."""

from __future__ import annotations

import os
from pathlib import Path

from perfagent.samplers import cgroup
from perfagent.samplers.cgroup import ControlGroup, GroupReader


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def found(folder: Path, line: str) -> ControlGroup:
    """The group of a process of which the kernel says this."""
    write(folder / "proc" / "self", cgroup=line)
    group = cgroup.find(root=folder / "groups", proc=folder / "proc")
    assert group is not None
    return group


def figures(group: ControlGroup) -> tuple[int | None, int | None, int | None, float | None]:
    return group.limit_bytes, group.used_bytes(), group.oom_kills(), group.cores


def test_a_group_of_version_2_has_the_limits_further_up(tmp_path: Path) -> None:
    root, line = tmp_path / "groups", "0::/job/step\n"
    write(root, cgroup__controllers="cpu memory\n")
    job, step = root / "job", root / "job" / "step"
    write(job, memory__max="8192\n", memory__pressure="", io__pressure="")
    write(step, memory__max="max\n", memory__current="100\n", memory__events="low 0\noom 2\noom_kill 1\n")
    write(step, cpu__max="150000 100000\n", cpu__pressure="", memory__pressure="")
    group = found(tmp_path, line)
    assert figures(group) == (8192, 100, 1, 1.5)
    pressure = {"cpu": step / "cpu.pressure", "memory": job / "memory.pressure", "io": job / "io.pressure"}
    assert group.pressure == pressure, "of the groups whose limits hold"
    assert cgroup.find(root=root, proc=tmp_path / "nothing") is None
    assert cgroup.find(os.getpid()) is None or isinstance(cgroup.find(os.getpid()), ControlGroup)


def test_a_group_of_version_1_has_files_of_each_controller(tmp_path: Path) -> None:
    job = tmp_path / "groups" / "memory" / "job"
    write(
        job, memory__limit_in_bytes="4096\n", memory__usage_in_bytes="300\n", memory__stat="total_inactive_file 100\n"
    )
    write(job, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    cpu = tmp_path / "groups" / "cpu" / "job"
    write(cpu, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n", cpu__stat="nr_periods 10\nnr_throttled 2\n")
    assert figures(found(tmp_path, "5:memory:/job\n3:cpu,cpuacct:/job\n")) == (4096, 200, 3, None)


def test_limit_of_a_parent_group_counts_what_the_group_uses(tmp_path: Path) -> None:
    root, line = tmp_path / "groups", "0::/slurmstepd.scope/job_42/step_0/user/task_0\n"
    write(root, cgroup__controllers="memory cpu\n")
    write(root / "slurmstepd.scope", memory__max="max\n", memory__current="9000\n", cpu__max="max 100000\n")
    job = root / "slurmstepd.scope" / "job_42"
    write(job, memory__max="6400\n", memory__current="6000\n", memory__stat="anon 1\ninactive_file 500\n")
    write(job, memory__events="oom_kill 2\n", cpu__max="800000 100000\n", cpu__stat="nr_periods 10\nnr_throttled 5\n")
    write(job / "step_0", memory__max="6400\n", memory__current="5900\n", cpu__max="1600000 100000\n")
    task = job / "step_0" / "user" / "task_0"
    write(task, memory__max="max\n", memory__current="3000\n", memory__stat="inactive_file 100\n")
    write(task, memory__events="oom_kill 1\n", cpu__max="max 100000\n", cpu__stat="nr_periods 0\nnr_throttled 0\n")
    limited = found(tmp_path, line)
    assert figures(limited) == (6400, 5500, 2, 8.0)
    assert limited.cpu == job / "cpu.stat"
    for folder in (job, job / "step_0"):
        write(folder, memory__max="max\n")
    assert figures(found(tmp_path, line))[:2] == (None, 2900)


def test_a_group_tells_kills_and_throttling_since_we_looked(tmp_path: Path) -> None:
    def read(kills: int, periods: int, throttled: int) -> dict[str, float]:
        values: dict[str, float] = {}
        write(tmp_path, events=f"low 0\nhigh 0\nmax 3\noom 1\noom_kill {kills}\n")
        write(tmp_path, cpu__stat=f"usage_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 5\n")
        reader.events(values)
        return values

    stat = tmp_path / "cpu.stat"
    reader = GroupReader(ControlGroup(None, None, None, events=tmp_path / "events", cores=1.5, cpu=stat))
    assert read(4, 100, 10) == {"host/oom_kills": 0}
    assert read(6, 200, 35) == {"host/oom_kills": 2, "host/cpu_throttled_pct": 25.0}
