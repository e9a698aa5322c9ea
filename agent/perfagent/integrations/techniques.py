"""Recognizes techniques of other libraries from the model: adapters (peft), quantized weights (bitsandbytes, torchao),
pruning (torch.nn.utils.prune), a distillation's teacher, loaders (WebDataset, DALI), a profiler (Nsight).

Each is recorded in the run's configuration as `techniques`, with what it saves. Read on the sender's thread: sizes and
types only, no value of a tensor on a device. Classes are known by their names, since no library is imported for it.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["elements", "of_model", "of_process", "of_variable"]

STATE_OF_ADAM = 3
"""Copies of a weight that training it takes beside it: its gradient and the two moments of Adam."""
_ADAPTER = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"}
"""Option as it is sent -> as peft's configuration has it."""
_QUANTIZED = {"Params4bit": ("bitsandbytes", 4), "Int8Params": ("bitsandbytes", 8)}
"""Class of a weight -> its library, and bits of one number. Any class of torchao's has 8."""
_LOADERS = {"webdataset.": "WebDataset", "nvidia.dali.": "DALI"}
"""Where the class of a loader or of its dataset stands -> library."""
_PROFILERS = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems", "NV_COMPUTE_PROFILER": "Nsight Compute",
    "NV_NSIGHT_INJECTION_PORT_BASE": "Nsight Compute",
}  # fmt: skip
"""How a variable begins that a profiler sets for what it starts -> the profiler."""
_MOST_MASKS = 2**24  # numbers of masks that are counted: tens of milliseconds


def elements(parameter: torch.Tensor) -> int:
    """How many weights a parameter stands for: 4-bit tensors are packed, ZeRO-3 leaves an empty one and its number.

    Raises ValueError for one of a lazy module that was not called yet.
    """
    state = getattr(parameter, "quant_state", None)
    shape = getattr(state, "shape", None)
    if shape is not None:
        return math.prod(map(int, shape))
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def of_model(model: torch.nn.Module) -> dict[str, object]:
    """technique -> what is known of it; empty for a model that trains all of its weights as they are."""
    parameters = list(model.parameters())
    found = {
        "adapters": _adapters(model),
        "frozen": _frozen(parameters),
        "quantization": _quantization(parameters),
        "pruning": _pruning(model),
    }
    return {name: facts for name, facts in found.items() if facts}


def of_process() -> dict[str, object]:
    """What runs round this process: a profiler that has started it."""
    found = [profiler for start, profiler in _PROFILERS.items() if any(name.startswith(start) for name in os.environ)]
    return {"profiler": {"library": found[0]}} if found else {}


def of_variable(name: str, value: Any) -> dict[str, object]:
    """Techniques that a variable of the script shows: a teacher beside the model, a loader of another library."""
    kinds = [f"{base.__module__}.{base.__name__}" for base in type(value).__mro__]
    if "torch.nn.modules.module.Module" in kinds:
        if "teacher" not in name.lower():
            return {}
        facts: dict[str, object] = {"teacher": type(value).__name__}
        with contextlib.suppress(Exception):  # parameters that are not made yet have no size
            facts["teacher_parameters"] = sum(map(elements, value.parameters()))
        return {"distillation": facts}
    if "torch.utils.data.dataloader.DataLoader" in kinds:  # of the usual kind, over a dataset of the library
        kinds += [f"{base.__module__}.{base.__name__}" for base in type(getattr(value, "dataset", None)).__mro__]
    found = [library for start, library in _LOADERS.items() if any(kind.startswith(start) for kind in kinds)]
    return {"loader": {"library": found[0], "class": type(value).__name__}} if found else {}


def _adapters(model: torch.nn.Module) -> dict[str, object]:
    held = (module.__dict__.get("peft_config") for module in model.modules())
    configurations: Any = next((found for found in held if isinstance(found, dict) and found), None)
    if configurations is None:
        return {}
    facts: dict[str, object] = {"library": "peft"}
    for name, configuration in list(configurations.items())[:8]:
        kind = getattr(configuration, "peft_type", None)
        options = {option: getattr(configuration, given, None) for option, given in _ADAPTER.items()}
        if not isinstance(targets := options["target_modules"], str):
            options["target_modules"] = sorted(targets or ())
        kept = {option: value for option, value in options.items() if value not in (None, [])}
        facts[str(name)] = {"method": str(getattr(kind, "value", kind)), **kept}
    return facts


def _frozen(parameters: list[torch.nn.Parameter]) -> dict[str, object]:
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    if not frozen or len(frozen) == len(parameters):
        return {}
    total = sum(map(elements, parameters))
    kept = sum(map(elements, frozen))
    # What training them would take: in the precision they would be trained in, which is not that of packed integers.
    saved = sum(
        STATE_OF_ADAM * elements(one) * (one.element_size() if one.is_floating_point() else 2) for one in frozen
    )
    return {
        "trainable_pct": round(100 * (total - kept) / max(total, 1), 4),
        "saved_bytes": saved,
        "saved": "adam_state",
    }


def _quantization(parameters: list[torch.nn.Parameter]) -> dict[str, object]:
    packed = [(one, how) for one in parameters if (how := _packing(one))]
    if not packed:
        return {}
    weights = sum(elements(one) for one, _ in packed)
    held = sum(one.numel() * one.element_size() for one, _ in packed)
    kind = next((str(found) for one, _ in packed if (found := getattr(one, "quant_type", None))), None)
    share = 100 * weights / max(sum(map(elements, parameters)), 1)
    facts = {"library": packed[0][1][0], "bits": min(bits for _, (_, bits) in packed),
            "weights_pct": round(share, 2), "saved_bytes": 2 * weights - held, "saved": "beside_bf16"}  # fmt: skip
    return facts | ({"type": kind} if kind else {})


def _packing(parameter: torch.Tensor) -> tuple[str, int] | None:
    kind = type(parameter)
    return ("torchao", 8) if kind.__module__.startswith("torchao.") else _QUANTIZED.get(kind.__name__)


def _pruning(model: torch.nn.Module) -> dict[str, object]:
    """Tensors with a mask of torch.nn.utils.prune; the share of zeros of those on the CPU, where counting waits for
    nobody."""
    methods, masks = set(), []
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if any(base.__name__ == "BasePruningMethod" for base in type(hook).__mro__):
                methods.add(type(hook).__name__)
                mask = module._buffers.get(f"{getattr(hook, '_tensor_name', '')}_mask")
                masks += [mask] if mask is not None else []
    if not methods:
        return {}
    facts: dict[str, object] = {"library": "torch.nn.utils.prune", "methods": sorted(methods), "tensors": len(masks)}
    size = sum(mask.numel() for mask in masks)
    if masks and size <= _MOST_MASKS and all(mask.device.type == "cpu" for mask in masks):
        facts["pruned_pct"] = round(100 * (1 - sum(int(mask.count_nonzero()) for mask in masks) / size), 2)
    return facts | {"saved_bytes": 0, "saved": "masks_kept"}
