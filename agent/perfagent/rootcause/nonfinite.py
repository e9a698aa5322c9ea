"""Finds where the first NaN or infinity of a bad step came from. Begun by a bad step, over after at most three more.

What can be known depends on when it is noticed. A loss on the CPU is seen before its backward pass: the parameters are
still those that made it, autograd's graph still holds what each operator read, and the batch is still in the hands of
the loop. A loss on a device is read some steps later: there the parameters and gradients of the next boundary are
looked at, and the outputs of all modules in the steps that follow. Everything on a device is counted there and read
when it has arrived: nothing waits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from perfagent.device import Reading, collect
from perfagent.rootcause.batch import Fingerprint, can_be_counted, in_callers
from perfagent.rootcause.containment import contained
from perfagent.rootcause.evidence import Evidence
from perfagent.rootcause.graph import COMPILED, first_bad_operator, leaves_of
from perfagent.rootcause.modules import OutputChecks, is_closed, walk
from perfagent.rootcause.onset import onset, reads_some_rows
from perfagent.rootcause.onset import sentence as onset_sentence
from perfagent.rootcause.spoilt_update import had_finite_gradients, left_out_by_the_loss, zero_eps
from perfagent.rootcause.spoilt_update import sentence as update_sentence
from perfagent.signals.batch_values import IGNORED
from perfagent.signals.sharding import local as local_part
from perfagent.signals.tensor_storage import is_lazy, made_of, numbers_in
from perfagent.stack_variables import variables_of
from perfagent.step.trace import entries_of

if TYPE_CHECKING:
    from perfagent.rootcause.investigator import Investigator

__all__ = ["Inquiry", "bad_loss_in", "calling", "left_by"]

MOST_STEPS = 3
"""Steps whose module outputs are checked."""
PATIENCE_S = 20.0
"""After so long what is known is told, whether or not training went on."""
MOST_AT_END = 2**28
"""Numbers of parameters on the CPU that are looked at when the run ends: 0.1 s or so."""
WAIT_AT_END_S = 0.25
MOST_LOOKS = 3
"""Ticks of the sender's thread for which the row of the bad step is waited for."""
SHOWN = 16
MOST_FRAMES = 20
_ITSELF = "(the model itself)"
_AVERAGES = ("exp_avg", "momentum_buffer")
_BACK = "If the run still trains, its weights are damaged: stop it and go back to the last checkpoint before this step."
_FIXES = {
    "ignored_labels": "A mean over no label is 0 / 0. Look at what makes the labels: the text that masking looks for is missing, "
    "the answer was cut off (max_length), or the column is another. Leave such samples out before they are batched. If the "
    "optimizer took the step, the weights are damaged: go back to the last checkpoint before it.",
    "batch": "Look at the samples of that batch (its fingerprint and range are in the evidence) and at what reads and transforms "
    f"them; leave bad ones out, or mend them where they are loaded. {_BACK}",
    "zero_eps": "Keep the weights in float32 and compute in half precision (torch.autocast, with a GradScaler for float16), or "
    "pass eps=1e-4. A lower learning rate or clipping is no help. Start again from a checkpoint before this step.",
    "left_out": "A row of an attention in which every key is masked is the usual reason (its softmax is 0 / 0): let no sample be "
    "empty, leave one key of each row unmasked, or mask with torch.finfo(dtype).min instead of -inf. To leave a place out of the "
    f"loss, or to multiply it by zero, does not remove NaN. {_BACK}",
    "buffer": "Look at what wrote that buffer: one batch with a value that is no number spoils running statistics for good, also "
    f"where the loss stays finite. Take the buffer from a good checkpoint, or reset it. {_BACK}",
}
_LOADED = (
    "No step of this run made it: look at the checkpoint that the weights were loaded from (torch.isfinite over its state_dict), "
    "take an older one, or look at what initializes them."
)


