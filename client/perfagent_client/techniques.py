"""What the agent recognized of a training's techniques (adapters, quantization, pruning ...), in a line each. Pure.

Values are those of an agent of any version: what is not of the expected kind is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perfagent.wire.quantities import size

__all__ = ["sentences"]

_SAVES = {
    "adam_state": "saves {size} (gradients and moments of Adam)",
    "beside_bf16": "saves {size} (weights, beside bf16)",
    "masks_kept": "saves nothing while training: masks are kept beside the weights",
}


def _english(key: str, size: str) -> str:
    return _SAVES[key].format(size=size)


def sentences(config: Mapping[str, Any], saves: Callable[[str, str], str] = _english) -> list[str]:
    """A line for each technique in the configuration of a run, with what it saves where that is known.

    saves: says that, of its key and of a size, in the reader's language.
    """
    techniques = config.get("techniques")
    if not isinstance(techniques, Mapping):
        return []
    lines = []
    for name, told in techniques.items():
        if isinstance(told, Mapping):
            parts = [_plain(key, value) for key, value in told.items() if key not in ("saved", "saved_bytes")]
            lines.append(f"{name}: {', '.join(part for part in parts if part)}{_saved(told, saves)}")
    return lines


def _plain(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        inner = [_plain(name, one) for name, one in value.items()]
        return f"{key} ({', '.join(part for part in inner if part)})"
    if isinstance(value, list):
        return f"{key.replace('_', ' ')} {' '.join(map(str, value))}"
    if key in ("library", "method", "class"):
        return str(value)
    if key.endswith("_pct") and isinstance(value, (int, float)):
        return f"{key.removesuffix('_pct').replace('_', ' ')} {value:g} %"
    return f"{key.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{key.replace('_', ' ')} {value}"


def _saved(told: Mapping[str, Any], saves: Callable[[str, str], str]) -> str:
    saved, what = told.get("saved_bytes"), told.get("saved")
    if not isinstance(saved, int) or not isinstance(what, str):
        return ""
    if what in _SAVES:
        return f"; {saves(what, size(saved))}"
    if saved <= 0:  # of an older agent, which sent words
        return f"; saves {what}"
    return f"; saves {size(saved)} ({what})"
