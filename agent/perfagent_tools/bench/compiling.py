"""torch.compile: how long the first steps take, how fast the later ones are, and after how many the time is won
back."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from perfagent_loop.compute.compiling import compile_model
from perfagent_loop.precision import Precision
from perfagent_tools.bench.amp import training_step
from perfagent_tools.bench.machine import described
from perfagent_tools.bench.measuring import in_turn, medians, seconds, seeded
from perfagent_tools.bench.report import Figure, Report, times
from perfagent_tools.demo.model import GPT, VOCABULARY

__all__ = ["measure"]

ON_CPU, ON_GPU = ("default",), ("default", "reduce-overhead", "max-autotune")
"""The other modes change how a GPU is driven; on a CPU they compile the same code."""


def measure(device: torch.device, *, quick: bool = False) -> Report:
    large = device.type == "cuda"
    width, layers, batch, context = (1024, 8, 8, 512) if large else (32, 1, 2, 16) if quick else (192, 4, 8, 64)
    precision: Precision = "bf16" if large else "fp32"
    ways: dict[str, Callable[[], None]] = {}
    first: dict[str, float] = {}
    with seeded():
        tokens = torch.randint(VOCABULARY, (batch, context), device=device)
        for mode in ("eager", *(ON_GPU if large else ON_CPU)):
            model: torch.nn.Module = GPT(width=width, layers=layers, heads=max(1, width // 48), context=context).to(
                device
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            if mode != "eager":
                model = compile_model(model, mode=mode)
            ways[mode] = training_step(model, optimizer, tokens, precision)
            first[mode] = seconds(ways[mode], device)
        took = medians(in_turn(ways, device, rounds=3 if quick else 15))
    modes = [mode for mode in ways if mode != "eager"]
    speed = took["eager"] / took["default"]
    best = min(modes, key=lambda mode: took[mode])
    return Report(
        name="compile",
        device=device.type,
        machine=described(device),
        setup=f"GPT of width {width}, {layers} layers, {batch} x {context} tokens, {precision}, AdamW",
        figures={
            "speed": Figure(
                speed,
                f"compiled it trains {times(speed)} as fast; {_back('default', first, took)}",
                "Helps where many small operations can be fused, and shapes stay the same: each new shape compiles again. Large "
                "matrix "
                "products gain little; a short run does not win the time back.",
            ),
            "modes": Figure(
                took["eager"] / took[best] if large else None,
                f"{best} is the fastest, {times(took['eager'] / took[best])} as fast"
                if large
                else "both modes concern GPUs only",
                "reduce-overhead records CUDA graphs: it gains where the host is too slow for the device, takes memory and "
                "wants static "
                "shapes; max-autotune tries kernels, which takes minutes.",
            ),
        },
        head=["mode", "first step s", "ms a step", "to eager", "won back after steps"],
        rows=[
            [
                mode,
                f"{first[mode]:.1f}",
                f"{1000 * took[mode]:.1f}",
                f"{took['eager'] / took[mode]:.2f}",
                _steps(mode, first, took) if mode != "eager" else "-",
            ]
            for mode in ways
        ],
    )


def _steps(mode: str, first: dict[str, float], took: dict[str, float]) -> str:
    gain = took["eager"] - took[mode]
    return f"{math.ceil((first[mode] - first['eager']) / gain):,}" if gain > 0 else "never"


def _back(mode: str, first: dict[str, float], took: dict[str, float]) -> str:
    steps = _steps(mode, first, took)
    compiling = f"compiling took {first[mode]:.0f} s"
    return f"{compiling}, never won back" if steps == "never" else f"{compiling}, won back after {steps} steps"
