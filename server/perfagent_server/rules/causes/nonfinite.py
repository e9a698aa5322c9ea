"""Says where and when a NaN began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perfagent.wire.evidence import ITSELF, BadTensors, NonfiniteEvidence
from perfagent_server.rules.texts import Language, Phrases

__all__ = ["message_and_fix"]

_COMPILED = "CompiledFunction"
"""All that torch.compile made one function of, as an operator of autograd's graph: what happens inside is not in it."""


def message_and_fix(found: NonfiniteEvidence, language: Language) -> tuple[str, str]:
    fixes = Phrases("nonfinite_fix", language)
    fix = "loaded" if found.get("loaded") else found["cause"]
    return _Sentences(found, language).message(), fixes.say(fix, {}) if fix in fixes else ""


class _Sentences:
    """The sentences that a piece of evidence gives, in a language."""

    def __init__(self, found: NonfiniteEvidence, language: Language) -> None:
        self._found, self._phrases = found, Phrases("nonfinite", language)
        self._figures: dict[str, Any] = {**found}
        for key in ("module", "after_module", "before_module"):
            if self._figures.get(key) == ITSELF:
                self._figures[key] = self._say("itself")

    def message(self) -> str:
        return self._phrases.joined([*self._where(), *self._when(), *self._shared()])

    def _say(self, name: str, /, **more: Any) -> str:
        return self._phrases.say(name, self._figures | more)

    def _where(self) -> Iterator[str]:
        found, cause = self._found, self._found["cause"]
        before, after = found.get("parameters_before", {}), found.get("parameters_after", {})
        if cause == "parameter":
            yield self._say("parameter_before" if before.get("nonfinite") else "parameter")
        elif cause == "backward":
            follows = self._of_module(found["good_from"])
            yield self._say("backward_inside" if follows == self._figures["module"] else "backward", follows=follows)
        elif cause == "operator":
            yield self._of_operator()
            if self._found["operator"].get("is_the_only_one") and "batch" not in found:
                yield self._say("batch_unseen")
        elif cause == "spread" and before.get("nonfinite"):
            yield self._say("spread_before", every=self._every(before))
        elif cause in ("module", "spread") and "first_module" in found:
            first = found["first_module"]
            known = first.get("inputs_finite")
            inputs = None if known is None else self._say("inputs_good" if known else "inputs_bad")
            yield self._say("module", share_pct=100 * first["share"], inputs=inputs)
            if cause == "spread":
                yield self._say("module_late", every=self._every(after))
        elif cause == "spread":
            yield self._say("spread", every=self._every(after))
        elif cause == "gradient":
            yield from self._of_gradients()
        elif cause == "unknown":
            yield from self._of_nothing()
        else:
            yield self._say(cause)

    def _every(self, bad: BadTensors) -> str:
        return self._say("every" if bad.get("nonfinite") == bad.get("of") else "every_trained")

    def _of_module(self, parameter: str) -> str:
        return parameter.rpartition(".")[0] or self._say("itself")

    def _of_operator(self) -> str:
        operator = self._found["operator"]
        if operator.get("operator") == _COMPILED:
            return self._say("compiled")
        if "operator" not in operator:
            return self._say("from_outside", where=self._around())
        if operator.get("is_the_only_one"):
            return self._say("operator_only", where=self._around())
        if operator.get("inputs_unseen"):
            is_masked = operator["operator"].endswith("Softmax")
            return self._say("operator_of_mask" if is_masked else "operator_unseen", where=self._around())
        given = "inputs_finite"
        if "minus_infinity" in operator:
            given = "minus_infinity_made" if "from" in operator["minus_infinity"] else "minus_infinity"
        return self._say("operator", where=self._around(), given=self._say(given))

    def _around(self) -> str:
        """In which module the operator is, and between which parameters' modules, as far as that says more; a model that
        holds parameters itself has no names of modules to show."""
        found, operator, module = self._found, self._found["operator"], self._found.get("module")
        inside = self._say("in_module") if module and module != ITSELF else ""
        around, kind = [found.get("after_module"), found.get("before_module")], "module_name"
        if ITSELF in around:
            around, kind = [operator.get("after"), operator.get("before")], "parameter_name"
        after, before = (self._say(kind, name=name) if name else "" for name in around)
        if not after and not before:
            return inside or self._say("in_model" if module else "in_loss")
        if not after or not before:
            return self._say("after" if after else "before", name=after or before)
        if after == before:
            return inside or self._say("between_uses", name=after)
        return self._say("between", inside=inside, after=after, before=before)

    def _of_gradients(self) -> Iterator[str]:
        if "gradients_began" not in self._found:  # of that step itself
            yield self._say("gradients")
            return
        bad, step = self._found["gradients_began"], self._found["step"]
        yield self._say("gradient_began" if bad["nonfinite"] == 1 else "gradients_began")
        if bad["step"] != step:
            yield self._say("began_there")

    def _of_nothing(self) -> Iterator[str]:
        found = self._found
        if found["steps_checked_after"]:
            yield self._say("not_back")
        else:
            yield self._say("late" if "steps_after" in found else "nothing_followed")
        below = [
            (tensor["name"], batch["step"])
            for batch in (found.get("batch", {}), found.get("later_batch", {}))
            for tensor in batch.get("tensors", ())
            if tensor.get("nonfinite")
        ]
        if below:
            yield self._say("mask_in_batch", tensor=below[0][0], batch_step=below[0][1])

    def _when(self) -> Iterator[str]:
        """When it began, where the sentence on where it did does not say so."""
        found, began = self._found, self._found.get("began")
        if began is None:
            return
        step, first, last, by = found["step"], began["first"], began["last"], began.get("by")
        is_spoilt = bool(found.get("parameters_before", {}).get("nonfinite"))
        if first == last == step:
            if found["cause"] == "spread" and not is_spoilt and by is None:
                yield self._say("began_after", before=step - 1)
        elif "gradients_began" in found or found["cause"] in ("zero_eps", "left_out"):
            return
        elif began.get("measured"):
            yield self._say("began_measured")
        elif by == "weights":
            yield self._say("began_written")
        elif not is_spoilt:
            yield self._say("began_in_update" if first == last - 1 else "began_in_an_update")
        elif first == last and by != "gradient":
            yield self._say("began_right_after")
        else:
            # else they may have been measured
            was_read = any(row["step"] == last for row in found.get("history", ()))
            unmeasured = self._say("unmeasured") if was_read else ""
            kept = self._say("kept") if by == "gradient" else ""
            yield self._say("began" if first == last else "began_between", unmeasured=unmeasured, kept=kept)

    def _shared(self) -> Iterator[str]:
        for name, others in self._found.get("shared", {}).items():
            yield self._say("shared", name=name, others=[self._say("name", name=other) for other in others])
