"""Records one training step: which operators ran forward and backward, and what autograd's graph knows about them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

from perfagent.boundary.call_slot import CALL, copy_that_calls
from perfagent.boundary.dynamo import keep_out_of_frames, not_traced, untraced
from perfagent.boundary.guard import by_signal, failed
from perfagent.device import accelerator
from perfagent.signals.compiled import compiled, traces_backward
from perfagent.signals.convolutions import Convolution
from perfagent.signals.flops.autograd_graph import in_graph
from perfagent.signals.flops.op_callbacks import any_here
from perfagent.signals.flops.op_formulas import Operators
from perfagent.signals.flops.op_recorder import Recording, holds_nested
from perfagent.signals.modules import left_alone
from perfagent.step.state import now

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["FlopCount", "Size"]

Size = tuple[int, ...]
"""Samples and tokens of a whole step; without tokens, followed by the shape of a sample."""
_PART = 64
"""Graph numbers between two reads of a backward pass's recording: some 1000 events, 0.5 MB."""
_EVERY = 32
"""Calls of the model's innermost modules between two reads of a forward pass's recording (0.1 to 0.2 ms)."""
_MOST_PLACES = 512
"""Most innermost modules whose calls are replaced; of more, every n-th, since that takes microseconds per module."""
_ATTENTION = 4
"""A call of attention counts as so many calls."""


