"""Finds where the first NaN or infinity of a bad step came from. Begun by a bad step, over after at most three more.

A loss on the CPU is seen before its backward pass: parameters, autograd's graph and the loop's batch are still those that
made it. A loss on a device has mostly arrived before the update of its step: all but the graph is there. Else it is read
some steps later. Graph and outputs of modules are then those of the steps that follow: they show the same once more if the
loop or a scaler kept the parameters good; if not, the graph shows which operators can make NaN of finite values at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, cast

from perfagent.boundary.guard import guarded
from perfagent.causes.bad_tensors import BadAmong
from perfagent.causes.batch import Fingerprint
from perfagent.causes.culprit import in_order, name_culprit, of_gradients, shared_names
from perfagent.causes.graph import Graph, leaves_of, operators_of, read_graph
from perfagent.causes.modules import CALLED_WITH, OutputChecks, argument_names
from perfagent.causes.onset import onset, reads_some_rows
from perfagent.causes.spoilt_update import had_finite_gradients, left_out_by_the_loss, zero_eps
from perfagent.causes.variables import in_callers
from perfagent.measure.parameter_names import module_names, without_wrappers
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
        self._looks: dict[str, BadAmong] = {}  # by their names in the evidence
        self._graph: Graph | None = None
        self._graph_step = step
        self._batch: Fingerprint | None = None
        self._dtype = ""
        self._rounds: list[OutputChecks] = []
        self._steps_after = self._looks_for_rows = 0
        self._seen_after = step
        self._done = self._is_sent = False
        self._names: dict[int, str] = {}  # shared weights go by their first name
        self._tied: dict[str, list[str]] = {}  # the first name of such a weight -> the others
        self._classes: dict[str, str] = {}
        self.history: list[dict[str, float]] | None = None  # as it was when the row of the bad step came

    # ---- on the training thread

    def before_backward(self, loss: Tensor, frame: FrameType | None = None) -> None:
        """Nothing has followed from the bad loss yet. frame: whose variables, or its callers', may hold the batch."""
        self._dtype = str(loss.dtype).removeprefix("torch.")
        nodes = operators_of(loss)
        self._note_before(self._parameters(), None if nodes is None else leaves_of(nodes), frame or sys._getframe(1))
        self._graph = read_graph(loss, nodes, self._names, self._buffers())

    def before_update(self) -> None:
        """The loss has come from its device and is bad; nothing was updated with its gradients yet."""
        named = self._parameters()
        self._looks["gradients"] = _gradients(named)
        self._note_before(named, _with_gradients(named), sys._getframe(1))

    def _note_before(self, named: Named, used: set[int] | None, frame: FrameType) -> None:
        before = self._looks["parameters_before"] = BadAmong(named, used)
        if (not before.ready() or before.shown()["nonfinite"]) and (averages := BadAmong(self._averages(named))):
            self._looks["optimizer_state"] = averages
        entries = entries_of(self._progress.trace)
        samples = next((entry[4][0] for entry in entries if len(entry) > 4 and isinstance(entry[4], tuple)), None)
        where, found = in_callers(samples, frame)
        if found:
            self._batch = Fingerprint(self.step, where, found)

    def at_boundary(self) -> bool:
        """Between two steps: first what the bad one left behind, then, step by step, what the modules put out."""
        self._end_checks()
        if self._is_sent:
            return False
        p, model = self._progress, self._watch.model()
        if "parameters_after" not in self._looks:
            named = self._parameters()
            self._looks["parameters_after"], self._seen_after = BadAmong(named, _with_gradients(named)), p.completed
            if not self._looks.get("gradients"):
                self._looks["gradients"] = _gradients(named)
        found = any(checks.ready() and checks.first_bad() is not None for checks in self._rounds)
        if found or len(self._rounds) >= MOST_STEPS or model is None:
            self._done = True
            return False
        if self._graph is None and p.losses.proof is None:
            p.losses.proof, p.plain = self._at_next_backward, False
        self._rounds.append(OutputChecks(model, module_names(model), p.completed + 1))
        p.probe = self._rounds[-1] if p.probe is None else p.probe
        return True

    @guarded
    def _at_next_backward(self, tensors: object) -> None:
        """Reads the graph of a step after the bad one."""
        loss = tensors[0] if isinstance(tensors, (list, tuple)) and tensors else tensors
        if isinstance(loss, sys.modules["torch"].Tensor):
            self._graph = read_graph(loss, operators_of(loss), self._names, self._buffers())
            self._graph_step = self._progress.completed + 1

    def give_up(self) -> None:
        """The run ends: what is known now is all there will be."""
        self._end_checks()
        self._done = True
        if not self._is_sent:
            self._look_at_end()
            self._send()

    @guarded
    def _look_at_end(self) -> None:
        """If the step was not taken, the parameters are those that made the bad value. Bounded in work and in time."""
        if self._parameters_seen() is None:
            completed = self._progress.completed
            self._steps_after = max(0, completed - self.step)
            named = self._parameters()
            if sum(numbers_in(p) for _, p in named if p.is_cpu) <= MOST_AT_END:
                is_late = completed >= self.step  # its row was read late
                self._looks["parameters_after" if is_late else "parameters_before"] = BadAmong(named)
                self._seen_after = completed if is_late else self._seen_after
        until = time.monotonic() + WAIT_AT_END_S
        while not self._is_there() and time.monotonic() < until:
            time.sleep(0.005)

    def _end_checks(self) -> None:
        if self._progress.probe in self._rounds:
            self._progress.probe = None

    def _parameters(self) -> Named:
        model, primary = self._watch.model(), self._primary()
        named: Named = []
        if model is not None:
            self._classes = {name: type(module).__name__ for module, name in module_names(model).items()}
            found = [*model.named_parameters(remove_duplicate=False)]
            named = [*zip(without_wrappers(name for name, _ in found), (p for _, p in found), strict=True)]
        elif primary is not None:
            for number, group in enumerate(primary.param_groups):
                named += [(f'param_groups[{number}]["params"][{place}]', p) for place, p in enumerate(group["params"])]
        self._names, self._tied = {}, {}
        for name, p in named:
            first = self._names.setdefault(id(p), name)
            if first != name:
                self._tied.setdefault(first, []).append(name)
        return [(name, p) for name, p in named if self._names[id(p)] == name]

    def _averages(self, named: Named) -> Named:
        """What the optimizer keeps of the gradients of each parameter: a gradient that was no number stays in it."""
        state = getattr(self._primary(), "state", None)
        kept = ((name, state.get(p)) for name, p in named) if isinstance(state, Mapping) else ()
        averages = ((name, own.get(key)) for name, own in kept if isinstance(own, Mapping) for key in _AVERAGES)
        return [(name, one) for name, one in averages if isinstance(one, sys.modules["torch"].Tensor)]

    def _buffers(self) -> dict[int, str]:
        model = self._watch.model()
        buffers = {} if model is None else dict(model.named_buffers())
        return dict(zip(map(id, buffers.values()), without_wrappers(buffers), strict=True))

    def _primary(self) -> Optimizer | None:
        return self._progress.selection.primary

    # ---- on the sender's thread

    def began_earlier(self, step: int) -> None:
        """The loss of an earlier step was bad, too, and came from its device too late for that step."""
        self._looks.pop("parameters_after", None)
        if (before := self._looks.pop("parameters_before", None)) is not None:
            self._looks["parameters_after"] = before
        self._seen_after, self.step, self._batch = self.step - 1, step, None

    def send_if_ready(self) -> bool:
        """Sends the finding once all is known, or once nothing more is to be expected. True when it is sent."""
        late = time.monotonic() - self._since > PATIENCE_S
        if not self._is_sent and ((self._done and self._is_there() and self._rows_are_read()) or late):
            self._send()
        return self._is_sent

    def _is_there(self) -> bool:
        """Whether all that is on its way from a device has arrived."""
        parts = (*self._looks.values(), self._batch, self._graph, *self._rounds)
        return all(part is None or part.ready() for part in parts)

    def _rows_are_read(self) -> bool:
        """Whether the row of the bad step, and with it those before, has been read: they say when it began."""
        self._looks_for_rows += 1
        return self._watch.judged_upto >= self.step or self._looks_for_rows > MOST_LOOKS

    def _send(self) -> None:
        self._is_sent = True
        self._watch.report("nonfinite_loss", self._explains, self.step, self._evidence(), self._surroundings)

    def _history(self) -> list[dict[str, float]]:
        found = self._watch.history() if self.history is None else self.history
        bad = ((row, len(self._watch.bad_gradients(int(row["step"]))[0])) for row in found)
        return [
            {**row, "grad/nonfinite": float(count)} if count and "grad/norm" not in row else row for row, count in bad
        ]

    def _surroundings(self) -> NonfiniteEvidence:
        history = [entry for entry in self._history() if entry["step"] <= self.step]
        # The rate and the scale are mostly those of the step before, where the row of this one has not come; what it
        # made is not.
        newest = history[-1] if history else {}
        own = newest if newest.get("step") == self.step else {}
        return _known(
            history=history, lr=newest.get("lr"), loss_scale=newest.get("amp/scale"), loss=own.get("loss"),
            grad_norm=own.get("grad/norm"),
        )  # fmt: skip

    def _evidence(self) -> NonfiniteEvidence:
        identity, rounds = self._watch.sender.identity, [checks for checks in self._rounds if checks.ready()]
        found = self._surroundings() | _known(
            step=self.step, rank=identity.rank, world_size=identity.world_size if identity.world_size > 1 else None,
            loss_dtype=self._dtype or None, looked_after_step=self._seen_after if "parameters_after" in self._looks else None,
            steps_checked_after=sum(checks.was_called for checks in self._rounds), steps_after=self._steps_after or None,
            first_module=next((bad for checks in rounds if (bad := checks.first_bad()) is not None), None),
            later_batch=next((checks.batch.result() for checks in rounds if checks.batch and checks.batch.ready()), None),
            **{name: one.shown() for name, one in self._looks.items() if one.ready()},
        )  # fmt: skip
        if self._graph is not None and self._graph.ready():
            is_usable = self._graph_step == self.step or not found.get("parameters_after", {}).get("nonfinite")
            if operator := self._graph.first_bad() if is_usable else self._graph.only_maker():
                found["operator"] = operator
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

    def _first_step(self) -> int:
        return self._watch.sender.identity.start_step or 1

    def _parameters_seen(self) -> BadAmong | None:
        return self._looks.get("parameters_before", self._looks.get("parameters_after"))

    def _when_it_began(self, found: NonfiniteEvidence) -> NonfiniteEvidence:
        """The steps between which the NaN began, and the gradients that were bad then."""
        looked = self._parameters_seen()
        bad = [] if looked is None else looked.bad_and_trained()
        began = onset(
            found, self._history(), first_step=self._first_step(), watched="parameters_before" in self._looks,
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
        """What made the update of a step bad whose loss was finite. bad: gradients, or else the weights after them."""
        last = self.step - 1
        if bad and not began.get("measured") and had_finite_gradients(last, found):
            zero = zero_eps(self._primary())
            if zero is not None:
                return {**zero, "cause": "zero_eps", "began": {"first": last, "last": last, "by": "eps"}}
        left_out = None
        if began["first"] == began["last"] < self.step and began.get("by") != "weights":
            left_out = left_out_by_the_loss(bad, trained, self._classes)
        return {} if left_out is None else {**left_out, "cause": "left_out"}


def _known(**values: object) -> NonfiniteEvidence:
    """The evidence, without values that are None: not known."""
    return cast("NonfiniteEvidence", {name: value for name, value in values.items() if value is not None})


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _with_gradients(named: Named) -> set[int] | None:
    return {id(p) for _, p in named if p.grad is not None} or None


def _gradients(named: Named) -> BadAmong:
    return BadAmong([(name, p.grad) for name, p in named if p.grad is not None])
