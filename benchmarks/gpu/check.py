"""Checks the agent on a machine with an NVIDIA GPU. scripts/gpu_check starts it; docs/evidence/gpu.md says what for.

    check.py [--out FOLDER] [--only NAME ...] [--docs PAGE]     on a machine with a GPU
    check.py --dry-run-cpu [--out FOLDER]                       whether the checks themselves work; says nothing about a GPU
    check.py --join FOLDER FOLDER ... [--docs PAGE]             anywhere: the results of several calls with --only, as one

Each group of checks runs in a process of its own, so that one that fails or hangs does not take the others along.
Nothing is sent: every training records into FOLDER/recorded, which `perfagent sync` uploads later, from wherever there
is a server.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import Result, save, table
from stage import Stage

GROUPS = {  # module: what it checks, and the seconds that it may take
    "synchronization": ("no waits, the same losses", 600),
    "overhead": ("what a step costs more", 900),
    "timing": ("event timing beside the profiler", 600),
    "utilization": ("MFU", 600),
    "figures": ("NVML and GPM beside nvidia-smi", 300),
    "memory": ("running out of memory", 400),
    "estimates": ("memory of a training step beside its estimate", 300),
    "situations": ("a stall, CUDA graphs, a GradScaler, a NaN, NCCL", 900),
    "compute": ("attention kernels, packed attention, activations computed again", 300),
    "diagnosis": ("jobs that are ill, judged by the rules", 700),
}

DRY = "CPU (dry run)"
TIMED = ("overhead", "timing")  # times on a busy CPU are no reason to fail: a dry run only shows them


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check-results"), help="folder for results and recordings")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="NAME", help=f"of {', '.join(GROUPS)}")
    parser.add_argument(
        "--docs", type=Path, help="page that gets the section, under its device and date (docs/evidence/gpu.md)"
    )
    parser.add_argument(
        "--join", nargs="+", type=Path, metavar="FOLDER", help="results to put together, all of one machine"
    )
    parser.add_argument(
        "--dry-run-cpu", action="store_true", help="run the checks' own code on a CPU, with a tiny model"
    )
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stage = Stage(options.out.resolve(), options.dry_run_cpu)
    if options.group:
        return _one(options.group, stage)
    if options.machine:
        sys.stdout.write(json.dumps(_machine(stage)) + "\n")
        return 0
    if options.join:
        parts = [json.loads((folder / "results.json").read_text("utf-8")) for folder in options.join]
        if (
            len({(part["machine"]["device"], part["machine"]["torch"], part["machine"]["commit"]) for part in parts})
            > 1
        ):
            parser.error("these are of several machines, or of several versions")
        return _told(
            stage, parts[0]["machine"], [Result(**one) for part in parts for one in part["results"]], options.docs
        )
    reason = "" if stage.dry else _no_gpu()
    if reason:
        sys.stderr.write(f"gpu_check: {reason}; nothing was checked\n")
        return 2
    if (
        stage.out.exists()
        and any(stage.out.iterdir())
        and not any((stage.out / f"{name}.log").exists() for name in GROUPS)
    ):
        parser.error(
            f"{stage.out} holds something else than results of this check; name another folder, or an empty one"
        )
    shutil.rmtree(stage.out, ignore_errors=True)
    stage.out.mkdir(parents=True, exist_ok=True)
    machine = _told_by_another_process(stage)
    results: list[Result] = []
    for name in options.only or GROUPS:
        sys.stderr.write(f"{name}: {GROUPS[name][0]} ...\n")
        results += _in_its_own_process(name, stage)
        save(stage.out, machine, results)  # each time: a machine that is lent may be taken away in the midst of it
    return _told(stage, machine, results, options.docs)


def _told(stage: Stage, machine: dict[str, Any], results: list[Result], docs: Path | None) -> int:
    """Written and shown. The answer is the exit code."""
    stage.out.mkdir(parents=True, exist_ok=True)
    save(stage.out, machine, results)
    dry = machine["device"] == DRY
    if dry:
        sys.stdout.write("A dry run on a CPU: it shows that the checks run, and nothing about a GPU.\n")
    sys.stdout.write(f"{machine['words']}\n\n{table(results)}\n\n{stage.out / 'results.json'}, section.md, recorded/\n")
    if docs is not None and not dry:
        put(docs, (stage.out / "section.md").read_text("utf-8"))
    return 1 if any(result.status == "FAIL" for result in results) else 0


def _no_gpu() -> str:
    """Why there is nothing to check here; empty where there is."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return f"no NVIDIA GPU that torch {torch.__version__} can use on this machine"
    return ""


