"""Why the update of a step whose loss was finite spoilt the weights, where what is bad and what is good shows it.

- An eps that is zero in the type of the weights: Adam divides by zero wherever the average of the squares underflows.
- NaN in what a loss leaves out (padding, for example): the gradient there is zero, and a layer's weight gets 0 x NaN
  from its input, while its bias, which is added, gets zero.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["left_out_by_the_loss", "sentence", "zero_eps"]

_HALF = ("float16", "bfloat16")


def zero_eps(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """{"eps", "eps_dtype"} of the first group whose eps is zero in the type of its weights. A fused optimizer computes in
    float32."""
    torch = sys.modules["torch"]
    for group in groups:
        eps = group.get("eps")
        if isinstance(eps, float) and not group.get("fused"):
            for dtype in {p.dtype for p in group["params"]}:
                name = str(dtype).removeprefix("torch.")
                if name in _HALF and float(torch.tensor(eps, dtype=dtype)) == 0.0:
                    return {"eps": eps, "eps_dtype": name}
    return None


def left_out_by_the_loss(
    bad: Sequence[str], trained: Sequence[str], classes: Mapping[str, str]
) -> dict[str, Any] | None:
    """{"parameter", "finite", "module"?, "module_class"?}: the last layer with a bias, if the gradient of its weight was
    bad and that of its bias was not; and the attention that most likely made the NaN. bad, trained: parameters by name,
    in the order of the model."""
    biases = (name for name in reversed(trained) if name.endswith("bias") and f"{name[:-4]}weight" in trained)
    bias = next(biases, None)
    if bias is None or bias in bad or f"{bias[:-4]}weight" not in bad or len(bad) < 2:
        return None
    attentions = [module for module, kind in classes.items() if _is_attention(kind)]
    made = next((one for one in attentions if any(name.startswith(f"{one}.") for name in bad)), None)
    found = {"parameter": f"{bias[:-4]}weight", "finite": bias}
    return found if made is None else {**found, "module": made, "module_class": classes[made]}


def _is_attention(kind: str) -> bool:
    return "attention" in kind.lower()


def sentence(found: Mapping[str, Any]) -> str:
    first, step = found["began"]["first"], found["began"]["last"]
    if found["cause"] == "zero_eps":
        when = f"in step {step}" if first == step else f"in one of the steps {first} to {step}"
        zero = f"eps={found['eps']:g} is zero in {found['eps_dtype']}, the type of the weights"
        return f"The optimizer's update {when} made the weights non-finite, from finite gradients: {zero}."
    there = f"In step {step} values that the loss leaves out were NaN, most likely of a row that is fully masked"
    kind = found.get("module_class", "")
    where = f" in {found['module']!r} ({kind})" if _is_attention(kind) else ""
    shown = f"the gradient of {found['parameter']!r} came back non-finite, that of {found['finite']!r} did not"
    return f"{there}{where}: {shown}."
