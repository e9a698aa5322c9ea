"""Clipping: the norm that it computes is ours for nothing, and it is the last moment at which gradients are what they were.

A loop clips all that its optimizer takes, or a part of it, or the gradients of several optimizers at once; it asks for the norm
with an infinite limit and clips then, or it clips after every micro-batch. So each call is remembered by the identity of its
gradients, and what the calls say together is asked when the optimizer that counts steps. Nothing here holds a gradient: the
loop may let go of them before that.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from perfagent.boundary.guard import guarded
from perfagent.device import Value, is_captured, take
from perfagent.signals.flat_shards import is_flat
from perfagent.signals.gradients import parameters_of
from perfagent.step.state import Progress, state
from perfagent.step.trace import Trace, backward_since

__all__ = ["Clip", "Clips", "about_to_clip", "install", "watch_grouping", "watch_norm"]

Patch = Callable[..., None]
"""Takes an owner, the name of its attribute and what watches that; traced: torch.compile traces what it was before."""

_MOST = 100_000
"""Gradients that are remembered: a loop that clips and never steps an optimizer has new ones in every iteration."""


def install(patch: Patch) -> None:
    """Needs torch. What a version does not have is left out."""
    import torch.nn.utils as utils
    import torch.nn.utils.clip_grad as clip_grad

    for owner, name, watch in (
        (clip_grad, "_get_total_norm", watch_norm),
        (utils, "get_total_norm", watch_norm),
        (clip_grad, "_group_tensors_by_device_and_dtype", watch_grouping),
    ):
        if hasattr(owner, name):
            patch(owner, name, watch, traced=True)


class Clip:
    """One call.

    norm: of its gradients before it; None where that is not known. at, size: length of the trace and number of gradients then.
    round: how often gradients of it have been clipped in this step, with a backward pass in between. whole: the norm is of all
    ranks' gradients, wherever they are sharded.
    """

    __slots__ = ("at", "norm", "round", "size", "whole")

    def __init__(self, at: int, size: int) -> None:
        self.at, self.size = at, size
        self.norm: Value | None = None
        self.round = 1
        self.whole = False


_NONE = id(None)
_ABSENT = Clip(0, 0)
"""Stands for the gradients that parameters do not have: no look at each of them is needed then, which took half of the time."""
_gradient = operator.attrgetter("grad")


class Clips:
    """The calls since the last step of the optimizer that counts, by the ids of their gradients.

    measured: the round whose gradients were measured, 0 for none. unnamed: the call whose gradients were measured before any
    optimizer was known. newest: by what `key_of` knows the call that was added last.
    """

    __slots__ = ("_of", "_only", "_seen", "_touched", "measured", "newest", "unnamed")

    def __init__(self) -> None:
        self._of = {_NONE: _ABSENT}
        self._only: tuple[list[int], Clip] | None = None
        """The first call, while it is the only one: mostly it held what the optimizer takes, in the same order, and comparing two
        lists takes half of what looking each up does."""
        self._seen = 0
        self._touched: bool | None = None
        self.measured = 0
        self.unnamed: Clip | None = None
        self.newest = 0, 0, 0

    @staticmethod
    def key_of(gradients: Sequence[Any], trace: Trace) -> tuple[int, int, int]:
        return id(gradients[0]), len(gradients), len(trace)

    def add(self, gradients: Sequence[Any], trace: Trace) -> Clip | None:
        """A call that is about to begin; None where it has nothing new to say: these gradients are clipped ones by now."""
        of, at = self._of, len(trace)
        self.newest = self.key_of(gradients, trace)
        if self._only is not None:
            held, only = self._only
            if held[0] == id(gradients[0]) and only.at == at and only.size == len(gradients):
                return None
            self._enter()
        last = of.get(id(gradients[0]))
        if last is not None and last.at == at and last.size == len(gradients):
            return None
        if at < self._seen or len(of) > _MOST:  # the trace has begun anew: no step has come of it
            of.clear()
            of[_NONE] = _ABSENT
        self._seen, self._touched = at, None
        ids = list(map(id, gradients))
        clip = Clip(at, len(ids))
        if len(of) == 1:
            self._only = ids, clip
            return clip
        known = of.keys() & ids
        if known and not self._outdated(known, clip, trace):
            # of some of these the norm is that of clipped gradients: for the rest, there is none
            of.update(dict.fromkeys(set(ids).difference(known), clip))
            return None
        of.update(dict.fromkeys(ids, clip))
        return clip

    def _enter(self) -> None:
        if self._only is not None:
            ids, clip = self._only
            self._of.update(dict.fromkeys(ids, clip))
            self._of[_NONE] = _ABSENT
            self._only = None

    def _outdated(self, known: set[int], clip: Clip, trace: Trace) -> bool:
        """Whether a backward pass has added to these since they were clipped: then this call takes the place of those."""
        before = {self._of[one] for one in known}
        if not backward_since(trace, max(one.at for one in before)):
            return False
        clip.round += max(one.round for one in before)
        for one in before:
            one.norm = None  # of gradients that only it held
        return True

    def touches(self, clip: Clip, optimizer: Any) -> bool:
        return clip in self.holding(optimizer)

    def holding(self, optimizer: Any) -> set[Clip | None]:
        """The calls that held the gradients it takes; None among them where one was in no call."""
        taken = list(map(id, map(_gradient, parameters_of(optimizer))))
        if self._only is not None:
            ids, clip = self._only
            if taken == ids:
                return {clip}
            self._enter()
        found = set(map(self._of.get, taken))
        found.discard(_ABSENT)
        return found

    def norms(self, held: set[Clip | None], optimizer: Any) -> list[Value]:
        """What the calls that held an optimizer's gradients say; empty where one does not know, or there was none for some."""
        pieces = _takes_pieces(optimizer)
        told = [clip.norm for clip in held if clip is not None and clip.norm is not None and (clip.whole or not pieces)]
        return told if len(told) == len(held) else []

    def settle(self, p: Progress, optimizer: Any) -> bool:
        """Before the optimizer that counts steps: whether gradients of its own were clipped. Says their norm, where all were.

        One optimizer's part of the gradients of a call is not known: the norm is then that of all of them, as the loop sees it.
        """
        if self._touched is None:
            found = self.holding(optimizer)
            clips = [clip for clip in found if clip is not None]
            if clips:
                p.clip_norm = self.norms(found, optimizer)
                p.unusual = p.unusual or bool(p.clip_norm)
            if self.unnamed is not None and (found != {self.unnamed} or _takes_pieces(optimizer)):
                self._forget_pass(p)
            p.clip_rounds = max((clip.round for clip in clips), default=0)
            self._touched = bool(clips)
        return self._touched

    def forget(self, p: Progress, stepped: Any) -> None:
        """Another optimizer than the one that counts has stepped, and its gradients may be let go of: others get their ids."""
        self._enter()
        for gradient in map(id, map(_gradient, parameters_of(stepped))):
            self._of.pop(gradient, None)
        self._of[_NONE] = _ABSENT
        if self.unnamed is not None and self.unnamed not in self.holding(p.primary()):
            self._forget_pass(p)

    def _forget_pass(self, p: Progress) -> None:
        """It was made over other gradients, or over a part of them."""
        p.gradients = self.unnamed = None
        self.measured = 0


