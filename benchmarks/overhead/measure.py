"""What monitoring costs the training process, perfagent beside its peers: interleaved rounds, fresh processes, medians.

    PYTHONPATH=benchmarks python benchmarks/overhead/measure.py [--quick] [--workload deep] [--rounds N] [--trackers
    a,b]
        [--write]

--workload: `mlp`, small steps in which every microsecond shows (the default), or `deep`, the steps of a transformer.
--write puts the table into docs/evidence/benchmarks.md, one for each workload. The environments are built once below --folder (a
temporary one by default).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import environments
import psutil
import tables
from adapters import TRACKERS

HERE = Path(__file__).resolve().parent
SECTIONS = {"mlp": "overhead", "deep": "overhead-deep"}
"""Where in docs/evidence/benchmarks.md the table of a workload is."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@contextlib.contextmanager
def live_server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A real `perfagent up` from the project's own environment, with a fresh data folder."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "perfagent", "up", "--port", str(port), "--data", str(folder / "server-data")],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    said = (folder / "server.log").read_text("utf-8")
                    raise SystemExit(f"the server did not start:\n{said[-2000:]}")
                if ready(url):
                    break
                time.sleep(0.1)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def run_child(
    script: str,
    arguments: list[str],
    *,
    environment: Path,
    server: str,
    state: Path,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> dict[str, float] | None:
    """The child's figures; None when it failed, with its last words on stderr. variables: of its environment, besides
    ours."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("PERFAGENT_", "WANDB_", "PYTHONPATH"))
    }
    ours = {"XDG_STATE_HOME": str(state), "PERFAGENT_SERVER": server, "PYTHONPATH": str(HERE)}
    environment_of_child = {**inherited, **ours, **(variables or {})}
    command = [str(environment), str(HERE / script), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment_of_child, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"  {' '.join(arguments)}: not done after {timeout_s:.0f} s", file=sys.stderr)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"  {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()[-800:]}", file=sys.stderr)
        return None
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds: to see that it works, not to quote")
    parser.add_argument("--workload", choices=SECTIONS, default="mlp")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--trackers", default=",".join(TRACKERS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "perfagent-bench")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path, help="keep the figures of every round here")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 5)
    steps = options.steps or (200 if options.quick else 1000 if options.workload == "mlp" else 300)
    wanted = [name.strip() for name in options.trackers.split(",")]
    if unknown := set(wanted) - set(TRACKERS):
        parser.error(f"unknown trackers {sorted(unknown)}; these are: {', '.join(TRACKERS)}")

    environments.build(options.folder, sorted({TRACKERS[name].environment for name in wanted}))
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    timing: list[dict[str, float]] = []
    isolated: list[dict[str, float]] = []
    captured: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-") as scratch, live_server(Path(scratch)) as (url, server):
        servers = {"none": "http://127.0.0.1:9", "live": url, "absent": f"http://127.0.0.1:{free_port()}"}
        server_cpu_s = 0.0
        server_steps = 0
        ours = ["timing", "isolated", "captured"] if options.workload == "mlp" else ["timing"]
        total, done = rounds * (len(wanted) + len(ours)), 0
        for number in range(rounds):
            order = [*wanted, *ours]
            random.Random(number).shuffle(order)
            for name in order:
                done += 1
                print(f"  [{done}/{total}] round {number + 1}: {name}", file=sys.stderr, flush=True)
                state = Path(scratch) / f"state-{done}"
                if name in ours:
                    lean = environments.python(options.folder, "perfagent")
                    result = run_child(
                        f"{name}.py",
                        ["--steps", str(2 * steps)] if name == "timing" else [],
                        # it needs other people's loggers
                        environment=Path(sys.executable) if name == "captured" else lean,
                        server=url,
                        state=state,
                    )
                    {"timing": timing, "isolated": isolated, "captured": captured}[name].extend(
                        [result] if result else []
                    )
                    continue
                before = sum(server.cpu_times()[:2])
                result = run_child(
                    "child.py",
                    ["--tracker", name, "--steps", str(steps), "--workload", options.workload],
                    environment=environments.python(options.folder, TRACKERS[name].environment),
                    server=servers[TRACKERS[name].server],
                    state=state,
                )
                if result:
                    figures[name].append(result)
                if result and name == "perfagent attach + log":
                    server_cpu_s += sum(server.cpu_times()[:2]) - before
                    server_steps += steps
    if options.json:
        kept = {"trackers": figures, "timing": timing, "isolated": isolated, "captured": captured}
        options.json.write_text(json.dumps(kept, indent=1), "utf-8")
    text = report(
        figures, timing, isolated, captured, server_cpu_s / server_steps * 1e6 if server_steps else None, rounds, steps
    )
    print(text)
    if options.write:
        tables.replace(SECTIONS[options.workload], text)
    return 0 if timing and all(figures.values()) else 1


def report(
    figures: dict[str, list[dict[str, float]]],
    timing: list[dict[str, float]],
    isolated: list[dict[str, float]],
    captured: list[dict[str, float]],
    server_us: float | None,
    rounds: int,
    steps: int,
) -> str:
    def middle(rows: list[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    auto_us = middle(timing, "auto_us") if timing else float("nan")
    clock_us = middle(figures["none"], "log_us") if figures.get("none") else 0.0

    def share(results: list[dict[str, float]], own_us: float) -> float:
        """Total CPU in percent of a step. own_us: of the automatic timing."""
        return statistics.median(
            100 * (row["log_mean_us"] - clock_us + row["background_us"] + own_us) / row["step_us"] for row in results
        )

    rows = []
    for name, results in figures.items():
        if not results or name == "none":
            continue
        own_us = auto_us if "attach" in name else 0.0
        log_us = middle(results, "log_us") - clock_us
        columns = [
            name,
            tables.figure(log_us),
            tables.figure(own_us) if own_us else "-",
            tables.figure(middle(results, "background_us")),
            tables.figure(share(results, own_us)),
            tables.figure(middle(results, "setup_thread_s")),
            tables.figure(middle(results, "setup_process_s")),
            tables.figure(middle(results, "rss_mib") + middle(results, "children_rss_mib")),
            f"{middle(results, 'threads'):.0f}",
            f"{middle(results, 'processes'):.0f}",
            tables.figure(middle(results, "finish_s")),
        ]
        rows.append(columns)
    head = [
        "tracker",
        "log call, 10 scalars: CPU µs",
        "automatic timing: CPU µs per step",
        "background CPU µs per step",
        "total CPU %",
        "import + init: CPU s, calling thread",
        "import + init: CPU s, whole process",
        "memory MiB",
        "threads",
        "processes",
        "finish s",
    ]
    every = [row["step_us"] for results in figures.values() for row in results]
    attached = figures.get("perfagent attach + log")
    lines = [
        f"{tables.machine('torch')}. Medians of {rounds} interleaved rounds, {steps} steps each; "
        f"a step takes {statistics.median(every) / 1000:.1f} ms of CPU. trackio 0.43.0, tensorboard 2.21.0, wandb 0.31.0.",
        "",
        tables.table(head, rows),
        "",
        f"The clocks of the benchmark cost {clock_us:.1f} µs per call, which is taken off the log call and the total.",
    ]
    if isolated:
        places = ("forward", "backward", "optimizer", "data")
        lines += [
            "",
            f"Automatic timing, each hook round a body that does nothing: {middle(isolated, 'sum_us'):.1f} µs per step ("
            + ", ".join(f"{place} {middle(isolated, f'{place}_us'):.1f}" for place in places)
            + "); a bare clock read with an append at the same places: "
            + ", ".join(f"{place} {middle(isolated, f'{place}_stamp_us'):.1f}" for place in places[:3])
            + ".",
        ]
    if isolated and attached:
        total = share(attached, middle(isolated, "sum_us"))
        lines[-1] += f" Counted with these figures for the hooks, the total of attach + log is {total:.2f} %."
    if captured:
        lines += [
            "",
            "A call of another logger costs more because its scalars appear in the run: "
            f"`SummaryWriter.add_scalar` {middle(captured, 'add_scalar_us'):.1f} µs (of a "
            f"tensor {middle(captured, 'add_scalar_tensor_us'):.1f}), the Trainer's log of 4 scalars "
            f"{middle(captured, 'trainer_us'):.1f}.",
        ]
    if timing and isolated:
        floor, hooks = middle(timing, "floor_us"), middle(timing, "hooks_us")
        lines += [
            "",
            f"In a loop, with the caches as a training step leaves them: {hooks:.1f} µs per step around an empty step (lower "
            f"decile {middle(timing, 'hooks_low_us'):.1f}), {middle(timing, 'loader_us'):.1f} with a DataLoader, "
            f"{middle(timing, 'auto_us'):.1f} in a small real step. Bare clock reads at the same places cost {floor:.1f} µs in "
            f"the same processes (lower decile {middle(timing, 'floor_low_us'):.1f}): {hooks / floor:.2f} times that.",
        ]
    if server_us is not None:
        lines.append(
            f"perfagent's server is a process of its own (usually on another machine): {server_us:.0f} µs CPU per step here."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
