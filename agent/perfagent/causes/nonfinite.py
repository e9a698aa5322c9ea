"""Finds where the first NaN or infinity of a bad step came from. Begun by a bad step, over after at most three more.

What can be known depends on when it is noticed. A loss on the CPU is seen before its backward pass: the parameters are
still those that made it, autograd's graph still holds what each operator read, and the batch is still in the hands of
the loop. A loss on a device has mostly arrived before the update of its step: all but the graph is there. Else it is
read some steps later, when the parameters may be spoilt. The graph and the outputs of all modules are then those of the
steps that follow: where the loop or a scaler kept the parameters from being spoilt, they show the same once more; where
not, the graph shows which operators can make NaN of finite values at all. Everything on a device is counted there and
read when it has arrived: nothing waits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from perfagent.boundary.guard import guarded
from perfagent.causes.bad_tensors import BadAmong
from perfagent.causes.batch import Fingerprint, in_callers
from perfagent.causes.culprit import in_order, name_culprit, of_gradients, shared_names
from perfagent.causes.evidence import Evidence
from perfagent.causes.graph import Graph, leaves_of, read_graph
from perfagent.causes.modules import CALLED_WITH, OutputChecks, argument_names, is_closed, walk
from perfagent.causes.onset import onset, reads_some_rows
from perfagent.causes.spoilt_update import had_finite_gradients, left_out_by_the_loss, zero_eps
from perfagent.measure.tensor_storage import numbers_in
from perfagent.step.trace import entries_of
from perfagent.wire.evidence import BadTensor, BatchTensor, Began, NonfiniteEvidence

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from perfagent.causes.watch import Watch

__all__ = ["Inquiry"]

MOST_STEPS = 3
"""Steps whose module outputs are checked."""
PATIENCE_S = 20.0
"""After so long what is known is reported, whether or not training went on."""
MOST_AT_END = 2**28
"""Numbers of parameters on the CPU that are looked at when the run ends: 0.1 s or so."""
WAIT_AT_END_S = 0.25
MOST_LOOKS = 3
"""Ticks of the sender's thread for which the row of the bad step is waited for."""
_AVERAGES = ("exp_avg", "momentum_buffer")

Named = list[tuple[str, "Tensor"]]


