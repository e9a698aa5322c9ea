"""Records which kernel each attention of a model runs during one pass of yours, and warns of the slow ones.

    with perfagent.watch_attention(model) as seen:
        loss = model(**batch).loss
    print(seen)

While the context is open, it records every call of scaled_dot_product_attention and nn.MultiheadAttention by Python
code. Compiled code makes no such calls, so watch the model before you compile it; the compiler makes the same choices.
On a GPU it reads a mask once for each kind of call, and waits for the device to do so."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from perfagent_loop.checks import check_module
from perfagent_loop.compute.attention import AttentionChoice, best_attention
from perfagent_loop.kinds import State

__all__ = ["SeenAttention", "SeenCall", "watch_attention"]

logger = logging.getLogger("perfagent")
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTI_HEAD = inspect.signature(functional.multi_head_attention_forward)


@dataclass(slots=True)
class SeenCall:
    """Calls of one kind: count of them, shape of the queries (batch, heads, length, width), type, what runs."""

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    choice: AttentionChoice


@dataclass(slots=True)
class SeenAttention:
    """calls: what was seen, by kind, in order of appearance; slow: those that run no fused kernel."""

    calls: list[SeenCall] = field(default_factory=list)

    @property
    def slow(self) -> list[SeenCall]:
        return [call for call in self.calls if not call.choice.fused]

    def __str__(self) -> str:
        if not self.calls:
            return "no attention was called: the model has none, writes it by hand, or is compiled"
        lines = [
            f"{one.count} x {one.shape} {str(one.dtype).removeprefix('torch.')}: {one.choice}" for one in self.calls
        ]
        return "\n".join(lines)


@contextmanager
def watch_attention(model: nn.Module | None = None, *, warn: bool = True) -> Iterator[SeenAttention]:
    """Records the attention calls made inside a `with` block, and warns once of each kind that runs no fused kernel.

        with perfagent.watch_attention(model) as seen:
            loss = model(**batch).loss
        print(seen)

    Args:
        model: The model, to notice attention that is written by hand (`attn_implementation="eager"` of transformers),
            which makes no call.
        warn: False leaves it to you to print what was seen.
    """
    if model is not None:
        check_module(model)
    seen = SeenAttention()
    with _Watch(seen):
        yield seen
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager":
        why = 'the model was loaded with attn_implementation="eager", which writes all scores to memory'
        change = 'load it with attn_implementation="sdpa", or "flash_attention_2" where flash-attn is installed'
        seen.calls.append(SeenCall(1, (), torch.float32, AttentionChoice("explicit", why, change)))
    if warn:
        for call in seen.slow:
            logger.warning("perfagent: slow attention: %s", call.choice)


class _Watch(TorchFunctionMode):
    def __init__(self, seen: SeenAttention) -> None:
        super().__init__()
        self._seen = seen
        self._kinds: dict[object, SeenCall] = {}

    def __torch_function__(self, func: Any, kinds: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self._note(args, kwargs)
        elif func is functional.multi_head_attention_forward:
            return self._multi_head(func, args, kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """nn.MultiheadAttention: with weights wanted it multiplies by itself; without, it calls the function that is
        watched, which this mode does not see while it handles a call."""
        given = _MULTI_HEAD.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"]:
            self._note_weights(given.arguments)
            return func(*args, **kwargs)
        attention = functional.scaled_dot_product_attention

        def noting(*inner: Any, **named: Any) -> Any:
            self._note(inner, named)
            return attention(*inner, **named)

        functional.scaled_dot_product_attention = noting
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = attention

    def _note(self, args: Any, kwargs: Any) -> None:
        given = dict(zip(_NAMES, args, strict=False)) | kwargs
        q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        causal, dropout = bool(given.get("is_causal", False)), float(given.get("dropout_p", 0.0))
        grouped = bool(given.get("enable_gqa", False))
        kind = (
            *((t.shape, t.dtype, t.stride(), t.requires_grad) for t in (q, k, v)),
            None if mask is None else (mask.shape, mask.dtype, mask.requires_grad),
            causal, dropout, grouped, torch.is_grad_enabled(),
        )  # fmt: skip
        self._count(kind, q, lambda: best_attention(q, k, v, causal=causal, mask=mask, dropout=dropout, gqa=grouped))

    def _note_weights(self, given: State) -> None:
        query, key, heads = given["query"], given["key"], given["num_heads"]
        batch = query.shape[1] if query.dim() == 3 else 1
        width = query.shape[-1] // heads
        like = [
            torch.empty((batch, heads, length, width), device="meta", dtype=query.dtype)
            for length in (query.shape[0], key.shape[0], key.shape[0])
        ]
        kind = (*(t.shape for t in like), query.dtype, "weights")
        self._count(kind, like[0], lambda: best_attention(*like, weights=True))

    def _count(self, kind: object, query: torch.Tensor, choose: Callable[[], AttentionChoice]) -> None:
        call = self._kinds.get(kind)
        if call is None:
            call = self._kinds[kind] = SeenCall(0, tuple(query.shape), query.dtype, choose())
            self._seen.calls.append(call)
        call.count += 1