_pieces: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_pieces(optimizer: Any) -> bool:
    """Whether it trains pieces that look like whole tensors. (Those of a DTensor do not: no norm of theirs was taken.)"""
    known = _pieces.get(optimizer)
    if known is None:
        known = _pieces[optimizer] = any(map(is_flat, parameters_of(optimizer)))
    return known


def watch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """clip_grad._get_total_norm, watched: the norm that clipping computes anyway."""

    @functools.wraps(original)
    def _get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.thread != get_ident():
            return original(tensors, norm_type, *args, **kwargs)
        clip = _add(p, tensors)
        total = original(tensors, norm_type, *args, **kwargs)
        if clip is not None:
            _tell(p, clip, tensors, norm_type, total)
        return total

    return _get_total_norm


def watch_grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    """clip_grad._group_tensors_by_device_and_dtype, watched: all clipping begins with it, `clip_grad_value_` included.

    (That function itself many scripts have imported by name before there is a run.)
    """

    @functools.wraps(original)
    def _group_tensors_by_device_and_dtype(tensorlistlist: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is not None and p.thread == get_ident():
            _about_to_clip(p, tensorlistlist)
        return original(tensorlistlist, *args, **kwargs)

    return _group_tensors_by_device_and_dtype


@guarded
def _add(p: Progress, tensors: Any) -> Clip | None:
    if not isinstance(tensors, (list, tuple)) or not tensors or (p.amp.scaling and not p.amp.unscaled):
        return None
    if p.clips is None:
        p.clips = Clips()
    p.clipped += 1
    p.clipped_gradients += len(tensors)
    clip: Clip | None = p.clips.add(tensors, p.trace)
    return clip


@guarded
def _tell(p: Progress, clip: Clip, tensors: Any, norm_type: float, total: Any) -> None:
    sound = True
    if float(norm_type) == 2.0 and not hasattr(total, "_local_tensor"):
        clip.norm = take(total)
        if clip.norm is None:
            return
        sound = not isinstance(clip.norm, float) or clip.norm - clip.norm == 0.0
    if not sound or _is_due(p, clip):
        _measure(p, clip, tensors)


@guarded
def _about_to_clip(p: Progress, tensors: Any) -> None:
    gradients = tensors[0]
    if gradients and p.clips is not None and p.clips.newest == Clips.key_of(gradients, p.trace):
        return  # `watch_norm` has seen them, and most calls come by here twice
    about_to_clip(p, gradients)


def about_to_clip(p: Progress, gradients: Any) -> Clip | None:
    """A call is about to change these: measures them first, where that is due."""
    clip: Clip | None = _add(p, gradients)
    if clip is not None and _is_due(p, clip) and not is_captured(gradients[0]):
        _measure(p, clip, gradients)
    return clip


def _is_due(p: Progress, clip: Clip) -> bool:
    """Where a loop clips after every micro-batch, the last one's turn is the one to measure: the others are parts of it."""
    if p.completed < p.measure_at or clip.round < p.clip_rounds:
        return False
    return p.clip_rounds > 0 or not clip.round & (clip.round - 1)  # none is known yet: the 1st, the 2nd, the 4th, ...


def _measure(p: Progress, clip: Clip, gradients: Sequence[Any]) -> None:
    """Clipping is about to change the gradients: what we want to know of them is to be had now."""
    clips = p.clips
    if p.looked:
        return  # a closure that is called again, at other weights
    p.together.measure_clipped(p, clips, clip)
    if clip.round <= clips.measured or (p.gradients is not None and not clips.measured):
        return
    primary = p.primary() if p.primary is not None else None
    if primary is None:
        p.health.measure_unnamed(p, list(gradients))
        clips.unnamed = clip
    elif clips.touches(clip, primary):
        p.health.measure(p, primary, after=bool(p.entered))  # inside of a closure the weights may have moved already
    else:
        return  # of another optimizer
    clips.measured = clip.round
