"""Functions of torch and of libraries that save, evaluate, act, generate or search: each is wrapped when its module is
imported, and restored when the run ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.integrations import api

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["FUNCTIONS", "install"]

_Functions = Mapping[str, tuple[str, ...]]
"""Module -> names of its functions, and of methods (`Class.name`)."""

_SAVERS: _Functions = {
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
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "lightning.fabric.fabric": ("Fabric.save",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
}
_EVALUATORS: _Functions = {
    "transformers.trainer": ("Trainer.evaluate", "Trainer.predict"),
    "lightning.pytorch.loops.evaluation_loop": ("_EvaluationLoop.run",),
    "pytorch_lightning.loops.evaluation_loop": ("_EvaluationLoop.run",),
    "stable_baselines3.common.evaluation": ("evaluate_policy",),
    "ultralytics.engine.validator": ("BaseValidator.__call__",),
}
_ENVIRONMENTS: _Functions = {
    "gymnasium.wrappers.common": ("OrderEnforcing.step",),  # `gymnasium.make` wraps nearly every environment in it
    "gymnasium.vector.sync_vector_env": ("SyncVectorEnv.step",),
    "gymnasium.vector.async_vector_env": ("AsyncVectorEnv.step",),
    "gym.wrappers.order_enforcing": ("OrderEnforcing.step",),
    "stable_baselines3.common.vec_env.base_vec_env": ("VecEnv.step",),
}
_GENERATORS: _Functions = {"transformers.generation.utils": ("GenerationMixin.generate",)}
_SEARCHES: _Functions = {
    "lightning.pytorch.callbacks.lr_finder": ("LearningRateFinder.lr_find",),
    "lightning.pytorch.callbacks.batch_size_finder": ("BatchSizeFinder.scale_batch_size",),
    "pytorch_lightning.callbacks.lr_finder": ("LearningRateFinder.lr_find",),
    "pytorch_lightning.callbacks.batch_size_finder": ("BatchSizeFinder.scale_batch_size",),
    "fastai.callback.schedule": ("Learner.lr_find",),
    "torch_lr_finder.lr_finder": ("LRFinder.range_test",),
}
"""Searches for a learning rate or a batch size before the training: they step the optimizer, and put everything back
afterward. Their steps are not the training's, and their loss diverges on purpose."""


def _hide(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def search(*args: Any, **kwargs: Any) -> Any:
        with api.unwatched():
            return original(*args, **kwargs)

    return search


FUNCTIONS = (
    (_SAVERS, api.watch_save),
    (_EVALUATORS, api.watch_phase("eval")),
    (_ENVIRONMENTS, api.watch_environment),
    (_GENERATORS, api.watch_generation),
    (_SEARCHES, _hide),
)


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Watches the modules that are imported now, and the others once they are."""
    for functions, watch in FUNCTIONS:
        for module, names in functions.items():

            def replace(
                module: str = module, names: tuple[str, ...] = names, watch: Callable[..., Any] = watch
            ) -> None:
                for name in names:
                    _replace(sys.modules[module], name, watch, patch)
                keep_out_of_frames()

            when_imported(module, replace)


def _replace(module: Any, name: str, watch: Callable[..., Any], patch: Patch) -> None:
    """Skips functions that a version does not have."""
    owner, (*classes, attribute) = module, name.split(".")
    for one in classes:
        owner = getattr(owner, one, None)
    if owner is not None and attribute in vars(owner):
        patch(owner, attribute, watch)
