"""The precision of the forward pass: autocast and, for fp16, the gradient scaler.

Weights stay in fp32; autocast runs matrix products in bf16 or fp16. fp16's small range needs a scaled loss
(Micikevicius et al., "Mixed Precision Training", 2018); bf16 has the range of fp32 and needs none. An engine of
DeepSpeed has a precision of its own, over which no autocast may be laid."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, cast, get_args

import torch

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice

__all__ = ["DTYPES", "PRECISIONS", "Precision", "autocast_of", "checked_precision", "scaler_of"]

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checked_precision(given: object) -> Precision:
    """The precision of that name. Raises ConfigError for anything else."""
    check_choice("precision", given, PRECISIONS)
    return cast("Precision", given)


def autocast_of(precision: Precision, device: torch.device) -> AbstractContextManager[Any] | None:
    """What the forward pass runs in; the same object serves every step, one after the other. None for fp32."""
    if precision == "fp32":
        return None
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"precision is 'bf16', which {name} only emulates; use precision='fp16'")
    return torch.autocast(device.type, dtype=DTYPES[precision])


def scaler_of(
    precision: Precision, device: torch.device, parameters: list[torch.nn.Parameter], given: torch.amp.GradScaler | None
) -> torch.amp.GradScaler | None:
    """The scaler of fp16: the user's own, or one with torch's defaults. None in a precision that needs none."""
    if precision != "fp16":
        if given is not None and given.is_enabled():
            raise ConfigError(f"a scaler is for precision='fp16'; with {precision!r} it only skips steps: leave it out")
        return None
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ConfigError(
            "precision is 'fp16' and the model's weights are float16 already: their gradients cannot be unscaled and small "
            "updates are lost; keep the weights in float32 (no model.half()), autocast does the rest"
        )
    return torch.amp.GradScaler(device.type) if given is None else given
