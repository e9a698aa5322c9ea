"""Activation checkpointing: blocks keep only their inputs, and compute the rest again in the backward pass.

Memory for time (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). torch's
`checkpoint(use_reentrant=False)` does it, put round a model's blocks from outside. State that a block changes as it
runs (running statistics, power iterations) does not move twice, Python and numpy draw the same numbers again, a
key-value cache is not filled twice. Losses, gradients, state and random numbers are those without checkpointing.

Names of parameters, hooks, the type of the blocks and `copy.deepcopy` work as before; a pickled model comes back
without checkpointing. Under FSDP2 and DDP call it before the model is wrapped, and before it is compiled."""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_module
from perfagent_loop.compute.recompute_state import Kept, contexts
from perfagent_loop.fsdp import blocks_of
from perfagent_loop.kinds import State

__all__ = ["checkpoint_activations", "dear_operators"]

logger = logging.getLogger("perfagent")

Choose: TypeAlias = Callable[[str, nn.Module], bool]
Operator: TypeAlias = torch._ops.OpOverload
_selective: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
_SETTINGS = "_perfagent_checkpointing"
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class _Settings:
    """Of one block, as an attribute of it and copied with it. keep: operators whose results stay in memory. plain: a
    forward that the block had of its own before. kept: see recomputing."""

    __slots__ = ("keep", "kept", "plain", "preserve_rng")

    def __init__(self, keep: Sequence[Operator], plain: Callable[..., Any] | None, preserve_rng: bool) -> None:
        self.keep, self.plain, self.preserve_rng, self.kept = keep, plain, preserve_rng, Kept()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Settings:
        return _Settings(self.keep, copy.deepcopy(self.plain, memo), self.preserve_rng)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a block that was pickled has none


def checkpoint_activations(
    model: nn.Module, mode: str | Choose = "all", *, keep: Iterable[Operator] | None = None, preserve_rng: bool = True
) -> Callable[[], None]:
    """Activation checkpointing: blocks of the model compute their activations again in the backward pass, which saves
    memory.

    Losses, gradients and random numbers stay the same. Call it before DDP, FSDP2 and `torch.compile`.

    Args:
        model: Any module with lists of like modules, such as the layers of a transformer. These items are the blocks.
        mode: "all": all blocks. "every:n": the first of each n blocks ("every:2" keeps half of the activations).
            "selective": all blocks, but results of matrix products, convolutions and attention stay in memory. Or a
            function of (name, module) that returns which modules.
        keep: Operators (`torch.ops.aten...`) whose results stay in memory, instead of those of "selective".
        preserve_rng: False is faster, for blocks without random numbers (dropout).

    Returns:
        A function that removes the checkpointing.

    Raises:
        ConfigError: Nothing would be checkpointed, or something twice, or a module with `inplace=True` would overwrite
            a result that is kept.

    Source: Chen et al., [Training Deep Nets with Sublinear Memory Cost](https://arxiv.org/abs/1604.06174), 2016;
    `torch.utils.checkpoint`.
    """
    chosen = _chosen(model, mode)
    operators = _operators(mode, keep)
    if operators:
        _check_in_place(chosen)
    for _, block in chosen:
        own = vars(block).get("forward")
        block.__dict__[_SETTINGS] = _Settings(operators, own, preserve_rng)
        # torch's checkpoint_wrapper renames parameters; with a closure a copied model would use the original's weights.
        block.__dict__["forward"] = types.MethodType(_forward, block)
    logger.info("perfagent: %d blocks compute their activations again in the backward pass", len(chosen))

    def undo() -> None:
        for _, block in chosen:
            settings = block.__dict__.pop(_SETTINGS, None)
            if settings is not None:
                del block.__dict__["forward"]
                block.__dict__ |= {} if settings.plain is None else {"forward": settings.plain}

    return undo


def dear_operators() -> list[Operator]:
    """What "selective" keeps: operators whose results take long to compute for the memory that they fill."""
    aten: Any = torch.ops.aten
    names = (
        "mm addmm bmm baddbmm _scaled_mm _grouped_mm convolution linear _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu "
        "_flash_attention_forward _efficient_attention_forward"
    )
    operators = (getattr(getattr(aten, name, None), "default", None) for name in names.split())
    return [operator for operator in operators if operator is not None]


