"""The recording of one training step: which operators ran forward and backward, and what autograd's graph knows of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

from perfagent.hooks.guard import failed, keep_out_of_frames, not_traced, untraced
from perfagent.hooks.progress import now
from perfagent.hooks.standing import Standing, copy_that_calls
from perfagent.signals.callbacks import any_here
from perfagent.signals.compiled import compiled
from perfagent.signals.convolutions import Convolution
from perfagent.signals.graph import in_graph
from perfagent.signals.modules import left_alone
from perfagent.signals.operators import Operators
from perfagent.signals.recording import Recording, holds_nested

if TYPE_CHECKING:
    from perfagent.hooks.progress import Progress

__all__ = ["FlopCount", "Size"]

Size = tuple[int, ...]
"""Samples and tokens of a whole step; where there are no tokens the shape of a sample follows."""
_PART = 32
"""So many of the graph's numbers lie between two looks at what a backward pass has recorded: some 500 events, 0.3 MB."""


class _Reads(Standing):
    """Stands in the call of a module of the model's, while a call of the model is recorded."""

    __slots__ = ("_read",)

    def __init__(self, module: Any, read: Callable[[], None]) -> None:
        super().__init__(module)
        self._read = read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        copy = copy_that_calls(sys._getframe(1), module)
        self._read()
        return (module if copy is None else copy)._call_impl(*args, **kwargs)


not_traced(_Reads.__call__)


class FlopCount:
    """Records one step: a task between two steps (rootcause/investigator.py), and the probe of the root model's calls.

    operators: what ran in the calls, by whether it is of backward passes. nodes, types: what autograd's graph knows of some of
    them, by their numbers in it.

    What torch recorded is read while a call goes on, some hundred operators at a time, where they run: a model of 300
    tensors would leave 15 MB of it (reading takes 13 ms, a third of what recording takes). Python is called there by hooks of
    some of the graph's nodes, and in the calls of the model's innermost modules and of `scaled_dot_product_attention`.
    """

    def __init__(self, progress: Progress, model: Any = None) -> None:
        """model: the root, whose modules are stood in for meanwhile."""
        self._progress = progress
        self._model = (lambda: None) if model is None else ref(model)
        self.step = 0
        self.size: Size | None = None
        self.operators: dict[bool, Operators] = {}
        self.nodes: dict[int, list[Convolution | bool]] = {}
        self.types: dict[int, str] = {}
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = []  # of scaled_dot_product_attention: shapes, causal
        self.half: str | None = None
        self.over = self.failed = False
        self.broken_off = False  # in the midst of the step, for the script's sake
        self.cost_ns = 0
        self._recording: Recording | None = None  # this very moment: the profiler that is on is ours
        self._reads = Operators(backward=False)  # what is recorded now
        self._reading = Lock()
        self._hooks: list[Any] = []
        self._undo: Callable[[], None] | None = None

    def at_boundary(self) -> bool:
        """Begins at the end of one step, ends at the end of the next."""
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
        """Takes everything out again; from here on what was read is another thread's."""
        if self._undo is not None:
            self._undo()
        if self._progress.probe is self:
            self._progress.probe = None
        self.over = True

    def _watch_backward(self) -> None:
        autograd: Any = sys.modules["torch.autograd"]
        original = autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._progress.thread != get_ident():  # another training's, beside this one
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
            parts, hooks = set(), not compiled()  # whose backward passes may be traced
            for node, kind, told in in_graph(roots if isinstance(roots, (list, tuple)) else [roots]):
                number = node._sequence_nr()
                if hooks and number // _PART not in parts:
                    parts.add(number // _PART)
                    self._hooks.append(node.register_prehook(self._read_so_far))
                self.types.setdefault(number, kind)
                same = self.nodes.setdefault(number, [])
                if told is not None and told not in same:
                    same.append(told)
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)
        self.cost_ns += now() - began

    def _fail(self, error: Exception) -> None:
        self.failed = True
        failed(__name__, error)

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of the root model, recorded."""
        functional: Any = sys.modules["torch.nn.functional"]
        attention = functional.scaled_dot_product_attention
        if compiled():
            return self._recorded(call, args, kwargs, backward=False)
        functional.scaled_dot_product_attention = self._noting(attention)
        standing: list[_Reads] = []
        try:
            self._stand(standing)
            return self._recorded(call, args, kwargs, backward=False)
        finally:
            functional.scaled_dot_product_attention = attention
            for each in standing:
                each.take_off()

    @untraced
    def _stand(self, standing: list[_Reads]) -> None:
        """In the calls of the innermost modules."""
        try:
            model = self._model()
            if model is None or left_alone(model):
                return
            for module in model.modules():
                if module is not model and not module._modules:
                    standing.append(_Reads(module, self._read_so_far))
                    standing[-1].put_on()
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)

    def _noting(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def scaled_dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            self._read_so_far()
            if not (self.failed or self.broken_off):
                try:
                    causal = kwargs.get("is_causal", args[2] if len(args) > 2 else False)
                    self.calls.append((tuple(query.shape), tuple(key.shape), bool(causal)))
                except Exception as error:  # noqa: BLE001 - it must not reach the training loop
                    self._fail(error)
            return attention(query, key, value, *args, **kwargs)

        return scaled_dot_product_attention

    @untraced
    def _read_so_far(self, *_: Any) -> None:
        """In the midst of a call, on a thread that takes part in it; of several at once one reads for all."""
        recording = self._recording
        if recording is None or not recording.is_of_this_thread() or not self._reading.acquire(blocking=False):
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
        """threads: what each of them recorded. last: of this call."""
        if self.over or self.failed or self.broken_off:  # the first: the run ended in the midst of it
            return
        try:
            for events in threads:
                self._reads.read(events)
            if last:
                self._reads.end()
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._fail(error)

    def _recorded(self, function: Callable[..., Any], args: Any, kwargs: Any, *, backward: bool, graph: bool = False) -> Any:
        """graph: of what a backward pass computes autograd makes a graph, too."""
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
                self.broken_off = self.broken_off or recording.broken_off
                self._read(threads, last=True)
                if not backward and not self.over:
                    p.probe = self  # the next micro-step's call too
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
            if any_here():  # a backward pass in the root's own call, or what is recorded of the script
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
    not_traced(_between)  # where a model was compiled after its first steps, we lie inside of what torch.compile traces


def _autocast(torch: Any) -> str | None:
    """The type that autocast multiplies in, where it is on."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
