"""Watches gradient clipping: it computes a norm anyway, and it is the last moment before the gradients change.

A loop may clip all gradients of its optimizer, a part of them, or those of several optimizers at once. It may first ask
for the norm with an infinite limit and clip afterward, or clip after every micro-batch. So each call is remembered by
the identities of its gradients, and the calls are combined when the optimizer that counts steps. Nothing here holds a
gradient: the loop may free them before that.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.boundary.call_watch import before
from perfagent.boundary.dynamo import Function
from perfagent.boundary.guard import guarded
from perfagent.device import Value, is_captured, read_number_later
from perfagent.hooks.backward import check_arrived
from perfagent.measure.gradients import parameters_of
from perfagent.measure.sharding import holds_flat
from perfagent.step.state import StepState, state
from perfagent.step.trace import backward_since

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = ["Clip", "Clips", "about_to_clip", "install"]

_MOST = 100_000
"""Most gradients to remember: a loop that clips and never steps an optimizer has new ones in every iteration."""
_NONE = id(None)
_gradient = operator.attrgetter("grad")


def install(patch: Callable[..., None]) -> None:
    """Patches torch's clipping functions, except those that a version does not have. Needs torch.

    patch: gets an owner, the name of its attribute and the watching function. traced: torch.compile traces the original.
    """
    import torch.nn.utils as utils
    import torch.nn.utils.clip_grad as clip_grad

    for owner, name, watch in (
        (clip_grad, "_get_total_norm", _watch_norm),
        (utils, "get_total_norm", _watch_norm),
        (clip_grad, "_group_tensors_by_device_and_dtype", _watch_grouping),
    ):
        if hasattr(owner, name):
            patch(owner, name, watch, traced=True)


@dataclass(eq=False, slots=True)
class Clip:
    """One call that clips.

    ids, at: its gradients, and the length of the trace at the call.
    scaled: the gradients still carried the loss scale of a GradScaler, as far as is known.
    norm: of its gradients before clipping; None where not known.
    whole: the norm covers the gradients of all ranks, wherever they are sharded.
    """

    ids: list[int]
    at: int
    scaled: bool
    norm: Value | None = None
    whole: bool = False


class Clips:
    """The calls since the last step of the optimizer that counts, by the ids of their gradients."""

    __slots__ = ("_measured_at", "_newest", "_of", "_only", "_progress", "_settled")

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self._of: dict[int, Clip] = {}
        self._only: Clip | None = None
        """The first call, while it is the only one. Mostly it held the optimizer's gradients in the same order, and
        comparing two lists takes half the time of looking up each gradient."""
        self._newest = 0, 0, 0
        self._settled: bool | None = None
        self._measured_at = -1  # length of the trace then

    def add(self, gradients: Sequence[torch.Tensor]) -> Clip | None:
        """Adds a call that is about to begin. Returns None if its gradients are already clipped."""
        p, at = self._progress, len(self._progress.trace)
        key, before = (id(gradients[0]), len(gradients), at), self._newest[2]
        if key == self._newest:
            return None  # most calls come here three times
        p.costs.clipped += 1
        p.costs.clipped_gradients += len(gradients)
        self._newest, self._settled = key, None
        clip = Clip(list(map(id, gradients)), at, p.amp.scaling and not p.amp.unscaled)
        if at < before or len(self._of) > _MOST:  # the trace was restarted without a step
            self._only, self._of = None, {}
        if self._only is None and not self._of:
            self._only = clip
            return clip
        of = self._by_id()
        known = of.keys() & clip.ids
        earlier = {of[one] for one in known}
        if known and not backward_since(p.trace, max(one.at for one in earlier)):
            # some of these gradients are already clipped, so the norm of this call is not the norm of the others
            of.update(dict.fromkeys(set(clip.ids) - known, clip))
            return None
        for one in earlier:  # a backward pass has added to these gradients since
            one.norm = None  # it covered gradients that only the earlier call held
        of.update(dict.fromkeys(clip.ids, clip))
        return clip

    def _by_id(self) -> dict[int, Clip]:
        if self._only is not None:
            self._of.update(dict.fromkeys(self._only.ids, self._only))
            self._only = None
        return self._of

    def holding(self, optimizer: Optimizer) -> set[Clip | None]:
        """Returns the calls that held the optimizer's gradients, with None among them if a gradient was in no call."""
        ids = list(map(id, map(_gradient, parameters_of(optimizer))))
        if self._only is not None and ids == self._only.ids:
            return {self._only}
        return set(map(self._by_id().get, set(ids) - {_NONE}))

    def norms(self, held: Collection[Clip | None], optimizer: Optimizer) -> list[Value]:
        """Returns the norms of the calls that held an optimizer's gradients; empty if one of these norms is not known
        or a gradient was in no call."""
        pieces = holds_flat(parameters_of(optimizer))
        known = [
            clip.norm for clip in held if clip is not None and clip.norm is not None and (clip.whole or not pieces)
        ]
        return known if len(known) == len(held) else []

    def scaled(self, held: Collection[Clip | None]) -> bool:
        """Whether the gradients still carried the loss scale when they were clipped. An optimizer that steps without
        the scaler uses them as they are."""
        p = self._progress
        if p.amp.scale is None or not any(clip is not None and clip.scaled for clip in held):
            return False
        p.measured.clipped_scaled = True
        return True

    def settle(self, optimizer: Optimizer) -> bool:
        """Called before the step of the optimizer that counts. Records the norm if all its gradients were clipped;
        returns whether any were.

        One optimizer's share of a call's gradients is not known: the norm is that of the whole call, as
        the loop sees it.
        """
        if self._settled is not None:
            return self._settled
        p, held = self._progress, self.holding(optimizer)
        clips = [clip for clip in held if clip is not None]
        if clips:
            p.measured.clip_norm = self.norms(held, optimizer)
            p.unusual = p.unusual or bool(p.measured.clip_norm)
        if self.scaled(clips):
            p.amp.grad_scale = read_number_later(p.amp.scale)
            if p.amp.grad_scale is None:  # no norm is better than one of scaled gradients
                p.measured.clip_norm, p.gradients = [], None
        self._settled = bool(clips)
        return self._settled

    def forget(self, stepped: Optimizer) -> None:
        """Forgets an optimizer that has stepped and is not the one that counts: its gradients' ids may be reused."""
        of = self._by_id()
        for gradient in map(id, map(_gradient, parameters_of(stepped))):
            of.pop(gradient, None)

    def measure(self, clip: Clip) -> None:
        """Measures the gradients now, since clipping is about to change them."""
        p = self._progress
        if p.measured.in_closure:
            return  # a closure that is called again, at other weights
        p.links.joint_step.measure_clipped(self, clip)
        if p.gradients is not None and (self._measured_at < 0 or not backward_since(p.trace, self._measured_at)):
            return
        primary = p.selection.primary
        if primary is not None and clip in self.holding(primary):  # else they are another optimizer's
            # inside of a closure the weights may have moved already
            p.links.gradient_schedule.measure(primary, after=bool(p.entered))
            self._measured_at = len(p.trace)


