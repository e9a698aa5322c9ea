"""Watches gradient clipping: it computes a norm anyway, and it is the last moment before the gradients change.

A loop may clip all gradients of its optimizer, a part of them, or those of several optimizers at once. It may first ask
for the norm with an infinite limit and clip afterward, or clip after every micro-batch. So each call is remembered by
the identities of its gradients, and the calls are combined when the optimizer that counts steps. Nothing here holds a
gradient: the loop may free them before that.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import Any

from perfagent.boundary.guard import guarded
from perfagent.device import Value, is_captured, take
from perfagent.hooks.backward import check_arrived
from perfagent.signals.flat_shards import is_flat
from perfagent.signals.gradients import parameters_of
from perfagent.step.state import StepState, state
from perfagent.step.trace import Trace, backward_since

__all__ = ["Clip", "Clips", "about_to_clip", "install", "watch_grouping", "watch_norm", "watch_whole"]

Patch = Callable[..., None]
"""Takes an owner, the name of its attribute and the watching function. traced: torch.compile traces the original."""

_MOST = 100_000
"""Most gradients to remember: a loop that clips and never steps an optimizer has new ones in every iteration."""


def install(patch: Patch) -> None:
    """Patches torch's clipping functions, except those that a version does not have. Needs torch."""
    import torch.nn.utils as utils
    import torch.nn.utils.clip_grad as clip_grad

    for owner, name, watch in (
        (clip_grad, "_get_total_norm", watch_norm),
        (utils, "get_total_norm", watch_norm),
        (clip_grad, "_group_tensors_by_device_and_dtype", watch_grouping),
    ):
        if hasattr(owner, name):
            patch(owner, name, watch, traced=True)
    if not hasattr(clip_grad, "_get_total_norm"):  # before torch 2.6
        # It is a closure around the function that clips. Many scripts import it by name before a run begins.
        closure: Any = clip_grad.clip_grad_norm_
        (cell,) = closure.__closure__
        patch(cell, "cell_contents", watch_whole, traced=True)


class Clip:
    """One call that clips.

    norm: of its gradients before clipping; None where not known.
    at, size: length of the trace and number of gradients at the call.
    round: how many times its gradients have been clipped in this step, with a backward pass between the times.
    whole: the norm covers the gradients of all ranks, wherever they are sharded.
    scaled: the gradients still carried the loss scale of a GradScaler, as far as is known.
    """

    __slots__ = ("at", "norm", "round", "scaled", "size", "whole")

    def __init__(self, at: int, size: int) -> None:
        self.at, self.size = at, size
        self.scaled = False
        self.norm: Value | None = None
        self.round = 1
        self.whole = False


class _ClippedScaled:
    """Says of a step that its gradients were clipped before `GradScaler.unscale_`."""

    @staticmethod
    def ready() -> bool:
        return True

    @staticmethod
    def add(values: dict[str, float], rows: list[dict[str, float]], *, skipped: bool) -> None:  # noqa: ARG004
        values["grad/clipped_scaled"] = 1.0


_CLIPPED_SCALED = _ClippedScaled()
_NONE = id(None)
_ABSENT = Clip(0, 0)
"""Stands for the gradients that parameters do not have. It saves checking each of them, which took half of the time."""
_gradient = operator.attrgetter("grad")


