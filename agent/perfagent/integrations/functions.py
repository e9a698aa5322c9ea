"""Functions of torch and of libraries that save, evaluate, act, generate, search, clip or divide: each is wrapped when its
module is imported, and restored when the run ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations import api

if TYPE_CHECKING:
    import torch

    from perfagent.integrations.api import Function, Watch

__all__ = ["FUNCTIONS", "Functions", "Patch", "Table", "WhenImported", "install"]

Patch = Callable[[Any, str, "Watch"], None]
"""`patch(owner, name, watch)` replaces an attribute until the run ends."""
WhenImported = Callable[[str, Callable[[], None]], None]
Functions = Mapping[str, tuple[str, ...]]
"""Module -> names of its functions, and of methods (`Class.name`)."""
Table = Iterable[tuple["Watch", Functions]]

_TWINS = {"lightning.pytorch": "pytorch_lightning", "torch.utils.tensorboard": "tensorboardX"}
"""Packages that have modules of the same content under another name, too."""
_SAVERS: Functions = {
    "torch": ("save",),
    # scripts that imported the outer function by name before us still call this inner function
    "torch.serialization": ("save", "_save", "_legacy_save"),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict", "_save_state_dict"),
    "safetensors.torch": ("save_file", "save_model", "serialize_file"),
    "transformers.trainer": ("Trainer._save_checkpoint", "Trainer.save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "accelerate.accelerator": ("Accelerator.save_state", "Accelerator.save_model"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "lightning.fabric.fabric": ("Fabric.save",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
}
_EVALUATORS: Functions = {
    "transformers.trainer": ("Trainer.evaluate", "Trainer.predict"),
    "lightning.pytorch.loops.evaluation_loop": ("_EvaluationLoop.run",),
    "stable_baselines3.common.evaluation": ("evaluate_policy",),
    "ultralytics.engine.validator": ("BaseValidator.__call__",),
}
_ENVIRONMENTS: Functions = {
    "gymnasium.wrappers.common": ("OrderEnforcing.step",),  # `gymnasium.make` wraps nearly every environment in it
    "gymnasium.vector.sync_vector_env": ("SyncVectorEnv.step",),
    "gymnasium.vector.async_vector_env": ("AsyncVectorEnv.step",),
    "gym.wrappers.order_enforcing": ("OrderEnforcing.step",),
    "stable_baselines3.common.vec_env.base_vec_env": ("VecEnv.step",),
}
_GENERATORS: Functions = {"transformers.generation.utils": ("GenerationMixin.generate",)}
_SEARCHES: Functions = {
    "lightning.pytorch.callbacks.lr_finder": ("LearningRateFinder.lr_find",),
    "lightning.pytorch.callbacks.batch_size_finder": ("BatchSizeFinder.scale_batch_size",),
    "fastai.callback.schedule": ("Learner.lr_find",),
    "torch_lr_finder.lr_finder": ("LRFinder.range_test",),
}
"""Searches for a learning rate or a batch size before the training: they step the optimizer, and put everything back
afterward. Their steps are not the training's, and their loss diverges on purpose."""


def _hide(original: Function) -> Function:
    hidden: Function = api.unwatched()(original)
    return hidden


def _clip_of_fsdp1(original: Function) -> Function:
    """FSDP1's own method for clipping, whose norm covers the gradients of all ranks. torch's functions, called with its
    shards, return a norm of this rank's alone, which means nothing (hooks/grad_clipping.py leaves it out)."""

    @functools.wraps(original)
    def clip_grad_norm_(model: torch.nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        clip = api.begin_clipping(model.parameters())
        total: torch.Tensor = original(model, max_norm, norm_type)
        if norm_type == 2.0:
            api.end_clipping(clip, total)
        return total

    return clip_grad_norm_


def _divides_losses(_model: object, examples_in_step: int) -> None:
    """poutyne: with `batches_per_step` it backpropagates the sum over each batch and divides the gradients of all at the end.
    So the losses are divided, too: then they are what the optimizer minimizes."""
    api.divide_losses(examples_in_step)


def _scales_gradients(_stage: object, grad_scale_factor: int) -> None:
    """torch's pipelining: a schedule backpropagates the loss of each micro-batch as it is, and divides the gradients by their
    number once its backward passes are over, unless it was made with `scale_grads=False`."""
    if grad_scale_factor != 1:
        api.divides_later()


FUNCTIONS: Table = (
    (api.watch_save, _SAVERS),
    (api.watch_phase("eval"), _EVALUATORS),
    (api.watch_environment, _ENVIRONMENTS),
    (api.watch_generation, _GENERATORS),
    (_hide, _SEARCHES),
    (_clip_of_fsdp1, {
        "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel.clip_grad_norm_",),
    }),
    (api.before(_divides_losses), {"poutyne.framework.model": ("Model._adjust_step_size",)}),
    (api.before(_scales_gradients), {"torch.distributed.pipelining.stage": ("_PipelineStageBase.scale_grads",)}),
    # of fastai's optimizers, a class of their own; those that it wraps, by `OptimWrapper`, are torch's
    (api.watch_whole_step, {"fastai.optimizer": ("Optimizer.step",)}),
    (api.watch_clear, {"fastai.optimizer": ("Optimizer.zero_grad",)}),
)  # fmt: skip


def install(patch: Patch, when_imported: WhenImported, table: Table = FUNCTIONS) -> None:
    """Watches the modules that are imported now, and the others once they are."""
    for watch, functions in table:
        for module, names in functions.items():
            for package in {module, *(module.replace(one, twin) for one, twin in _TWINS.items())}:

                def replace(package: str = package, names: Iterable[str] = names, watch: Watch = watch) -> None:
                    _replace(sys.modules[package], names, watch, patch)

                when_imported(package, replace)


def _replace(module: ModuleType, names: Iterable[str], watch: Watch, patch: Patch) -> None:
    """Skips functions that a version does not have."""
    for name in names:
        kind, _, attribute = name.rpartition(".")
        owner = getattr(module, kind, None) if kind else module
        if hasattr(owner, attribute):
            patch(owner, attribute, watch)
