"""Recognizes techniques of other libraries from the model: adapters (peft), quantized weights (bitsandbytes, torchao),
pruning (torch.nn.utils.prune), a distillation's teacher, loaders (WebDataset, DALI), a profiler (Nsight).

Each is recorded in the run's configuration as `techniques`, with what it saves. Read on the sender's thread: sizes and
types only, no value of a tensor on a device. Classes are known by their names, since no library is imported for it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["elements", "of_model", "of_process", "of_variable"]

STATE_OF_ADAM = 3
"""Copies of a weight that training it takes beside it: its gradient and the two moments of Adam."""
_DALI, _WEBDATASET = "nvidia.dali", "webdataset"
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


def of_process(variables: Mapping[str, str] | None = None) -> dict[str, object]:
    """What runs round this process: Nsight Systems or Compute, which set these variables for what they start."""
    known = os.environ if variables is None else variables
    if "NSYS_PROFILING_SESSION_ID" in known:
        return {"profiler": {"library": "Nsight Systems"}}
    if any(name.startswith("NV_COMPUTE_PROFILER") or name == "NV_NSIGHT_INJECTION_PORT_BASE" for name in known):
        return {"profiler": {"library": "Nsight Compute"}}
    return {}


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
    for library, prefix in (("WebDataset", _WEBDATASET), ("DALI", _DALI)):
        if any(kind.startswith(f"{prefix}.") for kind in kinds):
            return {"loader": {"library": library, "class": type(value).__name__}}
    return {}


def _adapters(model: torch.nn.Module) -> dict[str, object]:
    configurations: Any = next(
        (
            found
            for module in model.modules()
            if isinstance(found := module.__dict__.get("peft_config"), dict) and found
        ),
        None,
    )
    if configurations is None:
        return {}
    facts: dict[str, object] = {"library": "peft"}
    for name, configuration in list(configurations.items())[:8]:
        kind = getattr(configuration, "peft_type", None)
        one: dict[str, object] = {"method": str(getattr(kind, "value", kind))}
        for option, key in (("r", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
            if (value := getattr(configuration, option, None)) is not None:
                one[key] = value
        targets = getattr(configuration, "target_modules", None)
        if targets:
            one["target_modules"] = targets if isinstance(targets, str) else sorted(targets)
        facts[str(name)] = one
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
    packed = [(one, bits) for one in parameters if (bits := _bits(one))]
    if not packed:
        return {}
    weights = sum(elements(one) for one, _ in packed)
    held = sum(one.numel() * one.element_size() for one, _ in packed)
    library = "torchao" if any(type(one).__module__.startswith("torchao") for one, _ in packed) else "bitsandbytes"
    kind = next((str(found) for one, _ in packed if (found := getattr(one, "quant_type", None))), None)
    share = 100 * weights / max(sum(map(elements, parameters)), 1)
    facts = {"library": library, "bits": min(bits for _, bits in packed), "weights_pct": round(share, 2),
            "saved_bytes": 2 * weights - held, "saved": "beside_bf16"}  # fmt: skip
    return facts | ({"type": kind} if kind else {})


def _bits(parameter: torch.Tensor) -> int | None:
    kind = type(parameter)
    if kind.__name__ == "Params4bit":
        return 4
    if kind.__name__ == "Int8Params":
        return 8
    return 8 if kind.__module__.startswith("torchao.") else None


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