class Clips:
    """The calls since the last step of the optimizer that counts, by the ids of their gradients.

    measured: the round whose gradients were measured; 0 for none.
    unnamed: the call whose gradients were measured before any optimizer was known.
    newest: the key (`key_of`) of the newest call.
    """

    __slots__ = ("_of", "_only", "_seen", "_touched", "measured", "newest", "unnamed")

    def __init__(self) -> None:
        self._of = {_NONE: _ABSENT}
        self._only: tuple[list[int], Clip] | None = None
        """The first call, while it is the only one. Mostly it held the optimizer's gradients in the same order, and
        comparing two lists takes half the time of looking up each gradient."""
        self._seen = 0
        self._touched: bool | None = None
        self.measured = 0
        self.unnamed: Clip | None = None
        self.newest = 0, 0, 0

    @property
    def remembered(self) -> int:
        """Gradients that are kept by their ids."""
        return len(self._of) - 1

    @staticmethod
    def key_of(gradients: Sequence[Any], trace: Trace) -> tuple[int, int, int]:
        return id(gradients[0]), len(gradients), len(trace)

    def add(self, gradients: Sequence[Any], trace: Trace) -> Clip | None:
        """Adds a call that is about to begin. Returns None if its gradients are already clipped."""
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
        if at < self._seen or len(of) > _MOST:  # the trace was restarted without a step
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
            # some of these gradients are already clipped, so the norm of this call is not the norm of the others
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
        """True if a backward pass has added to these gradients since: this call then replaces the earlier ones."""
        before = {self._of[one] for one in known}
        if not backward_since(trace, max(one.at for one in before)):
            return False
        clip.round += max(one.round for one in before)
        for one in before:
            one.norm = None  # it covered gradients that only the earlier call held
        return True

    def touches(self, clip: Clip, optimizer: Any) -> bool:
        return clip in self.holding(optimizer)

    def holding(self, optimizer: Any) -> set[Clip | None]:
        """Returns the calls that held the optimizer's gradients, with None among them if a gradient was in no call."""
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
        """Returns the norms of the calls that held an optimizer's gradients; empty if one of these norms is not known
        or a gradient was in no call."""
        pieces = _takes_pieces(optimizer)
        told = [clip.norm for clip in held if clip is not None and clip.norm is not None and (clip.whole or not pieces)]
        return told if len(told) == len(held) else []

    @staticmethod
    def scaled(held: Iterable[Clip | None], p: StepState) -> bool:
        """Whether the gradients still carried the loss scale when they were clipped. An optimizer that steps without
        the scaler uses them as they are."""
        if p.amp.scale is None or not any(clip is not None and clip.scaled for clip in held):
            return False
        p.measured.extras.append(_CLIPPED_SCALED)
        return True

    def settle(self, p: StepState, optimizer: Any) -> bool:
        """Called before the step of the optimizer that counts. Records the norm if all its gradients were clipped;
        returns whether any were.

        One optimizer's share of a call's gradients is not known: the norm is that of the whole call, as
        the loop sees it.
        """
        if self._touched is None:
            found = self.holding(optimizer)
            clips = [clip for clip in found if clip is not None]
            if clips:
                p.measured.clip_norm = self.norms(found, optimizer)
                p.unusual = p.unusual or bool(p.measured.clip_norm)
                if self.scaled(clips, p):
                    p.amp.grad_scale = take(p.amp.scale)
                    if p.amp.grad_scale is None:  # no norm is better than one of scaled gradients
                        p.measured.clip_norm = []
                        self._forget_pass(p)
            if self.unnamed is not None and (found != {self.unnamed} or _takes_pieces(optimizer)):
                self._forget_pass(p)
            p.measured.clip_rounds = max((clip.round for clip in clips), default=0)
            self._touched = bool(clips)
        return self._touched

    def forget(self, p: StepState, stepped: Any) -> None:
        """Forgets an optimizer that has stepped and is not the one that counts: its gradients' ids may be reused."""
        self._enter()
        for gradient in map(id, map(_gradient, parameters_of(stepped))):
            self._of.pop(gradient, None)
        self._of[_NONE] = _ABSENT
        if self.unnamed is not None and self.unnamed not in self.holding(p.selection.primary()):
            self._forget_pass(p)

    def _forget_pass(self, p: StepState) -> None:
        """Discards a measurement of other gradients, or of only a part of them."""
        p.gradients = self.unnamed = None
        self.measured = 0


_pieces: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_pieces(optimizer: Any) -> bool:
    """True if the optimizer trains shards that look like whole tensors. (DTensors do not.)"""
    known = _pieces.get(optimizer)
    if known is None:
        known = _pieces[optimizer] = any(map(is_flat, parameters_of(optimizer)))
    return known


