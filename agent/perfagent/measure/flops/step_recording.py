"""Records one training step: which operators ran forward and backward, and what autograd's graph knows about them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from perfagent.boundary.call_watch import replace
from perfagent.boundary.dynamo import compiled, keep_out_of_frames, not_traced, untraced
from perfagent.boundary.guard import failed
from perfagent.device import accelerator
from perfagent.measure.flops.op_reading import Convolution, Operators, Results, in_graph
from perfagent.measure.flops.op_recorder import Recording
from perfagent.measure.step_task import StepTask
from perfagent.step.state import now

if TYPE_CHECKING:
    from torch import nn

    from perfagent.step.state import StepState

__all__ = ["FlopCount", "Size"]

Size = tuple[int, ...]
"""Samples and tokens of a whole step; without tokens, followed by the shape of a sample."""
Args = ParamSpec("Args")


def _ours(method: Callable[Concatenate[FlopCount, Args], None]) -> Callable[Concatenate[FlopCount, Args], None]:
    """Adds a method's time to the cost of the look. An exception in it ends the look, and not the training."""

    def call(self: FlopCount, /, *args: Args.args, **kwargs: Args.kwargs) -> None:
        began = now()
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self.failed = True
            failed(__name__, error)
        finally:
            self.cost_ns += now() - began

    return untraced(call)


class FlopCount(StepTask):
    """Records one step, as the probe of the root model's calls.

    operators: what ran in the calls; by False for forward passes, True for backward passes.
    nodes, types: what autograd's graph knows about some operators, by their numbers in it. results: of the convolutions in
    modules that were called.
    failed: by an error of ours, or a profiler of the script that started during a call.
    """

    def __init__(self, progress: StepState) -> None:
        super().__init__(progress)
        self.size: Size | None = None
        self.operators: dict[bool, Operators] = {}
        self.nodes: dict[int, list[Convolution | bool]] = {}
        self.types: dict[int, str] = {}
        self.results: Results = {}
        self.half: str | None = None
        self.failed = self.broken_off = False
        self._recording: Recording | None = None  # set while our profiler is on
        self._is_backward = False  # what it records
        self._undo: Callable[[], None] | None = None

    def _goes_on(self) -> bool:
        p, torch = self._progress, sys.modules["torch"]
        if self.step or p.probe is not None or torch.autograd._profiler_enabled():
            return False
        self.step, p.probe = p.completed + 1, self
        self._undo = replace(torch.autograd, "backward", self._backward_begins, self._backward_ends)
        keep_out_of_frames()
        return True

    def close(self) -> None:
        """From here on the results belong to another thread."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._progress.probe is self:
            self._progress.probe = None
        if self._recording is not None:  # during a call, whose rest will not be read
            self.broken_off = True
        self.over = True

    @_ours
    def _backward_begins(self, /, tensors: Any, *args: object, **kwargs: object) -> None:
        if self._is_elsewhere() or self.over or self.failed:
            return
        for node, kind, known in in_graph(tensors if isinstance(tensors, (list, tuple)) else [tensors]):
            number = node._sequence_nr()
            self.types.setdefault(number, kind)
            same = self.nodes.setdefault(number, [])
            if known is not None and known not in same:
                same.append(known)
        if self._progress.backward_depth or not self._begin(backward=True):
            return
        if kwargs.get("create_graph", args[2:3] == (True,)):
            self.operators[True].unknown.add("second derivatives")  # nothing distinguishes them from recomputation

    @_ours
    def _backward_ends(self) -> None:
        if self._is_backward and not (self._is_elsewhere() or self._progress.backward_depth):
            self._end()

    def _is_elsewhere(self) -> bool:
        """Whether this is the thread of another training in the same process."""
        return self._progress.thread != get_ident()

    def call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a call of the root model and records it."""
        hook = None
        if not compiled():
            hook = sys.modules["torch"].nn.modules.module.register_module_forward_hook(self._called)
        self._forward_begins((*args, *kwargs.values()))
        try:
            return call(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
            self._forward_ends()

    @_ours
    def _forward_begins(self, inputs: Iterable[object]) -> None:
        if _has_nested(inputs):
            self.broken_off = True
        self._begin(backward=False)

    @_ours
    def _forward_ends(self) -> None:
        if self._recording is not None and not self._is_backward:
            self._end()
            if not self.over:
                self._progress.probe = self  # for the next micro-batch's call

    @_ours
    def _called(self, module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        """Notes the result of a convolution in a call of the model."""
        torch = sys.modules["torch"]
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            tensors = [one for one in (*inputs[:1], module.weight, output) if isinstance(one, torch.Tensor)]
            if len(tensors) == 3:  # a subclass may take and return what it likes
                x, weight, out = (tuple(one.shape) for one in tensors)
                self.results.setdefault((x, weight), Counter())[out, module.transposed] += 1

    def _begin(self, *, backward: bool) -> bool:
        """Returns whether a recording has begun: not so for a backward pass within the root's own call."""
        if self.over or self.failed or self.broken_off or self._progress.completed >= self.step or self._recording:
            return False
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled():
            self.broken_off = True
            return False
        self.half = self.half or _autocast(torch)
        self.operators.setdefault(backward, Operators(backward=backward))
        self._recording, self._is_backward = Recording(), backward
        return True

    def _end(self) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        threads = recording.end()
        self.failed = self.failed or recording.broken_off
        if not (self.over or self.failed or self.broken_off):  # over: the run ended meanwhile
            self.operators[self._is_backward].read(threads)


not_traced(FlopCount.call)  # if the model is compiled after its first steps, torch.compile traces the code around us


def _has_nested(inputs: Iterable[object]) -> bool:
    """True if there are nested tensors: torch asks every operator's tensors for their shapes, which these lack, and prints
    a page for each operator. Torch numbers the lengths of jagged ones, and has one such number of its own."""
    jagged = getattr(sys.modules.get("torch.nested._internal.nested_tensor"), "_tensor_id_counter", 0)
    return jagged > 1 or any(getattr(one, "is_nested", False) is True for one in inputs)


def _autocast(torch: Any) -> str | None:
    """Returns the dtype of autocast if it is on."""
    for device in (accelerator().kind, "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
