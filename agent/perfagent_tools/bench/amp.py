"""Mixed precision: the same training steps of a small GPT in fp32, and with autocast in bf16 and fp16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from perfagent_loop.precision import PRECISIONS, Precision, autocast_of, scaler_of
from perfagent_tools.bench.machine import described, has_bf16
from perfagent_tools.bench.measuring import bytes_of, in_turn, medians, peak_bytes, seeded
from perfagent_tools.bench.report import Figure, Report, percent, times
from perfagent_tools.demo.model import GPT, VOCABULARY

__all__ = ["measure", "training_step"]


def training_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, precision: Precision = "fp32"
) -> Callable[[], None]:
    """A function that trains one step on these tokens (batch, time), each its own target."""
    device = tokens.device
    scaler = scaler_of(precision, device, list(model.parameters()), None)
    autocast = autocast_of(precision, device)

    def step() -> None:
        if autocast is None:
            logits = model(tokens)
        else:
            with autocast:
                logits = model(tokens)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        else:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def measure(device: torch.device, *, quick: bool = False) -> Report:
    large = device.type == "cuda"
    width, layers, batch, context = (1024, 8, 16, 1024) if large else (32, 1, 1, 16) if quick else (256, 4, 4, 128)
    ways: dict[str, Callable[[], None]] = {}
    memory: dict[str, int] = {}
    with seeded():
        tokens = torch.randint(VOCABULARY, (batch, context), device=device)
        for precision in PRECISIONS:
            if precision == "bf16" and large and has_bf16(device) is None:
                continue
            model = GPT(width=width, layers=layers, heads=width // 32, context=context).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            ways[precision] = training_step(model, optimizer, tokens, precision)
            ways[precision]()  # moments are made in the first step
            memory[precision] = bytes_of(model, optimizer) + peak_bytes(ways[precision], device)
        took = medians(in_turn(ways, device, rounds=2 if quick else 9))
    half = min((name for name in ways if name != "fp32"), key=lambda name: took[name])
    speed = took["fp32"] / took[half]
    saved = 100 * (1 - memory[half] / memory["fp32"])
    slowest = "" if large else f"On this CPU fp16 trains {times(took['fp32'] / took['fp16'])} as fast as fp32."
    hardware = has_bf16(device)
    multiplies = f"{hardware} multiplies bf16 here" if hardware else "nothing multiplies bf16 here but emulation"
    return Report(
        name="amp",
        device=device.type,
        machine=described(device),
        setup=f"GPT of width {width}, {layers} layers, {batch} x {context} tokens, AdamW; weights stay in fp32",
        figures={
            "speed": Figure(
                speed,
                f"{half} trains {times(speed)} as fast as fp32",
                f"Helps where matrix products in half precision have hardware and make up the step ({multiplies}); small "
                f"layers, normalization, the optimizer and waiting for data gain nothing. {slowest}".rstrip(),
            ),
            "memory": Figure(
                saved,
                f"{half} takes {percent(saved)} less memory",
                "Activations halve; weights, gradients and the moments of AdamW stay in fp32 (16 bytes a parameter) and autocast "
                "adds a copy of the weights. The memory is halved only where activations are nearly all of it, with large "
                "batches and long sequences.",
            ),
        },
        head=["precision", "ms a step", "to fp32", "peak MiB"],
        rows=[
            [name, f"{1000 * took[name]:.1f}", f"{took['fp32'] / took[name]:.2f}", f"{memory[name] / 2**20:.0f}"]
            for name in ways
        ],
    )