# ---- on a call that clips


@guarded
def about_to_clip(p: StepState, gradients: Sequence[torch.Tensor]) -> Clip | None:
    """Registers a call that is about to change these gradients, and measures them first if that is due."""
    clip: Clip | None = _add(p, gradients)
    if clip is not None and p.clips is not None and p.completed >= p.measure_at and not is_captured(gradients[0]):
        p.clips.measure(clip)
    return clip


@guarded
def _add(p: StepState, gradients: Any) -> Clip | None:
    if not isinstance(gradients, (list, tuple)) or not gradients:
        return None
    if p.losses.arriving is not None:
        check_arrived(p)
    if p.clips is None:
        p.clips = Clips(p)
    clip: Clip | None = p.clips.add(gradients)
    return clip


@guarded
def _note_norm(p: StepState, clip: Clip, norm_type: float, total: torch.Tensor) -> None:
    is_bad = False
    if float(norm_type) == 2.0 and not hasattr(total, "_local_tensor"):
        clip.norm = read_number_later(total)
        if clip.norm is None:
            return
        # of scaled gradients an overflow is usual, and no reason to look
        is_bad = isinstance(clip.norm, float) and clip.norm - clip.norm != 0.0 and not clip.scaled
    if p.clips is not None and (is_bad or p.completed >= p.measure_at):
        p.clips.measure(clip)


def _watch_norm(original: Function) -> Function:
    """Wraps clip_grad._get_total_norm: reads the norm that clipping computes anyway."""

    @functools.wraps(original)
    def _get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.thread != get_ident():
            return original(tensors, norm_type, *args, **kwargs)
        clip = _add(p, tensors)
        total = original(tensors, norm_type, *args, **kwargs)
        if clip is not None:
            _note_norm(p, clip, norm_type, total)
        return total

    return _get_total_norm


def _note_grouping(tensorlistlist: Any, *_: object, **__: object) -> None:
    p = state.current
    if p is not None and p.thread == get_ident():
        about_to_clip(p, tensorlistlist[0])


_watch_grouping = before(_note_grouping)
"""Wraps clip_grad._group_tensors_by_device_and_dtype, with which all clipping begins, `clip_grad_value_` included. (Many
scripts import the clipping functions themselves by name before a run begins.)"""