class Inquiry:
    """One look into one bad step."""

    def __init__(self, watch: Watch, step: int, *, at_end: bool = False) -> None:
        self._watch, self.step = watch, step
        # of a loss that a guard raised at there may be no row: what it explains is then the crash
        self._explains = ["nonfinite_loss", "nonfinite_gradient", *(("process_crash",) if at_end else ())]
        self._progress = watch.progress
        self._since = time.monotonic()
        self._before: BadAmong | None = None
        self._moments: BadAmong | None = None
        self._after: BadAmong | None = None
        self._gradients: BadAmong | None = None
        self._graph: Graph | None = None
        self._graph_step = step
        self._batch: Fingerprint | None = None
        self._dtype = ""
        self._checks: OutputChecks | None = None
        self._rounds: list[OutputChecks] = []
        self._steps_looked_at = self._steps_after = self._looks_for_rows = 0
        self._seen_after = step
        self._done = self._is_sent = False
        self._names: dict[int, str] = {}  # shared weights go by their first name
        self._tied: dict[str, list[str]] = {}  # the first name of such a weight -> the others
        self._classes: dict[str, str] = {}
        self._rate: float | None = None
        self.history: list[dict[str, float]] | None = None  # as it was when the row of the bad step came

    # ---- on the training thread

    def before_backward(self, loss: Tensor, frame: FrameType | None = None) -> None:
        """The loss is known to be bad and nothing has followed from it yet. frame: whose variables may hold the batch,
        and its callers'; by default the caller's."""
        self._dtype = str(loss.dtype).removeprefix("torch.")
        self._note_before(self._parameters(), leaves_of(loss), frame or sys._getframe(1))
        self._graph = read_graph(loss, self._names, self._buffers())

    def before_update(self) -> None:
        """The loss has come from its device and is bad; its gradients are there, and nothing was updated with them."""
        named = self._parameters()
        self._gradients = _gradients(named)
        self._note_before(named, _with_gradients(named), sys._getframe(1))

    def _note_before(self, named: Named, used: set[int] | None, frame: FrameType) -> None:
        self._rate = self._learning_rate()
        self._before = BadAmong(named, used)
        if not self._before.ready() or self._before.shown()["nonfinite"]:
            self._moments = BadAmong(self._averages(named))
        entries = entries_of(self._progress.trace)
        samples = next((entry[4][0] for entry in entries if len(entry) > 4 and isinstance(entry[4], tuple)), None)
        where, found = in_callers(samples, frame)
        if found:
            self._batch = Fingerprint(self.step, where, found)

    def at_boundary(self) -> bool:
        """Between two steps: first what the bad one left behind, then, step by step, what the modules put out."""
        if self._is_sent:
            self._take_off()
            return False
        if self._after is None:
            named = self._parameters()
            self._after, self._seen_after = BadAmong(named, _with_gradients(named)), self._progress.completed
            self._gradients = self._gradients or _gradients(named)
        checks = self._take_off()
        if checks is not None:
            self._rounds.append(checks)
        model = self._watch.model()
        found = any(checks.ready() and checks.first_bad() is not None for checks in self._rounds)
        if found or self._steps_looked_at >= MOST_STEPS or model is None:
            self._done = True
            return False
        self._steps_looked_at += 1
        if self._graph is None and self._progress.losses.proof is None:
            self._progress.losses.proof, self._progress.plain = self._at_next_backward, False
        self._checks = OutputChecks(model, self._progress.thread)
        self._checks.install(self._progress.completed + 1)
        return True

    @guarded
    def _at_next_backward(self, tensors: object) -> None:
        """Reads the graph of a step after the bad one."""
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if isinstance(loss, sys.modules["torch"].Tensor):
            self._graph, self._graph_step = read_graph(loss, self._names, self._buffers()), self._progress.completed + 1

    def give_up(self) -> None:
        """The run ends: what is known now is all there will be."""
        self._take_off()
        self._done = True
        if not self._is_sent:
            self._look_at_end()
            self._send()

    @guarded
    def _look_at_end(self) -> None:
        """If the step was not taken, the parameters are those that made the bad value. Bounded in work and in time."""
        if self._before is None and self._after is None:
            completed = self._progress.completed
            self._steps_after = max(0, completed - self.step)
            named = self._parameters()
            if sum(numbers_in(p) for _, p in named if p.is_cpu) <= MOST_AT_END:
                if completed >= self.step:  # its row was read late
                    self._after, self._seen_after = BadAmong(named), completed
                else:
                    self._before, self._rate = BadAmong(named), self._learning_rate()
        until = time.monotonic() + WAIT_AT_END_S
        while not self._is_there() and time.monotonic() < until:
            time.sleep(0.005)

    def _take_off(self) -> OutputChecks | None:
        checks, self._checks = self._checks, None
        if checks is not None:
            checks.remove()
        return checks

    def _parameters(self) -> Named:
        model = self._watch.model()
        named: Named = []
        if model is not None:
            for module_name, module in walk(model):
                self._classes[module_name] = type(module).__name__
                own = module.named_parameters() if is_closed(module) else module.__dict__.get("_parameters", {}).items()
                named += [(_joined(module_name, name), p) for name, p in own if p is not None]
        primary = self._primary()
        if not named and primary is not None:
            for number, group in enumerate(primary.param_groups):
                named += [(f"{place} of group {number}", p) for place, p in enumerate(group["params"])]
        self._names, self._tied = {}, {}
        for name, p in named:
            first = self._names.setdefault(id(p), name)
            if first != name:
                self._tied.setdefault(first, []).append(name)
        return [(name, p) for name, p in named if self._names[id(p)] == name]

    def _averages(self, named: Named) -> Named:
        """What the optimizer keeps of the gradients of each parameter, by the parameter's name: a gradient that was no
        number stays in it."""
        state = getattr(self._primary(), "state", None)
        kept = ((name, state.get(p)) for name, p in named) if isinstance(state, Mapping) else ()
        averages = ((name, own.get(key)) for name, own in kept if isinstance(own, Mapping) for key in _AVERAGES)
        return [(name, one) for name, one in averages if isinstance(one, sys.modules["torch"].Tensor)]

    def _buffers(self) -> dict[int, str]:
        model = self._watch.model()
        return {
            id(buffer): _joined(module_name, name)
            for module_name, module in (walk(model) if model is not None else ())
            for name, buffer in module.__dict__.get("_buffers", {}).items()
            if buffer is not None
        }

    def _primary(self) -> Optimizer | None:
        return self._progress.selection.primary

    def _learning_rate(self) -> float | None:
        """Of the step in progress; None where it lies on a device."""
        primary = self._primary()
        rate = primary.param_groups[0].get("lr") if primary is not None and primary.param_groups else None
        if isinstance(rate, sys.modules["torch"].Tensor):
            return float(rate) if rate.is_cpu and rate.numel() == 1 else None
        return float(rate) if isinstance(rate, (int, float)) else None

    # ---- on the sender's thread

    def began_earlier(self, step: int) -> None:
        """The loss of an earlier step was bad, too, and came from its device too late for that step."""
        self._after, self._before, self._seen_after, self.step = self._before, None, self.step - 1, step
        self._batch = None

    def send_if_ready(self) -> bool:
        """Sends the finding once all is known, or once nothing more is to be expected. True when it is sent."""
        late = time.monotonic() - self._since > PATIENCE_S
        if not self._is_sent and ((self._done and self._is_there() and self._rows_are_read()) or late):
            self._send()
        return self._is_sent

    def _is_there(self) -> bool:
        """Whether all that is on its way from a device has arrived."""
        parts = (self._before, self._moments, self._after, self._gradients, self._batch, self._graph, *self._rounds)
        return all(part is None or part.ready() for part in parts)

    def _rows_are_read(self) -> bool:
        """Whether the row of the bad step, and with it those before, has been read: they say when it began. Fast steps
        are over before the sender's thread drains the first of them."""
        if self._watch.judged_upto < self.step:
            self._watch.read_rows()
        self._looks_for_rows += 1
        return self._watch.judged_upto >= self.step or self._looks_for_rows > MOST_LOOKS

    def _send(self) -> None:
        self._is_sent = True
        data = {
            "rule": "nonfinite_loss", "explains": self._explains, "severity": "critical", "since_step": self.step,
            "evidence": Evidence({**self._evidence()}, self._when_sent),
        }  # fmt: skip
        self._watch.sender.event("finding", data, step=self.step)

    @guarded
    def _when_sent(self) -> dict[str, Any]:
        self._watch.read_rows()
        return {**self._surroundings()}

    def _history(self) -> list[dict[str, float]]:
        found = self._watch.history() if self.history is None else self.history
        bad = ((row, len(self._watch.bad_gradients(int(row["step"]))[0])) for row in found)
        return [
            {**row, "grad/nonfinite": float(count)} if count and "grad/norm" not in row else row for row, count in bad
        ]

    def _surroundings(self) -> NonfiniteEvidence:
        """What the rows of the step and of those before it show."""
        history = [entry for entry in self._history() if entry["step"] <= self.step]
        known = history[-1] if history else {}
        found: NonfiniteEvidence = {"history": history}
        # The rate and the scale are mostly those of the step before, where the row of this one has not come; what it
        # made is not.
        rate = known.get("lr") if self._rate is None else self._rate
        if rate is not None:
            found["lr"] = rate
        if "amp/scale" in known:
            found["loss_scale"] = known["amp/scale"]
        if known.get("step") == self.step and "loss" in known:
            found["loss"] = known["loss"]
        if known.get("step") == self.step and "grad/norm" in known:
            found["grad_norm"] = known["grad/norm"]
        return found

    def _evidence(self) -> NonfiniteEvidence:
        identity = self._watch.sender.identity
        found: NonfiniteEvidence = {"step": self.step, "rank": identity.rank}
        if identity.world_size and identity.world_size > 1:
            found["world_size"] = identity.world_size
        found |= self._surroundings()
        if self._dtype:
            found["loss_dtype"] = self._dtype
        if self._after is not None:
            found["looked_after_step"] = self._seen_after
        looked = {
            "parameters_before": self._before, "parameters_after": self._after, "gradients": self._gradients,
            "optimizer_state": self._moments or None,
        }  # fmt: skip
        found |= cast(
            "NonfiniteEvidence", {name: one.shown() for name, one in looked.items() if one is not None and one.ready()}
        )
        if self._graph is not None and self._graph.ready():
            is_usable = self._graph_step == self.step or not found.get("parameters_after", {}).get("nonfinite")
            if operator := self._graph.first_bad() if is_usable else self._graph.only_maker():
                found["operator"] = operator
        found |= self._of_modules()
        found["steps_checked_after"] = len(self._rounds)
        if self._steps_after:
            found["steps_after"] = self._steps_after
        if self._batch is not None and self._batch.ready():
            found["batch"] = self._batch.result()
        elif inputs := self._watch.bad_inputs(self.step):
            names = argument_names(self._watch.model())
            tensors: list[BatchTensor] = [{**one, "name": names.get(one["name"], one["name"])} for one in inputs]
            found["batch"] = {"step": self.step, "from": CALLED_WITH, "tensors": tensors}
        found |= name_culprit(found, self._classes)
        found |= self._when_it_began(found)
        if self.step == self._first_step() and found.get("parameters_before", {}).get("nonfinite"):
            found["loaded"] = True
        if shared := shared_names(found, self._tied):
            found["shared"] = shared
        return found

    def _of_modules(self) -> NonfiniteEvidence:
        """What the checks of the steps that followed have shown first."""
        found: NonfiniteEvidence = {}
        for checks in (one for one in self._rounds if one.ready()):
            bad = checks.first_bad()
            if bad is not None and "first_module" not in found:
                found["first_module"] = bad
            if checks.batch is not None and checks.batch.ready() and "later_batch" not in found:
                found["later_batch"] = checks.batch.result()
        return found

    def _first_step(self) -> int:
        return self._watch.sender.identity.start_step or 1

    def _when_it_began(self, found: NonfiniteEvidence) -> NonfiniteEvidence:
        """The steps between which the NaN began, and the gradients that were bad then: what later steps show of parameters
        and modules is their consequence."""
        looked = self._before if self._before is not None else self._after
        bad = [] if looked is None else looked.bad_and_trained()
        began = onset(
            found, self._history(), first_step=self._first_step(), watched=self._before is not None,
            sparse=reads_some_rows(bad, self._classes),
        )  # fmt: skip
        if began is None:
            return {}
        more: NonfiniteEvidence = {"began": began}
        trained = looked.trained if looked is not None else []
        names, among = self._watch.bad_gradients(began["first"]) if began.get("by") == "gradient" else ([], [])
        if names and began["first"] == began["last"]:
            known = among or trained
            bad_ones: list[BadTensor] = [{"name": name} for name in sorted(names, key=lambda one: _place(one, known))]
            gradients = more["gradients_began"] = {"step": began["first"], **in_order(bad_ones, known, len(known))}
            more |= of_gradients(gradients, self._classes)
        return more | self._spoilt(found, began, names or bad, trained)

    def _spoilt(
        self, found: NonfiniteEvidence, began: Began, bad: Sequence[str], trained: Sequence[str]
    ) -> NonfiniteEvidence:
        """What made the update of a step bad whose loss was finite, where that shows. bad: of the gradients, or else of the
        weights after them."""
        last = self.step - 1
        if bad and not began.get("measured") and had_finite_gradients(last, found):
            zero = zero_eps(self._primary())
            if zero is not None:
                return {**zero, "cause": "zero_eps", "began": {"first": last, "last": last, "by": "eps"}}
        left_out = None
        if began["first"] == began["last"] < self.step and began.get("by") != "weights":
            left_out = left_out_by_the_loss(bad, trained, self._classes)
        return {} if left_out is None else {**left_out, "cause": "left_out"}


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _with_gradients(named: Named) -> set[int] | None:
    return {id(p) for _, p in named if p.grad is not None} or None


def _gradients(named: Named) -> BadAmong:
    return BadAmong([(name, p.grad) for name, p in named if p.grad is not None])


def _joined(module: str, parameter: str) -> str:
    parameter = parameter.removeprefix("_orig_mod.").removeprefix("module.")
    return f"{module}.{parameter}" if module else parameter
