"""Records one training step: which operators ran forward and backward, and what autograd's graph knows about them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from perfagent.boundary.dynamo import keep_out_of_frames, not_traced, untraced
from perfagent.boundary.guard import failed
from perfagent.device import accelerator
from perfagent.measure.compiled import compiled, traces_backward
from perfagent.measure.flops.autograd_graph import Convolution, in_graph
from perfagent.measure.flops.op_reading import Operators, Results
from perfagent.measure.flops.op_recorder import Recording
from perfagent.step.state import now

if TYPE_CHECKING:
    from torch import nn
    from torch._C._autograd import ProfilerEvent
    from torch.utils.hooks import RemovableHandle

    from perfagent.step.state import StepState

__all__ = ["FlopCount", "Size"]

Size = tuple[int, ...]
"""Samples and tokens of a whole step; without tokens, followed by the shape of a sample."""
Args = ParamSpec("Args")
Answer = TypeVar("Answer")
_PART = 64
"""Graph numbers between two reads of a backward pass's recording: some 1000 events, 0.5 MB."""
_EVERY = 32
"""Calls of modules between two reads of a forward pass's recording (0.1 to 0.2 ms)."""


def _ours(
    method: Callable[Concatenate[FlopCount, Args], Answer],
) -> Callable[Concatenate[FlopCount, Args], Answer | None]:
    """Adds a method's time to the cost of the look. An exception in it ends the look, and not the training."""

    def call(self: FlopCount, /, *args: Args.args, **kwargs: Args.kwargs) -> Answer | None:
        began = now()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self.failed = True
            failed(__name__, error)
            return None
        finally:
            self.cost_ns += now() - began

    return untraced(call)