def watch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps clip_grad._get_total_norm: reads the norm that clipping computes anyway."""

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


def watch_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what torch 2.4 and 2.5 clip with, in one function: the norm is known when the gradients have changed already."""

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is None or p.thread != get_ident():
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        if not hasattr(parameters, "grad"):  # it may be read only once
            parameters = list(parameters)
        clip = _before(p, parameters)
        total = original(parameters, max_norm, norm_type, *args, **kwargs)
        if clip is not None:
            _after(clip, norm_type, total)
        return total

    return clip_grad_norm_


@guarded
def _before(p: StepState, parameters: Any) -> Clip | None:
    several = [parameters] if hasattr(parameters, "grad") else parameters
    return about_to_clip(p, [each.grad for each in several if each.grad is not None])


@guarded
def _after(clip: Clip, norm_type: float, total: Any) -> None:
    if float(norm_type) == 2.0 and not hasattr(total, "_local_tensor"):
        clip.norm = take(total)


def watch_grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps clip_grad._group_tensors_by_device_and_dtype, with which all clipping begins, `clip_grad_value_` included.

    (Many scripts import the clipping functions themselves by name before a run begins.)
    """

    @functools.wraps(original)
    def _group_tensors_by_device_and_dtype(tensorlistlist: Any, *args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is not None and p.thread == get_ident():
            _about_to_clip(p, tensorlistlist)
        return original(tensorlistlist, *args, **kwargs)

    return _group_tensors_by_device_and_dtype


@guarded
def _add(p: StepState, tensors: Any) -> Clip | None:
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return None
    if p.losses.arriving is not None:
        check_arrived(p)
    if p.clips is None:
        p.clips = Clips()
    p.costs.clipped += 1
    p.costs.clipped_gradients += len(tensors)
    clip: Clip | None = p.clips.add(tensors, p.trace)
    if clip is not None:
        clip.scaled = p.amp.scaling and not p.amp.unscaled
    return clip


@guarded
def _tell(p: StepState, clip: Clip, tensors: Any, norm_type: float, total: Any) -> None:
    sound = True
    if float(norm_type) == 2.0 and not hasattr(total, "_local_tensor"):
        clip.norm = take(total)
        if clip.norm is None:
            return
        # of scaled gradients an overflow is usual, and no reason to look
        sound = not isinstance(clip.norm, float) or clip.norm - clip.norm == 0.0 or clip.scaled
    if not sound or _is_due(p, clip):
        _measure(p, clip, tensors)


@guarded
def _about_to_clip(p: StepState, tensors: Any) -> None:
    gradients = tensors[0]
    if gradients and p.clips is not None and p.clips.newest == Clips.key_of(gradients, p.trace):
        return  # `watch_norm` has seen them already, and most calls pass here twice
    about_to_clip(p, gradients)


def about_to_clip(p: StepState, gradients: Any) -> Clip | None:
    """Registers a call that is about to change these gradients, and measures them first if that is due."""
    clip: Clip | None = _add(p, gradients)
    if clip is not None and _is_due(p, clip) and not is_captured(gradients[0]):
        _measure(p, clip, gradients)
    return clip


def _is_due(p: StepState, clip: Clip) -> bool:
    """True if these gradients should be measured. Where a loop clips after every micro-batch, only the last of them
    counts: the gradients before are parts of it."""
    if p.completed < p.measure_at or clip.round < p.measured.clip_rounds:
        return False
    return p.measured.clip_rounds > 0 or not clip.round & (
        clip.round - 1
    )  # no step is known yet: the 1st, 2nd, 4th, ...


def _measure(p: StepState, clip: Clip, gradients: Sequence[Any]) -> None:
    """Measures the gradients now, since clipping is about to change them."""
    clips = p.clips
    if p.measured.looked:
        return  # a closure that is called again, at other weights
    p.links.together.measure_clipped(p, clips, clip)
    if clip.round <= clips.measured or (p.gradients is not None and not clips.measured):
        return
    primary = p.selection.primary() if p.selection.primary is not None else None
    if primary is None:
        p.links.health.measure_unnamed(p, list(gradients))
        clips.unnamed = clip
    elif clips.touches(clip, primary):
        p.links.health.measure(
            p, primary, after=bool(p.entered)
        )  # inside of a closure the weights may have moved already
    else:
        return  # gradients of another optimizer
    clips.measured = clip.round
