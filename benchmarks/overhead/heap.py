"""What `attach` does to the memory of a training step on the CPU: page faults, CPU time, and the peak of the process.

    PYTHONPATH=benchmarks python benchmarks/overhead/heap.py [--quick] [--processes N] [--workloads mlp,deep]
        [--sides "bare;attached"] [--write]

A step allocates and frees memory. glibc may return the freed memory to the kernel. The next step must then get that
memory again, at the cost of one page fault for every 4 KiB. Whether glibc returns the memory depends on the other
objects on the heap, so processes of the same script differ. Therefore each side runs in many fresh processes, and the
sides take turns. Sides: `bare` (no agent), `attached`, and `attached, PERFAGENT_MALLOC=0`, which leaves glibc's
thresholds as they are.

Measured around each step, on the training thread: CPU time by `thread_time_ns` and minor page faults by
`RUSAGE_THREAD`. The CPU time of a process is the lower decile of its steps: the quiet moments of a shared machine. Its
page faults are exact counts, as a mean over its steps. The figures are medians over processes. The exit status is 1 if
`attached` misses one of the three limits.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

BARE, ATTACHED, UNTUNED = "bare", "attached", "attached, PERFAGENT_MALLOC=0"
SIDES = (BARE, ATTACHED, UNTUNED)
STEPS = {"mlp": 300, "deep": 50, "transformer": 40}
WARM_UP, SETTLE_S = 10, 2.0
"""Steps before and after `attach` that are not counted, and how long the agent's threads get to come up."""
MOST_FAULTS_RATIO, MOST_FAULTS_MORE, MOST_CPU_RATIO, MOST_PEAK_MORE_MIB = 1.15, 50, 1.02, 12


def child(side: str, workload_name: str, steps: int) -> None:
    """The figures of one process."""
    from workloads import make

    workload = make(workload_name)
    for _ in range(WARM_UP):
        workload.step()
    if side != BARE:
        import perfagent

        perfagent.attach(workload.model, workload.optimizer, project="bench")
    time.sleep(SETTLE_S)  # on both sides
    for _ in range(WARM_UP):
        workload.step()
    cpu_ns: list[int] = []
    faults = 0
    for _ in range(steps):
        faults_before, begin = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt, time.thread_time_ns()
        float(workload.step().detach())
        cpu_ns.append(time.thread_time_ns() - begin)
        faults += resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults_before
    result = {
        "faults": faults / steps,
        "cpu_ms": sorted(cpu_ns)[len(cpu_ns) // 10] / 1e6,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two short processes a side: to see that it works, not to quote"
    )
    parser.add_argument("--processes", type=int, help="on each side; 12 by default")
    parser.add_argument("--workloads", default=",".join(STEPS))
    parser.add_argument("--sides", default=";".join(SIDES), help="some of them, with ; between")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "perfagent-bench")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--json", type=Path, help="keep the figures of every process here, also of a run that is interrupted"
    )
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [name.strip() for name in options.workloads.split(",")]
    if unknown := set(wanted) - set(STEPS):
        parser.error(f"unknown workloads {sorted(unknown)}; these are: {', '.join(STEPS)}")
    if options.child:
        child(options.child, wanted[0], options.steps)
    sides = [side.strip() for side in options.sides.split(";")]
    if not {BARE, ATTACHED} <= set(sides) <= set(SIDES):
        parser.error(f"--sides must hold {BARE} and {ATTACHED}; these are all: {'; '.join(SIDES)}")
    processes = options.processes or (2 if options.quick else 12)
    figures = measured(wanted, sides, processes, options.folder, quick=options.quick, keep=options.json)
    text, misses = report(figures), missed(figures)
    print(text)
    for miss in misses:
        print(f"missed: {miss}", file=sys.stderr)
    if options.write:
        import tables

        tables.replace("heap", text)
    return 1 if misses else 0


Figures = dict[str, dict[str, list[dict[str, float]]]]
"""workload -> side -> the figures of each process."""


def measured(
    wanted: list[str], sides: list[str], processes: int, folder: Path, *, quick: bool, keep: Path | None = None
) -> Figures:
    """Sides in turn, each beginning as often as the others. keep: a file for the figures so far, written after every
    round."""
    import environments
    from measure import live_server, run_child

    environments.build(folder, ["perfagent"])
    figures: Figures = {name: {side: [] for side in sides} for name in wanted}
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as scratch, live_server(Path(scratch)) as (url, _):
        for name in wanted:
            for number in range(processes):
                print(f"  {name}: processes {number + 1} of {processes}", file=sys.stderr, flush=True)
                for turn in range(len(sides)):
                    side = sides[(number + turn) % len(sides)]
                    result = run_child(
                        "heap.py",
                        ["--child", side, "--workloads", name, "--steps", str(30 if quick else STEPS[name])],
                        environment=environments.python(folder, "perfagent"),
                        server=url,
                        state=Path(scratch) / f"state-{name}-{number}-{turn}",
                        variables={"PERFAGENT_MALLOC": "0"} if side == UNTUNED else {},
                    )
                    figures[name][side] += [result] if result else []
                if keep is not None:
                    keep.write_text(json.dumps(figures, indent=1), "utf-8")
    return figures


def middle(results: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in results)


def missed(figures: Figures) -> list[str]:
    """The limits that `attached` does not keep, in words."""
    misses = []
    for name, sides in figures.items():
        if not all(sides.values()):
            misses.append(f"{name}: a process failed")
            continue
        bare, attached = (
            {key: middle(sides[side], key) for key in ("faults", "cpu_ms", "peak_mib")} for side in (BARE, ATTACHED)
        )
        if attached["faults"] > MOST_FAULTS_RATIO * bare["faults"] + MOST_FAULTS_MORE:
            misses.append(f"{name}: {attached['faults']:.0f} faults a step, bare {bare['faults']:.0f}")
        if attached["cpu_ms"] > MOST_CPU_RATIO * bare["cpu_ms"]:
            misses.append(f"{name}: {attached['cpu_ms']:.2f} ms of CPU a step, bare {bare['cpu_ms']:.2f}")
        if attached["peak_mib"] > bare["peak_mib"] + MOST_PEAK_MORE_MIB:
            misses.append(f"{name}: peak of {attached['peak_mib']:.0f} MiB, bare {bare['peak_mib']:.0f}")
    return misses


def report(figures: Figures) -> str:
    import tables

    rows = []
    for name, sides in figures.items():
        for side, results in sides.items():
            if not results or not sides[BARE]:
                continue
            faults = sorted(row["faults"] for row in results)
            rows.append(
                [
                    name,
                    side,
                    str(len(results)),
                    f"{middle(results, 'faults'):.0f} ({faults[0]:.0f} to {faults[-1]:.0f})",
                    tables.figure(middle(results, "cpu_ms")),
                    f"{middle(results, 'cpu_ms') / middle(sides[BARE], 'cpu_ms'):.3f}",
                    f"{middle(results, 'peak_mib'):.0f}",
                ]
            )
    figures_of_a_side = [
        "page faults per step (least to most)",
        "CPU ms per step",
        "to bare",
        "peak MiB of the process",
    ]
    head = ["workload", "side", "processes", *figures_of_a_side]
    library, version = os.confstr("CS_GNU_LIBC_VERSION").split() if hasattr(os, "confstr") else ("", "")
    return "\n".join(
        [
            f"{tables.machine('torch')}, {library} {version}, one torch thread. Medians over processes, in turn.",
            "",
            tables.table(head, rows),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
