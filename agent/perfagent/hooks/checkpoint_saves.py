"""Times checkpoints where they are written: by torch, by its distributed checkpointing, and by the frameworks.

Each of these functions is wrapped when its module is imported, and restored when the run ends. A save on another thread
(an asynchronous one, after its staging) blocks nobody and is not counted; only its path is recorded.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.boundary.guard import guarded
from perfagent.hooks.phases import watch_phase
from perfagent.samplers.folders import saved_to
from perfagent.step.state import Progress

__all__ = ["SAVERS", "install"]

SAVERS: dict[str, tuple[str, ...]] = {
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
"""Module -> functions and methods that write a checkpoint."""
_FILE_BYTES = ("checkpoint/file_bytes",)
_PATHS = ("f", "checkpoint_id", "filename", "filepath", "save_directory", "save_dir", "output_dir", "path")

Patch = Callable[[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], None]


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Watches the modules that are imported now, and the others once they are."""
    replace_when_imported(SAVERS, watch_phase("checkpoint", _note_path, _tell_size), patch, when_imported)


def replace_when_imported(
    functions: Mapping[str, tuple[str, ...]],
    watch: Any,
    patch: Patch,
    when_imported: Callable[[str, Callable[[], None]], None],
) -> None:
    """Watches functions (`name`) and methods (`Class.name`) of modules. Skips those that a version does not have."""
    for module, names in functions.items():

        def replace(module: str = module, names: tuple[str, ...] = names) -> None:
            for name in names:
                *classes, attribute = name.split(".")
                owner: Any = sys.modules[module]
                for one in classes:
                    owner = getattr(owner, one, None)
                if owner is not None and attribute in vars(owner):
                    patch(owner, attribute, watch)
            keep_out_of_frames()

        when_imported(module, replace)


@guarded
def _note_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Gives the path of the checkpoint to the disk sampler, and returns it."""
    for value in (*args[:3], *(kwargs.get(name) for name in _PATHS)):
        if isinstance(value, (str, os.PathLike, io.IOBase)):
            path = getattr(value, "name", "") if isinstance(value, io.IOBase) else os.fspath(value)
            if isinstance(path, str) and path:
                if "://" not in path:
                    path = os.path.abspath(path)  # noqa: PTH100 - twice as fast; absolute, as a chdir may follow
                if not saved_to or saved_to[-1] != path:
                    saved_to.append(path)
                return path
            return None
    return None


@guarded
def _tell_size(p: Progress, path: str | None) -> None:
    """Of a file that was saved, as `checkpoint/file_bytes` of the step in progress. The last kilobytes of one that the script
    holds open may be missing; the size of a folder says nothing."""
    try:
        found = os.stat(path) if path else None  # noqa: PTH116 - half as long
    except (OSError, ValueError):  # of another machine, or no path at all
        return
    if found is not None and stat.S_ISREG(found.st_mode):
        p.rows.append((p.logged_at(), time.time(), time.monotonic(), _FILE_BYTES, (float(found.st_size),)))
