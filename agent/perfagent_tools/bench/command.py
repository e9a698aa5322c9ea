"""`perfagent bench NAME`: what a technique gains here, and when; and how many agents a server serves."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from typing import Any

from perfagent.command_line.option_types import positive
from perfagent.errors import ResourceError
from perfagent_server.ingest_benchmark import measuring as ingest

__all__ = ["BENCHMARKS", "command"]

BENCHMARKS = {
    "amp": ("amp", "mixed precision: speed and memory of a training step in bf16 and fp16"),
    "checkpointing": ("checkpointing", "activation checkpointing: memory saved, time added"),
    "workers": ("workers", "loader workers, and a cache of samples"),
    "pinning": ("pinning", "copies to the GPU from pinned memory"),
    "packing": ("packing", "sequence packing: how full, how fast to pack, tokens per second"),
    "attention": ("attention", "attention kernels on your shapes"),
    "async-checkpoint": ("async_checkpoint", "how long a training waits for its checkpoints"),
    "compile": ("compiling", "torch.compile: time to compile, time saved"),
    "prefetch": ("prefetching", "batches copied to the device while it computes"),
}
"""Name -> the module of this package, and what it measures."""


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure what a technique gains on this machine, and when it helps. `ingest` measures a server instead."
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (_, what) in BENCHMARKS.items():
        one = names.add_parser(name, help=what, description=f"Measures {what}.", allow_abbrev=False)
        one.add_argument("--device", help="cpu or cuda (default: the GPU where there is one)")
        one.add_argument("--quick", action="store_true", help="small and short: to see that it works, not to quote")
        one.add_argument("--json", action="store_true", help="machine-readable")
        _ADDED.get(name, _nothing)(one)
    parser.set_defaults(run=bench)
    ingest.add_options(
        names.add_parser("ingest", help="how many agents a server serves, over HTTP", allow_abbrev=False)
    )


def bench(arguments: argparse.Namespace) -> int:
    module = BENCHMARKS[arguments.name][0]
    known = ("name", "device", "quick", "json", "run")
    options = {name: value for name, value in vars(arguments).items() if name not in known and value is not None}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes a line for each start and stop
    try:
        from perfagent_tools.bench.machine import device_of
    except ModuleNotFoundError as error:
        raise ResourceError(f"benchmarks train with torch, and {error.name} is missing; pip install torch") from error
    measured = importlib.import_module(f"perfagent_tools.bench.{module}").measure(
        device_of(arguments.device), quick=arguments.quick, **options
    )
    print(json.dumps(measured.as_dict(), indent=2) if arguments.json else measured.text())
    return 0


def _nothing(_: argparse.ArgumentParser) -> None:
    pass


def _of_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, help="sequences (default 2; 8 on a GPU)")
    parser.add_argument("--heads", type=positive, help="heads of the queries (default 4; 16 on a GPU)")
    parser.add_argument(
        "--kv-heads", type=positive, help="heads of keys and values (default: as many as of the queries)"
    )
    lengths = "sequence lengths (default 128 to 2048)"
    parser.add_argument("--length", type=positive, nargs="+", dest="lengths", metavar="TOKENS", help=lengths)
    parser.add_argument("--head-dim", type=positive, help="width of a head (default 64)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default fp32; bf16 on a GPU")
    parser.add_argument(
        "--not-causal", action="store_false", dest="causal", default=None, help="every token sees every other"
    )


def _of_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=positive, help="size of the state (default 384)")
    parser.add_argument("--folder", help="on the disk that your checkpoints go to")


_ADDED: dict[str, Any] = {"attention": _of_attention, "async-checkpoint": _of_checkpoints}
