"""Names module and parameter to look at, by the strongest of what an inquiry found (nonfinite.py). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Literal

from perfagent.measure.batches.values import IGNORED
from perfagent.wire.evidence import ITSELF, BadTensor, BadTensors, NonfiniteEvidence, OperatorFound

__all__ = ["SHOWN", "Classes", "in_order", "name_culprit", "of_gradients", "shared_names"]

SHOWN = 16
_MOST_SHARED = 3
Classes = Mapping[str, str]
"""Name of a module -> its class."""


def name_culprit(found: NonfiniteEvidence, classes: Classes) -> NonfiniteEvidence:
    """The cause, and what it is about."""
    before, after = found.get("parameters_before", {}), found.get("parameters_after", {})
    gradients = found.get("gradients", {})
    operator, first = found.get("operator"), found.get("first_module")
    made: OperatorFound = operator if operator is not None and "operator" in operator else {}
    spread = "spread" in after or (bool(after.get("nonfinite")) and after.get("nonfinite") == after.get("of"))
    if "spread" in before or (before.get("nonfinite") and before["nonfinite"] == before["of"] > 1):
        return {"cause": "spread"}
    if before.get("nonfinite"):
        return _of_parameters(before, classes, backward=True)
    if "minus_infinity" in made and "from" not in made["minus_infinity"]:
        below = _in_batch(found, ("batch", "later_batch"), below=True)
        if below is not None:
            return below
    if operator is not None and "buffer" in operator:
        return _of_module(_owner(operator["buffer"]), classes, {"buffer": operator["buffer"], "cause": "buffer"})
    ignored = _ignored_labels(found)
    if ignored is not None:
        return ignored
    batch = _in_batch(found, ("batch",) if made else ("batch", "later_batch"))
    # else it is padded with NaN, which the loop or the model leaves out
    if batch is not None and made.get("made") != "nan":
        return batch
    # the module was fed from parameters that the bad step had spoilt
    later = bool(made or before) and bool(after.get("nonfinite"))
    if first is not None and not spread and not later:
        own = next((one["name"] for one in after.get("first", ()) if _owner(one["name"]) == first["module"]), None)
        return _of_module(first["module"], classes, {"cause": "module", **({"parameter": own} if own else {})})
    if operator is not None:
        uses = operator.get("of")
        if uses is not None:
            return _of_module(_owner(uses), classes, {"cause": "operator"})
        return _between(operator, classes)
    if before and later:
        return {"cause": "forward"}
    if first is not None:
        return _of_module(first["module"], classes, {"cause": "spread"})
    if after.get("nonfinite"):
        if not spread:
            return _of_parameters(after, classes, backward=math.isfinite(found.get("loss", math.nan)))
        return _of_parameter(after["first"][0]["name"], classes, "spread")
    if gradients.get("nonfinite"):
        return _of_parameter(gradients["last"] or "", classes, "gradient")
    return {"cause": "unknown"}


def _between(operator: OperatorFound, classes: Classes) -> NonfiniteEvidence:
    """An operator that uses no parameter: between which two modules that do, and in which both of them lie."""
    around: NonfiniteEvidence = {"cause": "operator"}
    if "after" in operator:
        around["after_module"] = _owner(operator["after"]) or ITSELF
    if "before" in operator:
        around["before_module"] = _owner(operator["before"]) or ITSELF
    if "after_module" not in around or "before_module" not in around:
        return around
    both = zip(around["after_module"].split("."), around["before_module"].split("."), strict=False)
    shared = [one for one, _ in takewhile(lambda names: names[0] == names[1], both)]
    while shared and classes.get(".".join(shared)) in ("ModuleList", "ModuleDict"):  # these have no forward pass
        shared.pop()
    return _of_module(".".join(shared), classes, around) if shared else around


def _of_parameters(bad: BadTensors, classes: Classes, *, backward: bool) -> NonfiniteEvidence:
    """Some parameters are bad and others are not. backward: the loss that they come from was finite."""
    if backward and "good_from" in bad:
        return {**_of_parameter(bad["last"] or "", classes, "backward"), "good_from": bad["good_from"]}
    return _of_parameter(bad["first"][0]["name"], classes, "parameter")


def of_gradients(bad: BadTensors, classes: Classes) -> NonfiniteEvidence:
    """The culprit, by the gradients of the step in which it began."""
    if "good_from" in bad:
        return _of_parameters(bad, classes, backward=True)
    return _of_parameter(bad["last"] or "", classes, "gradient")


def in_order(bad: Sequence[BadTensor], trained: Sequence[str], of: int) -> BadTensors:
    """Tensors that were bad, in the order of the model. trained: the names of those with gradients, good ones too."""
    names = [one["name"] for one in bad]
    found: BadTensors = {
        "of": of, "nonfinite": len(bad), "first": [*bad[:SHOWN]], "last": names[-1] if names else None,
    }  # fmt: skip
    # the order of the model mostly is that of its forward pass: so it is when a gradient becomes NaN on its way back
    if 1 < len(names) < len(trained) and names == [*trained[: len(names)]]:
        found["good_from"] = trained[len(names)]
    return found


def _in_batch(
    found: NonfiniteEvidence, batches: Iterable[Literal["batch", "later_batch"]], *, below: bool = False
) -> NonfiniteEvidence | None:
    """A tensor of a batch that holds NaN or +inf; below: or nothing worse than -inf, which is what masks hold."""
    for batch in batches:
        for tensor in found.get(batch, {}).get("tensors", ()):
            most = 0 if below else tensor.get("minus_infinite", 0)
            if tensor.get("nonfinite", 0) > most or not tensor.get("max", 0.0) < math.inf:
                return {"cause": "batch", "batch_tensor": tensor["name"], "batch_step": found[batch]["step"]}
    return None


def _ignored_labels(found: NonfiniteEvidence) -> NonfiniteEvidence | None:
    """A tensor of whole numbers in the batch that are all the label which the loss leaves out."""
    for tensor in found.get("batch", {}).get("tensors", ()):
        if tensor["dtype"] in ("int64", "int32") and tensor.get("min") == tensor.get("max") == IGNORED:
            return {"cause": "ignored_labels", "batch_tensor": tensor["name"], "batch_step": found["batch"]["step"]}
    return None


def _of_parameter(name: str, classes: Classes, cause: str) -> NonfiniteEvidence:
    return _of_module(_owner(name), classes, {"cause": cause, "parameter": name})


def _of_module(module: str, classes: Classes, found: NonfiniteEvidence) -> NonfiniteEvidence:
    found["module"] = module or ITSELF
    if module in classes:
        found["module_class"] = classes[module]
    return found


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def shared_names(found: NonfiniteEvidence, tied: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The further names of the weights that the cause names, or whose modules it names. tied: by the first name."""
    keys = ("parameter", "module", "good_from", "finite", "after_module", "before_module")
    named = {found.get(key) for key in keys} | {found.get("operator", {}).get(key) for key in ("after", "before")}
    return {first: tied[first] for first in [one for one in tied if {one, _owner(one)} & named][:_MOST_SHARED]}