class Inquiry:
    """One look into one bad step."""

    def __init__(self, investigator: Investigator, step: int, *, at_end: bool = False) -> None:
        self._investigator, self.step = investigator, step
        # of a loss that a guard raised at there may be no row: what it explains is then the crash
        self._explains = ["nonfinite_loss", "nonfinite_gradient", *(("process_crash",) if at_end else ())]
        self._progress = investigator.progress
        self._since = time.monotonic()
        self._before: _Nonfinite | None = None
        self._moments: _Nonfinite | None = None
        self._after: _Nonfinite | None = None
        self._gradients: _Nonfinite | None = None
        self._operator: dict[str, Any] | None = None
        self._batch: Fingerprint | None = None
        self._dtype = ""
        self._checks: OutputChecks | None = None
        self._rounds: list[OutputChecks] = []
        self._steps_looked_at = self._steps_after = self._looks_for_rows = 0
        self._seen_after = step
        self._done = self._told = False
        self._names: dict[int, str] = {}  # shared weights go by their first name
        self._tied: dict[str, list[str]] = {}  # the first name of such a weight -> the others
        self._classes: dict[str, str] = {}
        self._rate: float | None = None
        self.history: list[dict[str, float]] | None = None  # as it was when the row of the bad step came

    # ---- on the training thread

    def before_backward(self, loss: Any, frame: FrameType | None = None) -> None:
        """The loss is known to be bad and nothing has followed from it yet. frame: whose variables may hold the batch,
        and its callers'; by default the caller's."""
        self._dtype = str(loss.dtype).removeprefix("torch.")
        self._rate = self._learning_rate()
        named = self._parameters()
        self._before = _Nonfinite(named, leaves_of(loss))
        if self._before.ready() and self._before.shown()["nonfinite"]:
            self._moments = _Nonfinite(self._averages(named))
        entries = entries_of(self._progress.trace)
        samples = next((entry[4][0] for entry in entries if len(entry) > 4 and isinstance(entry[4], tuple)), None)
        where, found = in_callers(samples, frame or sys._getframe(1))
        if found:
            self._batch = Fingerprint(self.step, where, found)
        self._operator = first_bad_operator(loss, self._names, self._buffers())

    def at_boundary(self) -> bool:
        """Between two steps: first what the bad one left behind, then, step by step, what the modules put out."""
        if self._told:
            self._take_off()
            return False
        if self._after is None:
            named = self._parameters()
            self._after = _Nonfinite(named, {id(p) for _, p in named if p.grad is not None} or None)
            self._gradients = _Nonfinite([(name, p.grad) for name, p in named if p.grad is not None])
            self._seen_after = self._progress.completed
        checks = self._checks
        if checks is not None:
            checks.remove()
            checks.collect()
            self._rounds.append(checks)
            self._checks = None
            if checks.ready():
                checks.settle()
        model = self._investigator.model()
        found = any(checks.ready() and checks.first_bad() is not None for checks in self._rounds)
        if found or self._steps_looked_at >= MOST_STEPS or model is None:
            self._done = True
            return False
        self._steps_looked_at += 1
        self._checks = OutputChecks(model, self._progress.thread)
        self._checks.install(self._progress.completed + 1)
        return True

    def give_up(self) -> None:
        """The run ends: what is known now is all there will be."""
        self._take_off()
        self._done = True
        if self._told:
            return
        if self._before is None and self._after is None:
            self._look_at_end()
        self._tell()

    @contained
    def _look_at_end(self) -> None:
        """If the step was not taken, the parameters are those that made the bad value. Bounded in work and in time."""
        completed = self._progress.completed
        taken = completed >= self.step  # its row was read late
        self._steps_after = max(0, completed - self.step)
        if not taken:
            self._rate = self._learning_rate()
        named = self._parameters()
        if sum(numbers_in(p) for _, p in named if p.is_cpu) > MOST_AT_END:
            return
        looked = _Nonfinite(named)
        if taken:
            self._after, self._seen_after = looked, completed
        else:
            self._before = looked
        until = time.monotonic() + WAIT_AT_END_S
        while not looked.ready() and time.monotonic() < until:
            time.sleep(0.005)

    def _take_off(self) -> None:
        checks, self._checks = self._checks, None
        if checks is not None:
            checks.remove()

    def _parameters(self) -> list[tuple[str, Any]]:
        model = self._investigator.model()
        named: list[tuple[str, Any]] = []
        if model is not None:
            for module_name, module in walk(model):
                self._classes[module_name] = type(module).__name__
                parameters = (
                    module.named_parameters() if is_closed(module) else module.__dict__.get("_parameters", {}).items()
                )
                named += [(_joined(module_name, name), p) for name, p in parameters if p is not None]
        primary = self._progress.primary() if self._progress.primary is not None else None
        if not named and primary is not None:
            for number, group in enumerate(primary.param_groups):
                named += [(f"{place} of group {number}", p) for place, p in enumerate(group["params"])]
        self._names, self._tied = {}, {}
        for name, p in named:
            first = self._names.setdefault(id(p), name)
            if first != name:
                self._tied.setdefault(first, []).append(name)
        return [(name, p) for name, p in named if self._names[id(p)] == name]

    def _averages(self, named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """What the optimizer keeps of the gradients of each parameter, by the parameter's name: a gradient that was no
        number stays in it."""
        primary = self._progress.primary() if self._progress.primary is not None else None
        state = getattr(primary, "state", None)
        if not isinstance(state, Mapping):
            return []
        kept = ((name, state.get(p)) for name, p in named)
        return [
            (name, own[key])
            for name, own in kept
            if isinstance(own, Mapping)
            for key in _AVERAGES
            if isinstance(own.get(key), sys.modules["torch"].Tensor)
        ]

    def _buffers(self) -> dict[int, str]:
        model = self._investigator.model()
        return {
            id(buffer): _joined(module_name, name)
            for module_name, module in (walk(model) if model is not None else ())
            for name, buffer in module.__dict__.get("_buffers", {}).items()
            if buffer is not None
        }

    def _learning_rate(self) -> float | None:
        """Of the step in progress; None where it lies on a device."""
        primary = self._progress.primary() if self._progress.primary is not None else None
        rate = primary.param_groups[0].get("lr") if primary is not None and primary.param_groups else None
        if isinstance(rate, sys.modules["torch"].Tensor):
            return float(rate) if rate.is_cpu and rate.numel() == 1 else None
        return float(rate) if isinstance(rate, (int, float)) else None

    # ---- on the sender's thread

    def tell_if_ready(self) -> bool:
        """Sends the finding once all is known, or once nothing more is to be expected. True when it is sent."""
        if self._told:
            return True
        late = time.monotonic() - self._since > PATIENCE_S
        parts = [
            part
            for part in (self._before, self._moments, self._after, self._gradients, self._batch, *self._rounds)
            if part is not None
        ]
        if (self._done and all(part.ready() for part in parts) and self._rows_are_read()) or late:
            self._tell()
            return True
        return False

    def _rows_are_read(self) -> bool:
        """Whether the row of the bad step, and with it those before, has been read: they say when it began. Fast steps
        are over before the sender's thread drains the first of them."""
        if self._investigator.judged_upto < self.step:
            self._investigator.read_rows()
        self._looks_for_rows += 1
        return self._investigator.judged_upto >= self.step or self._looks_for_rows > MOST_LOOKS

    def _tell(self) -> None:
        self._told = True
        evidence = self._evidence()
        message = _sentence(evidence)
        if "began" in evidence:
            message = f"{message} {onset_sentence(evidence['began'], evidence)}".rstrip()
        message += _also(self._tied, message)
        data = {
            "rule": "nonfinite_loss", "explains": self._explains, "severity": "critical", "message": message,
            "since_step": self.step, "evidence": Evidence(evidence, self._when_sent), "fix": self._fix(evidence),
        }  # fmt: skip
        self._investigator.sender.event("finding", data, step=self.step)

    def _fix(self, found: dict[str, Any]) -> str:
        """What to do where the cause alone says it; "" where the rule's own advice fits."""
        first_step = self._investigator.sender.identity.start_step or 1
        if self.step == first_step and found.get("parameters_before", {}).get("nonfinite"):
            return _LOADED
        return _FIXES.get(found["cause"], "")

    @contained
    def _when_sent(self) -> dict[str, Any]:
        self._investigator.read_rows()
        return self._surroundings()

    def _surroundings(self) -> dict[str, Any]:
        """What the rows of the step and of those before it show."""
        history = self._investigator.history() if self.history is None else self.history
        history = [entry for entry in history if entry["step"] <= self.step]
        known = history[-1] if history else {}
        found: dict[str, Any] = {} if self._rate is None else {"lr": self._rate}
        # The rate and the scale are mostly those of the step before, where the row of this one has not come; what it
        # made is not.
        own = (("loss", "loss"), ("grad/norm", "grad_norm")) if known.get("step") == self.step else ()
        for name, shown in (("lr", "lr"), ("amp/scale", "loss_scale"), *own):
            if name in known:
                found.setdefault(shown, known[name])
        found["history"] = history
        return found

    def _evidence(self) -> dict[str, Any]:
        identity = self._investigator.sender.identity
        found: dict[str, Any] = {"step": self.step, "rank": identity.rank}
        if identity.world_size and identity.world_size > 1:
            found["world_size"] = identity.world_size
        found |= self._surroundings()
        if self._dtype:
            found["loss_dtype"] = self._dtype
        for part, shown in (
            (self._before, "parameters_before"), (self._after, "parameters_after"), (self._gradients, "gradients"),
            (self._moments or None, "optimizer_state"),
        ):  # fmt: skip
            if part is not None and part.ready():
                found[shown] = part.shown()
        if self._after is not None:
            found["looked_after_step"] = self._seen_after
        if self._operator is not None:
            found["operator"] = self._operator
        for checks in self._rounds:
            if checks.ready():
                checks.settle()
                bad, below = checks.first_bad(), checks.first_below()
                if bad is not None and "first_module" not in found:
                    found["first_module"] = bad
                if below is not None and "first_minus_infinity" not in found:
                    found["first_minus_infinity"] = below
                if checks.batch is not None and checks.batch.ready() and "later_batch" not in found:
                    found["later_batch"] = checks.batch.result()
        found["steps_checked_after"] = len(self._rounds)
        if self._steps_after:
            found["steps_after"] = self._steps_after
        if self._batch is not None and self._batch.ready():
            found["batch"] = self._batch.result()
        found |= _culprit(found, self._classes)
        return found | self._when_it_began(found)

    def _when_it_began(self, found: dict[str, Any]) -> dict[str, Any]:
        """Between which steps it began; and where the gradients of that step were measured, which of them were bad: what
        later steps show of parameters and modules is their consequence."""
        history = self._investigator.history() if self.history is None else self.history
        first_step = self._investigator.sender.identity.start_step or 1
        looked = self._before if self._before is not None else self._after
        bad = [] if looked is None else looked.bad_and_trained()
        began = onset(
            found,
            history,
            first_step=first_step,
            watched=self._before is not None,
            sparse=reads_some_rows(bad, self._classes),
        )
        if began is None:
            return {}
        more: dict[str, Any] = {"began": began}
        trained = looked.trained if looked is not None else []
        names = self._investigator.bad_gradients(began["first"]) if began.get("by") == "gradient" else []
        if names and began["first"] == began["last"]:
            of_gradients = _in_order(names, trained)
            more["gradients_began"] = {"step": began["first"], **of_gradients}
            more |= _of_gradients(of_gradients, self._classes)
        return more | self._spoilt(found, began, names or bad, trained)

    def _spoilt(
        self, found: dict[str, Any], began: dict[str, Any], bad: Sequence[str], trained: Sequence[str]
    ) -> dict[str, Any]:
        """What made the update of a step bad whose loss was finite, where that shows. bad: of the gradients, or else of the
        weights after them."""
        primary = self._progress.primary() if self._progress.primary is not None else None
        last = self.step - 1
        if bad and not began.get("measured") and had_finite_gradients(last, found):
            zero = zero_eps(primary)
            if zero is not None:
                return {"cause": "zero_eps", **zero, "began": {"first": last, "last": last, "by": "eps"}}
        left_out = None
        if began["first"] == began["last"] < self.step and began.get("by") != "weights":
            left_out = left_out_by_the_loss(bad, trained, self._classes)
        return {} if left_out is None else {"cause": "left_out", **left_out}


class _Nonfinite:
    """Which of some named tensors hold NaN or infinity: the largest magnitude of each, in one pass, perhaps not read
    yet.

    used: those that have gradients, by id(), where that is known.
    """

    def __init__(self, named: Iterable[tuple[str, Any]], used: set[int] | None = None) -> None:
        torch = sys.modules["torch"]
        groups: dict[tuple[Any, Any], list[tuple[str, Any]]] = {}
        self.count = 0
        self._order: list[str] = []
        self.trained: list[str] = []
        for name, tensor in named:
            parts = [*_counted(tensor)]
            for part in parts:
                groups.setdefault((part.device, part.dtype), []).append((name, part))
            if parts:
                self.count += 1
                self._order.append(name)
                if tensor.requires_grad and (used is None or id(tensor) in used):
                    self.trained.append(name)
        self._readings: list[tuple[list[tuple[str, Any]], Reading]] = []
        with torch.no_grad():
            for same in groups.values():
                largest = torch.stack(torch._foreach_norm([tensor for _, tensor in same], float("inf")))
                # 1e39 is no inf there
                reading = collect(largest if largest.dtype == torch.float64 else largest.float())
                if reading is not None:
                    # weak where it matters: a tensor on a device must not be kept for its name
                    kept = [(name, tensor if tensor.is_cpu else None) for name, tensor in same]
                    self._readings.append((kept, reading))
        self._bad: list[dict[str, Any]] | None = None
        if all(reading.ready() for _, reading in self._readings):
            self._settle()  # before the optimizer changes what lies on the CPU

    def ready(self) -> bool:
        """Never blocks."""
        return self._bad is not None or all(reading.ready() for _, reading in self._readings)

    def _settle(self) -> None:
        torch = sys.modules["torch"]
        self._bad = []
        known: set[str] = set()  # one with several parts is one
        for named, reading in self._readings:
            for (name, tensor), largest in zip(named, reading.values(), strict=True):
                if largest - largest == 0.0 or name in known:
                    continue
                known.add(name)
                entry: dict[str, Any] = {"name": name}
                if tensor is not None and len(self._bad) < SHOWN:
                    bad = int((~torch.isfinite(tensor)).sum())
                    entry |= {
                        "nonfinite": bad,
                        "share": bad / tensor.numel(),
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                    }
                    entry["shape"] = [int(size) for size in tensor.shape]
                self._bad.append(entry)
        self._readings = []
        places = {name: place for place, name in enumerate(self._order)}  # they were read by device and type
        self._bad.sort(key=lambda entry: places[entry["name"]])

    def __bool__(self) -> bool:
        """Whether there was anything to look at."""
        return bool(self.count)

    def shown(self) -> dict[str, Any]:
        """{"of", "nonfinite", "first": [...], "last", "spread"?, "good_from"?}; once ready. spread: all that are
        trained are bad, and more than one."""
        if self._bad is None:
            self._settle()
        assert self._bad is not None
        last = self._bad[-1]["name"] if self._bad else None
        found = {"of": self.count, "nonfinite": len(self._bad), "first": self._bad[:SHOWN], "last": last}
        names = [entry["name"] for entry in self._bad]
        if len(names) > 1 and self.trained and set(self.trained) <= set(names):
            found["spread"] = True
        good_from = self._good_from(names)
        return found | ({"good_from": good_from} if good_from is not None else {})

    def bad_and_trained(self) -> list[str]:
        """Names; once ready."""
        bad = {entry["name"] for entry in self._bad or ()}
        return [name for name in self.trained if name in bad]

    def _good_from(self, bad: list[str]) -> str | None:
        """The first good one of those that are trained, where all before it are bad, more than one, and all after it
        good: so it is when a gradient becomes NaN on its way back. In the order of the model, which mostly is that of
        its forward pass."""
        after = self.trained[len(bad) : len(bad) + 1]
        return after[0] if after and len(bad) > 1 and bad == self.trained[: len(bad)] else None


def _counted(tensor: Any) -> Iterator[Any]:
    """What can be counted in a parameter or gradient: our part of a sharded one; of one with codes and scales the
    scales."""
    if is_lazy(tensor):
        return
    whole = local_part(tensor)
    # operators on the one that is excepted wait for the collective that fills it
    parts = [whole] if type(whole).__name__ == "AsyncCollectiveTensor" else made_of(whole)
    for part in parts:
        local = (
            part.detach() if part.layout is not sys.modules["torch"].sparse_coo else part.detach().coalesce().values()
        )
        if local.numel() and can_be_counted(local):
            yield local


def left_by(trace: TracebackType | None) -> list[FrameType]:
    """The functions that an exception left, the innermost first."""
    frames: list[FrameType] = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def calling(frame: FrameType | None) -> list[FrameType]:
    """The functions that are being executed, the innermost first."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def bad_loss_in(frames: Sequence[FrameType]) -> tuple[Any, FrameType | None]:
    """A loss on the CPU that is no number, among the variables of some functions: a tensor of one value with a graph
    behind it. And the function that it was found in."""
    torch: Any = sys.modules.get("torch")
    for frame in frames[:MOST_FRAMES] if torch is not None else ():
        with variables_of(frame) as variables:
            scalars = [
                value for _, value in variables
                if type(value) is torch.Tensor and value.numel() == 1 and value.is_cpu and value.grad_fn is not None
            ]  # fmt: skip
        bad = next((value for value in scalars if not bool(value.detach().isfinite().all())), None)
        if bad is not None:
            return bad, frame
    return None, None


def _joined(module: str, parameter: str) -> str:
    parameter = parameter.removeprefix("_orig_mod.").removeprefix("module.")
    return f"{module}.{parameter}" if module else parameter


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _culprit(found: dict[str, Any], classes: dict[str, str]) -> dict[str, Any]:
    """Module and parameter to look at, and how that is known: the strongest of what was found."""
    before, after, gradients = (found.get(key, {}) for key in ("parameters_before", "parameters_after", "gradients"))
    operator, first = found.get("operator"), found.get("first_module")
    made: dict[str, Any] = operator if operator is not None and "operator" in operator else {}
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
        return _named(_owner(operator["buffer"]), classes, buffer=operator["buffer"], cause="buffer")
    ignored = _ignored_labels(found)
    if ignored is not None:
        return ignored
    batch = _in_batch(found, ("batch",) if made else ("batch", "later_batch"))
    # else it is padded with NaN, which the loop or the model leaves out
    if batch is not None and "inputs_known" not in made:
        return batch
    # the module was fed from parameters that the bad step had spoilt
    later = bool(made) and bool(after.get("nonfinite"))
    if first is not None and not spread and not later:
        own = next(
            (entry["name"] for entry in after.get("first", ()) if _owner(entry["name"]) == first["module"]), None
        )
        return _named(first["module"], classes, cause="module", **({"parameter": own} if own else {}))
    if operator is not None:
        own = operator.get("of")
        return _named(_owner(own), classes, cause="operator") if own is not None else _between(operator, classes)
    if first is not None:
        return _named(first["module"], classes, cause="spread")
    if after.get("nonfinite") and spread:
        name = after["first"][0]["name"]
        return _named(_owner(name), classes, parameter=name, cause="spread")
    if after.get("nonfinite"):
        return _of_parameters(after, classes, backward=math.isfinite(found.get("loss", math.nan)))
    if gradients.get("nonfinite"):
        name = gradients["last"]
        return _named(_owner(name), classes, parameter=name, cause="gradient")
    return {"cause": "unknown"}


def _between(operator: dict[str, Any], classes: dict[str, str]) -> dict[str, Any]:
    """An operator that uses no parameter: between which two modules that do, and in which both of them lie."""
    around = {f"{side}_module": _owner(operator[side]) or _ITSELF for side in ("after", "before") if side in operator}
    if len(around) < 2:
        return {"cause": "operator", **around}
    shared: list[str] = []
    for one, other in zip(around["after_module"].split("."), around["before_module"].split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    while shared and classes.get(".".join(shared)) in ("ModuleList", "ModuleDict"):  # these have no forward pass
        shared.pop()
    return _named(".".join(shared), classes, cause="operator", **around) if shared else {"cause": "operator", **around}


def _of_parameters(bad: dict[str, Any], classes: dict[str, str], *, backward: bool) -> dict[str, Any]:
    """Some parameters are bad and others are not. backward: the loss that they come from was finite."""
    if backward and "good_from" in bad:
        name = bad["last"]
        return _named(_owner(name), classes, parameter=name, good_from=bad["good_from"], cause="backward")
    name = bad["first"][0]["name"]
    return _named(_owner(name), classes, parameter=name, cause="parameter")


def _in_order(names: Sequence[str], model: Sequence[str]) -> dict[str, Any]:
    """Gradients that were bad in one step, as `_Nonfinite.shown` tells them. model: the parameters that have
    gradients, in their order."""
    places = {name: place for place, name in enumerate(model)}
    bad = sorted(names, key=lambda name: places.get(name, len(places)))
    found = {
        "of": len(model),
        "nonfinite": len(bad),
        "first": [{"name": name} for name in bad[:SHOWN]],
        "last": bad[-1],
    }
    follows = [*model[len(bad) : len(bad) + 1]]
    return found | ({"good_from": follows[0]} if len(bad) > 1 and follows and bad == [*model[: len(bad)]] else {})


def _of_gradients(bad: dict[str, Any], classes: dict[str, str]) -> dict[str, Any]:
    """The culprit, by the gradients of the step in which it began."""
    if "good_from" in bad:
        return _of_parameters(bad, classes, backward=True)
    return _named(_owner(bad["last"]), classes, parameter=bad["last"], cause="gradient")


def _in_batch(found: dict[str, Any], batches: Iterable[str], *, below: bool = False) -> dict[str, Any] | None:
    """A tensor of a batch that holds NaN or +inf; below: or nothing worse than -inf, which is what masks hold."""
    for batch in batches:
        for tensor in found.get(batch, {}).get("tensors", ()):
            if tensor.get("nonfinite", 0) > (0 if below else tensor.get("minus_infinite", 0)):
                return {"cause": "batch", "batch_tensor": tensor["name"], "batch_step": found[batch]["step"]}
    return None


def _ignored_labels(found: dict[str, Any]) -> dict[str, Any] | None:
    """A tensor of whole numbers in the batch that are all the label which the loss leaves out."""
    for tensor in found.get("batch", {}).get("tensors", ()):
        if tensor["dtype"] in ("int64", "int32") and tensor.get("min") == tensor.get("max") == IGNORED:
            return {"cause": "ignored_labels", "batch_tensor": tensor["name"], "batch_step": found["batch"]["step"]}
    return None


def _named(module: str, classes: dict[str, str], **more: Any) -> dict[str, Any]:
    found = {"module": module or _ITSELF, **more}
    if module in classes:
        found["module_class"] = classes[module]
    return found


def _also(tied: Mapping[str, Sequence[str]], said: str) -> str:
    """The other names of the weights, or of their modules, that a sentence names."""
    named = [first for first in tied if repr(first) in said or repr(_owner(first)) in said]
    return "".join(f" {first!r} is also {', '.join(map(repr, tied[first]))}." for first in named[:3])


def _sentence(found: dict[str, Any]) -> str:
    step, cause, module = found["step"], found["cause"], found.get("module", "")
    kind = f" ({found['module_class']})" if "module_class" in found else ""
    if cause == "parameter":
        more = ", before that step's backward pass" if found.get("parameters_before", {}).get("nonfinite") else ""
        return f"The first non-finite parameter is {found['parameter']!r} of module {module!r}{kind}{more}."
    if cause == "backward":
        after = _owner(found["good_from"]) or _ITSELF
        where = f"lies between {module!r}{kind} and {after!r}" if after != module else f"follows {found['parameter']!r}"
        last, good = found["parameter"], found["good_from"]
        order = f"in the model's order, parameters up to {last!r} are non-finite, those from {good!r} on are good"
        when = f"In step {found['gradients_began']['step']} the" if "gradients_began" in found else "The"
        return f"{when} gradients came back non-finite from what {where}: {order}."
    if cause == "ignored_labels":
        labels = f"every label of the batch of step {found['batch_step']} is {IGNORED} ({found['batch_tensor']!r})"
        return f"No label counts: {labels}."
    if cause in ("zero_eps", "left_out"):
        return update_sentence(found)
    if cause == "batch":
        return f"The batch of step {found['batch_step']} itself holds non-finite values, in {found['batch_tensor']!r}."
    if cause == "buffer":
        read = f"the operator {found['operator']['read_by']} read it there first"
        return f"In step {step} a non-finite value was in the buffer {found['buffer']!r} of module {module!r}{kind}; {read}."
    if cause == "operator":
        return _sentence_of_operator(found, module, kind)
    if cause == "spread" and found.get("parameters_before", {}).get("nonfinite"):
        ranks = " on this rank or another" if found.get("world_size", 1) > 1 else ""
        every = _every(found["parameters_before"]).capitalize()
        return f"{every} was non-finite before step {step}'s backward pass: an earlier update had spoilt them{ranks}."
    if cause in ("module", "spread") and "first_module" in found:
        first = found["first_module"]
        said = f"The first module with a non-finite output is {module!r}{kind}, {_output(first)}"
        if cause == "spread":
            return f"{said}. By then {_every(found['parameters_after'])} was non-finite, so step {step} may have begun elsewhere."
        return f"{said}."
    if cause == "spread":
        return f"After step {found['looked_after_step']} {_every(found['parameters_after'])} was non-finite."
    if cause == "gradient" and "gradients_began" in found:
        return _sentence_of_gradients(found["gradients_began"], step, module, kind)
    if cause == "gradient":
        bad, of = found["gradients"]["nonfinite"], found["gradients"]["of"]
        nearest = f"nearest to the loss is that of {found['parameter']!r}"
        return f"In step {step} {bad} of {of} gradients were non-finite; {nearest}. Parameters stayed finite."
    return _sentence_of_nothing(found, step)


def _sentence_of_gradients(bad: dict[str, Any], step: int, module: str, kind: str) -> str:
    """Of a step whose loss was finite. step: the one that was looked into."""
    when = f"It began in step {bad['step']}: there" if bad["step"] != step else f"In step {step}"
    if bad["nonfinite"] == 1:
        whose = f"{bad['last']!r} of module {module!r}{kind}"
        return f"{when} the gradient of {whose}, and no other, was non-finite, though the loss was finite."
    nearest = f"the one nearest to the loss is that of {bad['last']!r}"
    return f"{when} {bad['nonfinite']} of {bad['of']} gradients were non-finite, though the loss was finite; {nearest}."


def _every(bad: dict[str, Any]) -> str:
    return "every parameter" if bad.get("nonfinite") == bad.get("of") else "every parameter that is trained"


def _sentence_of_operator(found: dict[str, Any], module: str, kind: str) -> str:
    operator = found["operator"]
    if operator.get("operator") == COMPILED:
        seen = "what torch.compile compiled put out the first non-finite value that can be seen"
        return f"In step {found['step']} {seen}. With TORCH_COMPILE_DISABLE=1 the operator inside of it is named."
    where = _where(found, module, kind)
    if "operator" not in operator:
        read = f"the operator {operator['read_by']} {where} read it first"
        return f"In step {found['step']} a non-finite value came from outside; {read}."
    read = f"; {operator['read_by']} read it" if "read_by" in operator else ""
    given = "from finite inputs"
    if operator.get("inputs_unseen"):
        said = f"the operator {operator['operator']} {where} put out the first non-finite value that can be seen{read}"
        mask = ": it makes NaN where a mask leaves nothing of a row" if operator["operator"].endswith("Softmax") else ""
        return f"In step {found['step']} {said}{mask}."
    if "minus_infinity" in operator:
        given = f"from the -inf that {operator['minus_infinity'].get('from', 'it was given')}"
        given += " had made" if "from" in operator["minus_infinity"] else ""
    what = f"the first non-finite value ({operator['made']})" if "made" in operator else "the first non-finite value"
    made = f"the operator {operator['operator']} {where} made {what} {given}"
    return f"In step {found['step']} {made}{read}."


def _where(found: dict[str, Any], module: str, kind: str) -> str:
    """In which module the operator is, and between which parameters' modules, as far as that says more; a model that
    holds parameters itself has no names of modules to show."""
    inside = f"in module {module!r}{kind}" if module and module != _ITSELF else ""
    sides = [found[f"{side}_module"] for side in ("after", "before") if f"{side}_module" in found]
    if not sides:
        return inside or ("in the model itself" if module else "in the loss function")
    names = [repr(side) for side in sides]
    if _ITSELF in sides:
        names = [f"parameter {found['operator'][side]!r}" for side in ("after", "before") if side in found["operator"]]
    if len(names) == 1:
        side = "after" if "after_module" in found else "before"
        return f"{side} {names[0]}" if _ITSELF in sides else f"{side} module {names[0]}"
    if names[0] == names[1]:
        return inside or f"between two uses of {names[0]}"
    return f"{inside} between {names[0]} and {names[1]}".lstrip()


def _output(first: dict[str, Any]) -> str:
    inputs = "its inputs were finite" if first["inputs_finite"] else "its inputs were non-finite already"
    of = f"{100 * first['share']:.3g} % of {first.get('dtype', 'its values')} {first.get('shape', '')}"
    return f"in step {first['step']}: {of}; {inputs}"


def _sentence_of_nothing(found: dict[str, Any], step: int) -> str:
    checked = found["steps_checked_after"]
    said = f"Nothing of what was looked at was non-finite; no step followed step {step}."
    if checked:
        good = f"Parameters, gradients and the outputs of the next {checked} steps were finite"
        said = f"{good}: what was bad in step {step} did not come back."
    elif "steps_after" in found:
        finite = (
            f": after step {found['looked_after_step']} the parameters were finite"
            if "looked_after_step" in found
            else ""
        )
        said = f"Step {step} was looked into when it was over and {found['steps_after']} more were{finite}."
    batch = _in_batch(found, ("batch", "later_batch"), below=True)
    if batch is not None:
        return f"{said} -inf, which masks hold, was in {batch['batch_tensor']!r} of the batch of step {batch['batch_step']}."
    first = found.get("first_minus_infinity")
    return f"{said} -inf, which masks hold, was put out by module {first['module']!r}." if first is not None else said
