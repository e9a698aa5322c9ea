"""Activation checkpointing: peak memory and time of a training step of a small GPT, by how many blocks are computed
again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perfagent_loop.compute.activation import checkpoint_activations
from perfagent_tools.bench.amp import training_step
from perfagent_tools.bench.machine import described
from perfagent_tools.bench.measuring import bytes_of, in_turn, medians, peak_bytes, seeded
from perfagent_tools.bench.report import Figure, Report, percent
from perfagent_tools.demo.model import GPT, VOCABULARY

__all__ = ["measure"]

MODES = ("none", "all", "every:2", "selective")


def measure(device: torch.device, *, quick: bool = False) -> Report:
    large = device.type == "cuda"
    width, layers, batch, context = (1024, 24, 16, 1024) if large else (48, 2, 2, 16) if quick else (192, 12, 8, 128)
    ways: dict[str, Callable[[], None]] = {}
    peak: dict[str, int] = {}
    with seeded():
        tokens = torch.randint(VOCABULARY, (batch, context), device=device)
        for mode in MODES:
            model = GPT(width=width, layers=layers, heads=max(1, width // 48), context=context).to(device)
            if mode != "none":
                checkpoint_activations(model, mode)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            ways[mode] = training_step(model, optimizer, tokens, "bf16" if large else "fp32")
            ways[mode]()
            held = bytes_of(model, optimizer)
            peak[mode] = held + peak_bytes(ways[mode], device)
        took = medians(in_turn(ways, device, rounds=2 if quick else 9))
    saved = {mode: 100 * (1 - peak[mode] / peak["none"]) for mode in MODES}
    longer = {mode: 100 * (took[mode] / took["none"] - 1) for mode in MODES}
    state = 100 * held / peak["none"]
    return Report(
        name="checkpointing",
        device=device.type,
        machine=described(device),
        setup=f"GPT of width {width}, {layers} layers, {batch} x {context} tokens, AdamW; peak of a whole step, with weights and "
        "moments",
        figures={
            "memory": Figure(
                saved["all"],
                f"with every block computed again the peak is {percent(saved['all'])} lower",
                f"Only activations shrink; weights and moments stay (here {percent(state)} of the peak without it). "
                "It helps deep models with long sequences or large batches, and not where weights fill the memory.",
            ),
            "memory, every second block": Figure(
                saved["every:2"],
                f"with every second block computed again the peak is {percent(saved['every:2'])} lower",
                "At most half of what all blocks save, plus the block that is being computed again.",
            ),
            "time": Figure(
                longer["all"],
                f"a step takes {percent(longer['all'])} longer with every block, "
                f"{percent(longer['every:2'])} with every second one",
                "A second forward pass is a third of forward and backward; less where the optimizer or data "
                "are a good part of the step, or where only cheap operations are computed again (selective).",
            ),
        },
        head=["computed again", "peak MiB", "saved %", "ms a step", "longer %"],
        rows=[
            [mode, f"{peak[mode] / 2**20:.1f}", f"{saved[mode]:.0f}", f"{1000 * took[mode]:.1f}", f"{longer[mode]:.0f}"]
            for mode in MODES
        ],
    )