class FlopCount:
    """Records one step: a task between two steps (causes/investigator.py), and the probe of the root model's calls.

    operators: what ran in the calls; by False for forward passes, True for backward passes.
    nodes, types: what autograd's graph knows about some operators, by their numbers in it. results: of convolutions.

    The recording is read while a call goes on, some hundred operators at a time, on the thread that runs them: in hooks
    of some of the graph's nodes, and in a hook of all modules. Read when the call was over, one array of 8 MB for 306
    tensors made glibc keep 20 MB more for good: 27 to 29 MB in all, now 4 to 12. Ending the recording inside a long
    backward pass was tried as well: the profiler's callbacks belong to the thread and the pass that began them, handles
    leaked and later events were lost.
    """

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self._module_calls = 0
        self.step = 0
        self.size: Size | None = None
        self.operators: dict[bool, Operators] = {}
        self.nodes: dict[int, list[Convolution | bool]] = {}
        self.types: dict[int, str] = {}
        self.results: Results = {}
        self.half: str | None = None
        self.over = False
        self.failed = False  # by an error of ours, or a profiler of the script that started during a call
        self.broken_off = False
        self.cost_ns = 0
        self._recording: Recording | None = None  # set while our profiler is on
        self._reads = Operators(backward=False)  # what the current recording is read into
        self._reading = Lock()
        self._hooks: list[RemovableHandle] = []
        self._undo: Callable[[], None] | None = None

    def at_boundary(self) -> bool:
        """Begins at the end of one step and ends at the end of the next."""
        if self._undo is not None:
            self.close()
            return False
        p = self._progress
        if p.probe is not None or sys.modules["torch"].autograd._profiler_enabled():
            self.over = True
            return False
        self.step = p.completed + 1
        p.probe = self
        self._watch_backward()
        return True

    def close(self) -> None:
        """Removes everything; from here on the results belong to another thread."""
        if self._undo is not None:
            self._undo()
        if self._progress.probe is self:
            self._progress.probe = None
        if self._recording is not None:  # during a call, whose rest will not be read
            self.broken_off = True
        self.over = True

    def _watch_backward(self) -> None:
        autograd: Any = sys.modules["torch.autograd"]
        original = autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._progress.thread != get_ident():  # another training in the same process
                return original(*args, **kwargs)
            self._read_graph(args[0] if args else kwargs.get("tensors"))
            if self._progress.backward_depth:
                return original(*args, **kwargs)
            try:
                made = self._recorded(original, args, kwargs, backward=True)
                if kwargs.get("create_graph", args[3] if len(args) > 3 else False) and True in self.operators:
                    self.operators[True].unknown.add(
                        "second derivatives"
                    )  # nothing distinguishes them from recomputation
                return made
            finally:
                while self._hooks:
                    self._hooks.pop().remove()

        autograd.backward = not_traced(backward)
        keep_out_of_frames()

        def undo() -> None:
            if autograd.backward is backward:
                autograd.backward = original
            self._undo = None

        self._undo = undo

    @_ours
    def _read_graph(self, roots: Any) -> None:
        if self.over or self.failed:
            return
        parts, hooks = set(), not (compiled() or traces_backward())
        for node, kind, known in in_graph(roots if isinstance(roots, (list, tuple)) else [roots]):
            number = node._sequence_nr()
            if hooks and number // _PART not in parts:
                parts.add(number // _PART)
                self._hooks.append(node.register_prehook(self._read_in_pass))
            self.types.setdefault(number, kind)
            same = self.nodes.setdefault(number, [])
            if known is not None and known not in same:
                same.append(known)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of the root model and records it."""
        if compiled():
            return self._recorded(call, args, kwargs, backward=False)
        hook = sys.modules["torch"].nn.modules.module.register_module_forward_hook(self._called)
        try:
            return self._recorded(call, args, kwargs, backward=False)
        finally:
            hook.remove()

    @_ours
    def _called(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """Called after each module's call in a call of the model."""
        torch = sys.modules["torch"]
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            tensors = [one for one in (*inputs[:1], module.weight, output) if isinstance(one, torch.Tensor)]
            if len(tensors) == 3:  # a subclass may take and return what it likes
                x, weight, out = (tuple(one.shape) for one in tensors)
                self.results.setdefault((x, weight), {})[out] = module.transposed
        recording = self._recording
        if recording is not None and recording.thread == get_ident():
            self._module_calls += 1
            if self._module_calls % _EVERY == 0:
                self._read(recording.so_far())

    @_ours
    def _read_in_pass(self, *_: object) -> None:
        """Called during a backward pass, before a node of its graph runs, on whatever thread. If several threads come
        here at once, only one of them reads."""
        recording = self._recording
        if recording is not None and self._reading.acquire(blocking=False):
            try:
                self._read(recording.so_far())
            finally:
                self._reading.release()

    def _read(self, threads: list[list[ProfilerEvent]]) -> None:
        if not (self.over or self.failed or self.broken_off):  # over: the run ended meanwhile
            for events in threads:
                self._reads.read(events)

    def _recorded(self, function: Callable[..., Any], args: Any, kwargs: Any, *, backward: bool) -> Any:
        recording = self._begin(args, kwargs, backward=backward)
        try:
            return function(*args, **kwargs)
        finally:
            if recording is not None:
                self._end(recording, backward=backward)

    @_ours
    def _begin(self, args: Any, kwargs: Any, *, backward: bool) -> Recording | None:
        if self.over or self.failed or self.broken_off or self._progress.completed >= self.step:
            return None
        if self._recording is not None:  # a backward pass within the root's own call
            return None
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled() or (not backward and _has_nested((*args, *kwargs.values()))):
            self.broken_off = True
            return None
        self.half = self.half or _autocast(torch)
        self._reads = self.operators.setdefault(backward, Operators(backward=backward))
        self._recording = Recording()
        return self._recording

    @_ours
    def _end(self, recording: Recording, *, backward: bool) -> None:
        self._recording = None
        threads = recording.end()
        self.failed = self.failed or recording.broken_off
        self._read(threads)
        self._reads.end()
        if not backward and not self.over:
            self._progress.probe = self  # for the next micro-batch's call


for _between in (FlopCount.call, FlopCount._recorded):
    not_traced(_between)  # if the model is compiled after its first steps, torch.compile traces the code around us


def _has_nested(inputs: Sequence[object]) -> bool:
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