def _myself(stage: Stage, *arguments: str) -> list[str]:
    return [sys.executable, __file__, *arguments, "--out", str(stage.out)] + (["--dry-run-cpu"] if stage.dry else [])


def _told_by_another_process(stage: Stage) -> dict[str, Any]:
    """What `_machine` tells: this process is not to be on the device beside the checks."""
    done = subprocess.run(_myself(stage, "--machine"), stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def _in_its_own_process(name: str, stage: Stage) -> list[Result]:
    path = stage.out / f"{name}.json"
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("PERFAGENT_")}
    began = time.monotonic()
    with (stage.out / f"{name}.log").open("w") as log:
        command = _myself(stage, "--group", name)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=quiet, start_new_session=True)
        try:
            code = process.wait(GROUPS[name][1])
        except subprocess.TimeoutExpired:
            # its trainings too: they would hold the device that the next group needs
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return [Result(name, "an answer", f"none in {GROUPS[name][1]} s", "FAIL", f"see {name}.log")]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if not path.exists():
        return [Result(name, "an answer", f"exit code {code}", "FAIL", f"see {name}.log")]
    found = [Result(**one) for one in json.loads(path.read_text("utf-8"))]
    if stage.dry and name in TIMED:
        found = [dataclasses.replace(one, status="not checked", note="no GPU") for one in found]
    path.unlink()
    sys.stderr.write(f"  {time.monotonic() - began:.0f} s\n")
    return found


def _one(name: str, stage: Stage) -> int:
    results = importlib.import_module(name).check(stage)
    (stage.out / f"{name}.json").write_text(json.dumps([dataclasses.asdict(one) for one in results]), "utf-8")
    return 0


def _machine(stage: Stage) -> dict[str, Any]:
    """Device, date and versions; no name of the machine."""
    import torch

    import perfagent

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    told: dict[str, Any] = {"date": date, "perfagent": perfagent.__version__, "torch": torch.__version__}
    told |= {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
    }
    told["device"] = DRY
    version = Path(__file__).with_name("VERSION")
    told["commit"] = version.read_text("utf-8").strip() if version.exists() else _commit()
    if not stage.dry:
        told["device"], told["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
        told["driver"] = _said("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader")
    words = [
        told["device"],
        f"driver {told['driver']}" if told.get("driver") else "",
        f"CUDA {told['cuda']}" if "cuda" in told else "",
    ]
    words += [
        f"torch {told['torch']}",
        f"Python {told['python']}",
        f"{told['cores']} cores",
        f"perfagent {told['perfagent']}",
    ]
    told["words"] = ", ".join(filter(None, words)) + (f" ({told['commit']})" if told["commit"] else "")
    return told


def _commit() -> str:
    return _said("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")


def _said(*command: str) -> str:
    """What a program prints; nothing where it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def put(page: Path, section: str) -> None:
    """Puts a section between the marks of docs/evidence/gpu.md, in the place of an older one with the same heading."""
    text = page.read_text("utf-8")
    begin, end = "<!-- results:begin -->\n", "<!-- results:end -->"
    before, _, rest = text.partition(begin)
    held, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{page} has no {begin.strip()} and {end}")
    heading = section.splitlines()[0]
    parts = [
        part
        for part in re.split(r"(?m)^(?=### )", held)
        if part.startswith("### ") and not part.startswith(heading + "\n")
    ]
    page.write_text(before + begin + "\n" + "\n".join([section.strip() + "\n", *parts]) + "\n" + end + after, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