class FlopCount:
    """Records one step: a task between two steps (rootcause/investigator.py), and the probe of the root model's calls.

    operators: what ran in the calls; by False for forward passes, True for backward passes.
    nodes, types: what autograd's graph knows about some operators, by their numbers in it.

    The recording is read while a call goes on, some hundred operators at a time, on the thread that runs them: a model
    of 300 tensors would leave 15 MB of it (reading takes 13 ms, a third of what recording takes). Python runs there in
    hooks of some of the graph's nodes, and in the calls of the model's innermost modules and of
    `scaled_dot_product_attention`.

    Read when the call was over, one array of 8 MB for 306 tensors made glibc keep 20 MB more for good: 27 to 29 MB in
    all, now 4 to 12 (a loop over 150 time steps 92, now 10). `malloc_trim` after the step takes 3 ms during which
    training waits, and 100 steps later 28 of 42 MB are back. Ending the recording inside a long backward pass was
    tried as well: the profiler's callbacks belong to the thread and the pass that began them, handles leaked and later
    events were lost.
    """

    def __init__(self, progress: StepState, model: Any = None) -> None:
        """model: the root; the calls of its modules are replaced meanwhile."""
        self._progress = progress
        self._model = (lambda: None) if model is None else ref(model)
        self._innermost: list[Any] | None = None  # innermost modules of the model, or every n-th of them
        self._calls = 0  # calls of these since the recording was last read
        self.step = 0
        self.size: Size | None = None
        self.operators: dict[bool, Operators] = {}
        self.nodes: dict[int, list[Convolution | bool]] = {}
        self.types: dict[int, str] = {}
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = []  # of attention: shapes, causality
        self.half: str | None = None
        self.over = self.failed = False
        self.broken_off = False  # during the step
        self.gave_way = False  # stopped during a call for a profiler of the script or a nested tensor
        self.cost_ns = 0
        self._recording: Recording | None = None  # set while our profiler is on
        self._reads = Operators(backward=False)  # what the current recording is read into
        self._reading = Lock()
        self._hooks: list[Any] = []
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
        self._innermost = []
        self.over = True

    def _watch_backward(self) -> None:
        autograd: Any = sys.modules["torch.autograd"]
        original = autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._progress.thread != get_ident():  # another training in the same process
                return original(*args, **kwargs)
            if not (self.over or self.failed):
                self._read_graph(args[0] if args else kwargs.get("tensors"))
            if self._progress.backward_depth:
                return original(*args, **kwargs)
            graph = bool(kwargs.get("create_graph", args[3] if len(args) > 3 else False))
            try:
                return self._recorded(original, args, kwargs, backward=True, graph=graph)
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

    @untraced
    def _read_graph(self, roots: Any) -> None:
        began = now()
        try:
            parts, hooks = set(), not (compiled() or traces_backward())
            for node, kind, told in in_graph(roots if isinstance(roots, (list, tuple)) else [roots]):
                number = node._sequence_nr()
                if hooks and number // _PART not in parts:
                    parts.add(number // _PART)
                    self._hooks.append(node.register_prehook(self._read_in_pass))
                self.types.setdefault(number, kind)
                same = self.nodes.setdefault(number, [])
                if told is not None and told not in same:
                    same.append(told)
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
        self.cost_ns += now() - began

    def _fail(self, error: Exception) -> None:
        if by_signal(error):
            self.broken_off = True
            raise error
        self.failed = True
        failed(__name__, error)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of the root model and records it."""
        functional: Any = sys.modules["torch.nn.functional"]
        attention = functional.scaled_dot_product_attention
        if compiled():
            return self._recorded(call, args, kwargs, backward=False)
        functional.scaled_dot_product_attention = self._noting(attention)
        standing: list[tuple[Any, Any]] = []
        try:
            self._stand(standing)
            return self._recorded(call, args, kwargs, backward=False)
        finally:
            functional.scaled_dot_product_attention = attention
            self._leave(standing)

    @untraced
    def _stand(self, standing: list[tuple[Any, Any]]) -> None:
        """Replaces the calls of the innermost modules."""
        began = now()
        try:
            if self._innermost is None:
                model = self._model()
                inside = () if model is None or left_alone(model) else model.modules()
                innermost = [module for module in inside if module is not model and not module._modules]
                self._innermost = innermost[:: len(innermost) // _MOST_PLACES + 1]
            for module in self._innermost:
                if module.__dict__.get(CALL) is None:
                    module.__dict__[CALL] = reading = self._reading_in(module)
                    standing.append((module, reading))
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
        self.cost_ns += now() - began

    @untraced
    def _leave(self, standing: list[tuple[Any, Any]]) -> None:
        began = now()
        for module, reading in standing:
            if module.__dict__.get(CALL) is reading:
                del module.__dict__[CALL]
        self.cost_ns += now() - began

    def _reading_in(self, module: Any) -> Callable[..., Any]:
        """Returns a plain function, since `torch.jit.script` fails on any other object in a module."""

        def reading(*args: Any, **kwargs: Any) -> Any:
            self._called(1)
            copy = copy_that_calls(sys._getframe(1), module)
            return (module if copy is None else copy)._call_impl(*args, **kwargs)

        return not_traced(reading)

    def _noting(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        traced = sys.modules["torch"].compiler.is_dynamo_compiling  # False at run time; the compiler reads it as True

        def scaled_dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not traced():
                self._called(_ATTENTION)
            if not (self.failed or self.broken_off):
                try:
                    causal = kwargs.get("is_causal", args[2] if len(args) > 2 else False)
                    self.calls.append((tuple(query.shape), tuple(key.shape), bool(causal)))
                except Exception as error:  # noqa: BLE001 - it must not reach the training loop
                    self._fail(error)
            return attention(query, key, value, *args, **kwargs)

        return scaled_dot_product_attention

    @untraced
    def _called(self, weight: int) -> None:
        """Called during a call of the model."""
        recording = self._recording
        if recording is None or not recording.is_of_this_thread():
            return
        self._calls += weight
        if self._calls >= _EVERY:
            self._calls = 0
            self._read_so_far(recording)

    @untraced
    def _read_in_pass(self, *_: Any) -> None:
        """Called during a backward pass, before a node of its graph runs, on whatever thread."""
        recording = self._recording
        if recording is not None:
            recording.joins()
            self._read_so_far(recording)

    def _read_so_far(self, recording: Recording) -> None:
        """Reads the recording of all threads; if several threads come here at once, only one of them reads."""
        if not self._reading.acquire(blocking=False):
            return
        began = now()
        try:
            self._read(recording.so_far())
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
        finally:
            self.cost_ns += now() - began
            self._reading.release()

    @untraced
    def _read(self, threads: list[list[Any]], *, last: bool = False) -> None:
        """threads: what each of them recorded. last: this is the last part of the call."""
        if self.over or self.failed or self.broken_off:  # over: the run ended meanwhile
            return
        try:
            for events in threads:
                self._reads.read(events)
            if last:
                self._reads.end()
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
        except BaseException:
            self.broken_off = True
            raise

    def _recorded(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, backward: bool, graph: bool = False
    ) -> Any:
        """Runs and records a call. graph: autograd builds a graph of the backward pass, too."""
        p = self._progress
        began = now()
        recording = None
        if not (self.over or self.failed or self.broken_off) and p.completed < self.step:
            recording = self._begin_recording(args, kwargs, backward=backward)
            if recording is not None:
                self._reads = self.operators.setdefault(backward, Operators(backward=backward))
                self._reads.begin(graph=graph)
                self._recording = recording
        self.cost_ns += now() - began
        try:
            return function(*args, **kwargs)
        finally:
            if recording is not None:
                began = now()
                self._recording = None
                threads = self._end(recording)
                self.gave_way = self.gave_way or recording.broken_off
                self.broken_off = self.broken_off or recording.broken_off
                self._read(threads, last=True)
                if not backward and not self.over:
                    p.probe = self  # for the next micro-batch's call
                self.cost_ns += now() - began

    @untraced
    def _end(self, recording: Recording) -> list[list[Any]]:
        try:
            return recording.end()
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
            return []

    @untraced
    def _begin_recording(self, args: Any, kwargs: Any, *, backward: bool) -> Recording | None:
        torch = sys.modules["torch"]
        try:
            if any_here():  # a backward pass within the root's own call, or a profiler of the script
                self.broken_off = self.broken_off or self._recording is None
                return None
            if not backward:
                self.broken_off = holds_nested(args, kwargs)
                self.half = self.half or _autocast(torch)
            return None if self.broken_off else Recording(compiled=compiled())
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
            return None


for _between in (FlopCount.call, FlopCount._recorded):
    not_traced(_between)  # if the model is compiled after its first steps, torch.compile traces the code around us


def _autocast(torch: Any) -> str | None:
    """Returns the dtype of autocast if it is on."""
    for device in (accelerator().kind, "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
