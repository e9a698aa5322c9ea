"""Why the update of a step whose loss was finite spoilt the weights, where what is bad and what is good shows it.

- An eps that is zero in the type of the weights: Adam divides by zero wherever the average of the squares underflows.
- NaN in what a loss leaves out (padding, for example): the gradient there is zero, and a layer's weight gets 0 x NaN
  from its input, while its bias, which is added, gets zero.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from perfagent.wire.evidence import NonfiniteEvidence

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["had_finite_gradients", "left_out_by_the_loss", "zero_eps"]

_HALF = ("float16", "bfloat16")


def zero_eps(optimizer: Optimizer | None) -> NonfiniteEvidence | None:
    """{"eps", "eps_dtype"} of the first group whose eps is zero in the type of its weights. A fused optimizer computes in
    float32, and so do most that are not torch's own."""
    torch = sys.modules["torch"]
    own = optimizer is not None and type(optimizer).__module__.startswith("torch.optim")
    for group in optimizer.param_groups if optimizer is not None and own else ():
        eps = group.get("eps")
        if isinstance(eps, float) and not group.get("fused"):
            for dtype in {p.dtype for p in group["params"]}:
                name = str(dtype).removeprefix("torch.")
                # on the CPU, also where the script's default is another device
                if name in _HALF and float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0.0:
                    return {"eps": eps, "eps_dtype": name}
    return None


def had_finite_gradients(step: int, found: NonfiniteEvidence) -> bool:
    """Whether the evidence shows that the gradients of this step, the last before a bad loss, were finite: those that
    were measured, or what the optimizer keeps of them."""
    state = found.get("optimizer_state")
    if state is not None:
        return not state["nonfinite"]
    row: Mapping[str, float] = next((one for one in found["history"] if one["step"] == step), {})
    return math.isfinite(row.get("grad/norm", math.nan)) and not row.get("grad/nonfinite")


def left_out_by_the_loss(
    bad: Sequence[str], trained: Sequence[str], classes: Mapping[str, str]
) -> NonfiniteEvidence | None:
    """{"parameter", "finite", "module", "module_class"}: the last layer with a bias, if the gradient of its weight was bad
    and that of its bias was not; and the attention that most likely made the NaN: without one an overflow fits as well.
    bad, trained: parameters by name, in the order of the model."""
    biases = (name for name in reversed(trained) if name.endswith("bias") and f"{name[:-4]}weight" in trained)
    bias = next(biases, None)
    if bias is None or bias in bad or f"{bias[:-4]}weight" not in bad or len(bad) < 2:
        return None
    attentions = [module for module, kind in classes.items() if "attention" in kind.lower()]
    made = next((one for one in attentions if any(name.startswith(f"{one}.") for name in bad)), None)
    if made is None:
        return None
    return {"parameter": f"{bias[:-4]}weight", "finite": bias, "module": made, "module_class": classes[made]}
