"""`perfagent tune [FILE[:FUNCTION]]`: a short search for a faster setting of a training, with the gain of each step."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

__all__ = ["command"]

_EXAMPLE = """
FILE.py has a function `job` (or FILE.py:FUNCTION) that answers a perfagent.TuningJob, or a dict with its fields:

    def job():
        model = Net()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "dataset": Data(),
                "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), "batch_size": 32}

Without a file the training of `perfagent demo` is tuned.
"""


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Try one change at a time on a training, measure each against the best so far, and keep what pays."
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", metavar="FILE.py[:FUNCTION]", help="the training (default: that of the demo)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each side of a comparison (default 20)")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two sides take turns (default 3)")
    parser.add_argument("--largest-batch", type=int, metavar="N", help="the largest batch to try (default: 8 times the first)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="try torch.compile (default: on CUDA only)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from perfagent.training.search.job import demo_job, job_from
    from perfagent.training.search.tuning import TuningStep, tune

    job = demo_job() if arguments.file is None else job_from(arguments.file)

    first: list[float] = []

    def told(step: TuningStep) -> None:
        if not arguments.json:
            if not first:
                print(_line("change", "samples/s", "gain", "", ""))
                print(_line("as given", step.before, "", "", ""))
            first.append(step.before)
            print(_line(step.change, step.after, f"{step.gain_pct:+.1f} %", "kept" if step.kept else "left out", step.remark))
            sys.stdout.flush()

    if arguments.file is None and not arguments.json:
        print("no file given: tuning the training of `perfagent demo`", flush=True)
    report = tune(
        job, steps=arguments.steps, rounds=arguments.rounds, largest_batch=arguments.largest_batch, compiling=arguments.compile,
        told=told,
    )  # fmt: skip
    if arguments.json:
        steps = [dataclasses.asdict(step) | {"gain_pct": step.gain_pct} for step in report.steps]
        answer = {"samples_per_s": report.samples_per_s, "gain_pct": report.gain_pct, "steps": steps}
        print(json.dumps(answer | {"setting": dataclasses.asdict(report.setting)}))
        return 0
    print(_line("all that was kept", report.samples_per_s * (1 + report.gain_pct / 100), f"{report.gain_pct:+.1f} %", "", ""))
    return 0


def _line(change: str, rate: float | str, gain: str, kept: str, remark: str) -> str:
    shown = rate if isinstance(rate, str) else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{change:<40}{shown:>12}{gain:>12}   {kept:<9}{remark}".rstrip()