def _chosen(model: nn.Module, mode: str | Choose) -> list[tuple[str, nn.Module]]:
    check_module(model)
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise ConfigError("the model checkpoints its layers itself already: gradient_checkpointing_disable() ends that")
    names = {id(module): name for name, module in model.named_modules()}
    if callable(mode):
        chosen = [(name, one) for name, one in model.named_modules() if one is not model and mode(name, one)]
    else:
        blocks = blocks_of(nn.ModuleList([model]))
        chosen = [(names[id(block)], block) for block in blocks[:: _stride(mode)]]
        if not blocks:
            kinds = ", ".join(sorted({type(child).__name__ for child in model.children()})) or "no modules"
            raise ConfigError(
                f"the model has no list of like modules to checkpoint; it has {kinds}. Say which: "
                "checkpoint_activations(model, lambda name, module: isinstance(module, Block))"
            )
    if not chosen:
        raise ConfigError("the function of mode chose no module; it gets name and module, and returns True or False")
    _check_each(chosen)
    return chosen


def _check_each(chosen: list[tuple[str, nn.Module]]) -> None:
    inside = {id(part): name for name, module in chosen for part in module.modules() if part is not module}
    for name, module in chosen:
        if id(module) in inside:
            raise ConfigError(f"{name} lies inside {inside[id(module)]}, which is chosen as well; choose one of them")
        if vars(module).get(_SETTINGS) is not None:
            raise ConfigError(f"{name} is checkpointed already; what checkpoint_activations returned takes it out")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ConfigError(f"{name} is compiled already; call checkpoint_activations before compile")


def _check_in_place(chosen: list[tuple[str, nn.Module]]) -> None:
    for name, block in chosen:
        for inside, module in block.named_modules():
            if getattr(module, "inplace", False) is True:
                raise ConfigError(
                    f"{name}.{inside} changes its input in place, which may be a result that is to be kept; say inplace=False "
                    "there (in a block that is computed again it saves nothing), or use mode='all'"
                )


def _stride(mode: object) -> int:
    if mode in ("all", "selective"):
        return 1
    head, _, number = mode.partition(":") if isinstance(mode, str) else ("", "", "")
    if head == "every" and number.isascii() and number.isdigit() and int(number) >= 1:
        return int(number)
    raise ConfigError(f'mode must be "all", "every:n" with n of 1 or more, "selective" or a function; got {mode!r:.80}')


def _operators(mode: object, keep: Iterable[Operator] | None) -> list[Operator]:
    if keep is None:
        return dear_operators() if mode == "selective" else []
    operators = list(keep)
    for operator in operators:
        if not isinstance(operator, torch._ops.OpOverload):
            raise ConfigError(f"keep takes operators such as torch.ops.aten.mm.default; got {operator!r:.80}")
    return operators


# ---- what a block's forward() becomes. A method of the instance, not a subclass: pickle and deepcopy know methods.


def _forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    settings: _Settings = block.__dict__[_SETTINGS]
    plain = settings.plain or functools.partial(type(block).forward, block)
    preserve_rng = settings.preserve_rng
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    if any(kwargs.get(name) is not None for name in _CACHES) or kwargs.get("use_cache"):
        kwargs = _without_cache(block, kwargs)
    call = functools.partial(plain, **kwargs)
    selective = functools.partial(_selective, list(settings.keep)) if settings.keep else None
    context: State = {}
    if not torch.compiler.is_compiling():
        context["context_fn"] = functools.partial(contexts, block, settings.kept, selective, preserve_rng=preserve_rng)
    elif selective is not None:  # the compiler computes operators again, not the block: state moves once by itself
        context["context_fn"] = selective
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve_rng, **context)


_forward.__name__ = "forward"  # pickle writes a method as (object, name): the class's own is found


def _without_cache(block: nn.Module, kwargs: State) -> State:
    """A cache of keys and values would be filled a second time by the second computation; training needs none."""
    kwargs = dict(kwargs)
    for name in [name for name in _CACHES if kwargs.get(name) is not None]:
        length = kwargs[name].get_seq_length() if hasattr(kwargs[name], "get_seq_length") else 0
        if length:
            raise ConfigError(
                f"{type(block).__name__} is checkpointed and was given {name} with {length} positions in it, which it would fill "
                "twice; train without a filled cache (use_cache=False), or take the checkpointing out"
            )
        kwargs[name] = None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return kwargs
