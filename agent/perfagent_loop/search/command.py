"""`perfagent tune FILE[:FUNCTION]`: a short search for a faster setting of a training, with the gain of each step."""

from __future__ import annotations

import argparse
import dataclasses
import json

__all__ = ["command"]

_EXAMPLE = """
FILE.py has a function `job` (or FILE.py:FUNCTION) that returns a perfagent.TuningJob, or a dict with its fields:

    def job():
        model = Net()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "dataset": Data(),
                "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), "batch_size": 32}

The file is imported: what it does at top level may define and prepare, and must not train. --demo tunes the training of
`perfagent demo`."""


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Try one change at a time on a training, measure each against the best, and keep what pays."
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", metavar="FILE.py[:FUNCTION]", help="the training")
    parser.add_argument("--demo", action="store_true", help="tune the training of `perfagent demo`: a minute of CPU")
    parser.add_argument("--steps", type=int, default=20, help="steps of each side of a comparison (default 20)")
    parser.add_argument("--rounds", type=int, default=3, help="how often the two sides take turns (default 3)")
    parser.add_argument("--largest-batch", type=int, metavar="N", help="the largest to try (default: 8 times it)")
    compiling = "try torch.compile (default: on CUDA only)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=compiling)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if (arguments.file is None) != arguments.demo:
        parser.error("give FILE.py, which describes a training, or --demo" + (", not both" if arguments.demo else ""))
    from perfagent_loop.search.job import demo_job, job_from
    from perfagent_loop.search.tuning import TuningStep, tune

    job = demo_job() if arguments.demo else job_from(arguments.file)
    shown: list[TuningStep] = []

    def show(step: TuningStep) -> None:
        if not arguments.json:
            if not shown:
                print(_line("samples/s", "without", "with", "gain", "spread", ""))
            result = ("kept" if step.kept else "left out") + (f": {step.remark}" if step.remark else "")
            gain, spread = f"{step.gain_pct:+.1f} %", f"{step.spread_pct:.0f} %"
            print(_line(step.change, step.before, step.after, gain, spread, result), flush=True)
        shown.append(step)

    report = tune(
        job, steps=arguments.steps, rounds=arguments.rounds, largest_batch=arguments.largest_batch, compiling=arguments.compile,
        on_step=show,
    )  # fmt: skip
    if arguments.json:
        steps = [dataclasses.asdict(step) | {"gain_pct": step.gain_pct} for step in report.steps]
        figures = {"samples_per_s": report.samples_per_s, "gain_pct": report.gain_pct, "steps": steps}
        print(json.dumps(figures | {"noise": report.noise, "setting": dataclasses.asdict(report.setting)}))
        return 0
    if any(step.kept for step in report.steps):
        best = report.samples_per_s * (1 + report.gain_pct / 100)
        print(_line("all that was kept", report.samples_per_s, best, f"{report.gain_pct:+.1f} %", "", ""))
    else:
        print(f"nothing pays here: the training as given makes {_rate(report.samples_per_s)} samples/s")
    if report.noise:
        print(f"much of this is noise: {report.noise}. Stop what else runs, or give more --rounds, and measure again")
    return 0


def _line(change: str, without: float | str, with_it: float | str, gain: str, spread: str, result: str) -> str:
    return f"{change:<40}{_rate(without):>10}{_rate(with_it):>10}{gain:>11}{spread:>8}   {result}".rstrip()


def _rate(rate: float | str) -> str:
    return rate if isinstance(rate, str) else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
