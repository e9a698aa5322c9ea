"""Makes a DeepSpeed ZeRO configuration from a few options, and explains each conflict in a configuration.

Some combinations of options make DeepSpeed fail late, hang, or ignore an option without a word. This module refuses
them with a sentence, before a process group exists. It does not import DeepSpeed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice
from perfagent_loop.kinds import State
from perfagent_loop.precision import Precision, checked_precision

__all__ = ["check_zero_config", "extensions_folder", "stale_locks", "zero_config", "zero_conflicts"]

Config: TypeAlias = Mapping[str, Any]
Offload = Literal["optimizer", "all"]
_ADAM = ("adam", "adamw")


def zero_config(
    stage: int,
    *,
    micro_batch: int,
    precision: Precision = "bf16",
    grad_accum: int = 1,
    clip_norm: float | None = None,
    offload: Offload | None = None,
    autocast: bool = False,
    optimizer: Config | None = None,
    scheduler: Config | None = None,
    communication: Precision | None = None,
    bucket_elements: int = 200_000_000,
    device: str | None = None,
    overrides: Config | None = None,
) -> State:
    """Returns a configuration for `deepspeed.initialize(model=..., optimizer=..., config=...)`, and checks it.

    Args:
        stage: What is divided over the ranks. 0: nothing. 1: optimizer state. 2: gradients, too. 3: parameters, too.
        micro_batch: Samples of a micro-step on one rank.
        precision: Of weights and computation, with fp32 master weights.
        grad_accum: Micro-steps of a step.
        clip_norm: The largest norm of all gradients.
        offload: "optimizer" moves the optimizer state to host memory, "all" the parameters, too (stage 3).
        autocast: True keeps the weights in fp32, and lets torch's autocast run products in `precision`.
        optimizer: DeepSpeed's own optimizer, as {"type", "params"}; None for one of torch's, passed to `initialize`.
        scheduler: DeepSpeed's own scheduler, as {"type", "params"}.
        communication: The precision in which gradients are sent.
        bucket_elements: Numbers that are sent together.
        device: "cuda" or "cpu"; found if it is not given.
        overrides: Entries that replace those of the result, key by key.

    Raises:
        ConfigError: Options contradict each other. The message lists every conflict.

    Source: [DeepSpeed configuration](https://www.deepspeed.ai/docs/config-json/).
    """
    checked_precision(precision)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ConfigError(f"stage must be 0, 1, 2 or 3, not {stage!r:.80}")
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler), ("overrides", overrides)):
        if given is not None and not _is_dict(given):
            example = '{"wall_clock_breakdown": True}' if name == "overrides" else '{"type": "...", "params": {...}}'
            raise ConfigError(f"{name} must be a dict such as {example}, not {given!r:.80}")
    check_choice("device", device, ("cuda", "cpu"), or_none=True)
    check_choice("offload", offload, get_args(Offload), or_none=True)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config: State = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": grad_accum,
        "steps_per_print": 1_000_000_000,  # the loop's monitor says more
        "zero_optimization": _stage(stage, bucket_elements, offload, overlaps=device == "cuda"),
    }
    if clip_norm is not None:
        config["gradient_clipping"] = clip_norm
    config |= _precision(precision, autocast=autocast)
    if communication is not None:
        config["communication_data_type"] = checked_precision(communication)
    if optimizer is not None:
        config["optimizer"] = dict(optimizer)
    else:
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
    if scheduler is not None:
        config["scheduler"] = dict(scheduler)
    laid_over = _merged(config, overrides or {})
    check_zero_config(laid_over, device=device)
    return laid_over


def check_zero_config(config: Config, *, device: str | None = None, world_size: int | None = None) -> None:
    """Raises ConfigError that names all conflicts of a configuration, however it was made."""
    found = [*zero_conflicts(config, device=device, world_size=world_size)]
    if found:
        raise ConfigError("this DeepSpeed configuration cannot work:\n- " + "\n- ".join(found))


def zero_conflicts(config: Config, *, device: str | None = None, world_size: int | None = None) -> Iterator[str]:
    """A sentence for each conflict: what is there, why it fails, and what to write instead."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not _is_dict(config):
        yield f"it is {config!r:.80}, and must be a dict: json.load() reads one from a file"
        return
    yield from _autos(config)
    yield from _sections(config)
    yield from _precisions(config, device)
    yield from _batches(config, world_size)
    yield from _offloads(config, device)
    yield from _stages(config)
    yield from _optimizers(config, device)
    if _compiles(config, device):
        for lock in stale_locks():
            yield (
                f"{_said(lock)} was left by a build that was killed: DeepSpeed would wait for it for ever, in silence; delete "
                f"the folder {_said(lock.parent)}"
            )


def _stage(stage: int, bucket: int, offload: Offload | None, *, overlaps: bool) -> State:
    zero: State = {"stage": stage}
    if stage:
        zero |= {"reduce_bucket_size": bucket, "contiguous_gradients": True, "overlap_comm": overlaps}
    if stage in (1, 2):
        zero |= {"allgather_partitions": True, "allgather_bucket_size": bucket, "reduce_scatter": True}
    if stage == 3:
        zero |= {
            "sub_group_size": 10**9, "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000, "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9, "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    if offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _precision(precision: Precision, *, autocast: bool) -> State:
    if precision == "fp32":
        if autocast:
            raise ConfigError("autocast is half precision, and precision is 'fp32': say precision='bf16' instead")
        return {}
    if autocast:
        return {"torch_autocast": {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision]}}
    if precision == "bf16":
        return {"bf16": {"enabled": True}}
    window = {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, **window}}


def _merged(config: Config, over: Config) -> State:
    merged = dict(config)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def _is_dict(given: object) -> bool:
    return isinstance(given, Mapping)


def _sections(config: Config) -> Iterator[str]:
    for name in ("zero_optimization", "bf16", "fp16", "amp", "torch_autocast"):
        example = '{"stage": 2}' if name == "zero_optimization" else '{"enabled": true}'
        section = config.get(name)
        if section is not None and not isinstance(section, Mapping):
            yield f"{name} is {section!r:.60}; it must be an object such as {example}"
        enabled = section.get("enabled") if isinstance(section, Mapping) else None
        if enabled is not None and enabled != "auto" and not isinstance(enabled, bool):
            yield f"{name}.enabled is {enabled!r:.60}; it must be true or false"


def _enabled(config: Config, *names: str) -> bool:
    return any(isinstance(config.get(name), Mapping) and config[name].get("enabled") is True for name in names)


def _zero(config: Config) -> Config:
    zero = config.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _autos(config: Config, path: str = "") -> Iterator[str]:
    for key, value in config.items():
        if value == "auto" and isinstance(value, str):
            yield (
                f'{path}{key} is "auto", which only the Trainer of transformers fills in; DeepSpeed itself takes it for a '
                "value: write a number, or leave it out"
            )
        elif isinstance(value, Mapping):
            yield from _autos(value, f"{path}{key}.")


def _precisions(config: Config, device: str) -> Iterator[str]:
    bf16, fp16 = _enabled(config, "bf16", "bfloat16"), _enabled(config, "fp16")
    amp, autocast = _enabled(config, "amp"), _enabled(config, "torch_autocast")
    half = "bf16" if bf16 else "fp16"
    if bf16 and fp16:
        yield "bf16 and fp16 are both enabled, and the weights can be in one only: bf16 on Ampere GPUs and later, fp16 before"
    if amp and (bf16 or fp16):
        yield f"amp is laid over {half}: DeepSpeed keeps weights and activations in {half} already; remove amp"
    if amp and _zero(config).get("stage", 0):
        yield "amp (NVIDIA Apex) does not work with ZeRO; remove it and enable bf16, or torch_autocast"
    if autocast and (bf16 or fp16):
        yield f"torch_autocast is laid over {half}: the weights are in {half} already; enable one of the two"
    if fp16 and device == "cpu":
        yield "fp16 is enabled and this is a CPU, on which DeepSpeed refuses it; enable bf16, or compute in fp32"


def _batches(config: Config, world_size: int | None) -> Iterator[str]:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, whole = (config.get(name) for name in names)
    for name, value in zip(names, (micro, steps, whole), strict=True):
        if value is not None and value != "auto" and (type(value) is not int or value < 1):
            yield f"{name} is {value!r:.60}; it must be a whole number, 1 or more"
            return
    if micro is None and whole is None:
        yield (
            "neither train_micro_batch_size_per_gpu nor train_batch_size is there, and DeepSpeed needs one; write the samples "
            "of a micro-step"
        )
    ranks = world_size or 1
    product = micro * steps * ranks if type(micro) is int and type(steps) is int else None
    if world_size and product and whole not in (None, "auto", product):
        yield (
            f"train_batch_size is {whole}, but {micro} samples x {steps} micro-steps x {ranks} ranks are {product}; leave "
            "train_batch_size out"
        )
    clip = config.get("gradient_clipping")
    if clip is not None and clip != "auto" and not (isinstance(clip, (int, float)) and clip >= 0):
        yield f"gradient_clipping is {clip!r:.60}; it is the largest norm of the gradients, above 0, or 0 for none"


def _offloads(config: Config, device: str) -> Iterator[str]:
    zero = _zero(config)
    stage = zero.get("stage", 0)
    renamed = {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_params": "offload_param",
        "cpu_offload_param": "offload_param",
    }
    for old, new in renamed.items():
        if old in zero:
            yield f'zero_optimization.{old} is an old name that is ignored or refused; write "{new}": {{"device": "cpu"}}'
    offloads = [name for name in ("offload_optimizer", "offload_param") if _goes_away(zero.get(name))]
    if "offload_param" in offloads and stage != 3:
        yield f"offload_param needs stage 3, and the stage is {stage}; use stage 3, or offload_optimizer alone"
    if "offload_optimizer" in offloads and stage == 0:
        yield "offload_optimizer needs stage 1, 2 or 3, and the stage is 0"
    if offloads and device == "cpu":
        yield f"{' and '.join(offloads)}: all is in host memory already, and DeepSpeed would compile C++; leave it out"
    for name in offloads:
        target = zero[name]
        if target.get("device") == "nvme" and not target.get("nvme_path"):
            yield f"{name} goes to nvme and has no nvme_path: write a folder on a local disk"
        if target.get("device") == "nvme" and stage != 3:
            yield f"{name} to nvme needs stage 3, and the stage is {stage}; offload to cpu instead"
    forced = config.get("zero_force_ds_cpu_optimizer", True)
    if "offload_optimizer" in offloads and "optimizer" not in config and forced:
        yield (
            'offload_optimizer with a torch optimizer of yours is refused by DeepSpeed unless "zero_force_ds_cpu_optimizer" '
            "is false"
        )


def _goes_away(target: object) -> bool:
    return isinstance(target, Mapping) and target.get("device", "none") != "none"


def _stages(config: Config) -> Iterator[str]:
    zero = _zero(config)
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        if stage != "auto":
            yield f"zero_optimization.stage is {stage!r:.60}; it must be 0, 1, 2 or 3"
        return
    strangers = sorted(key for key in zero if key.startswith("stage3_") and stage != 3)
    if strangers:
        yield f"{', '.join(strangers)} have no effect in stage {stage}; remove them, or use stage 3"
    if "stage3_gather_fp16_weights_on_model_save" in zero:
        yield "stage3_gather_fp16_weights_on_model_save is called stage3_gather_16bit_weights_on_model_save today"
    for key in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        value = zero.get(key, "auto")
        least = 1 if key == "reduce_bucket_size" else 0
        if value not in (None, "auto") and not (isinstance(value, (int, float)) and value >= least):
            yield f"zero_optimization.{key} is {value!r:.60}; it is a number of elements, such as 200000000"


def _optimizers(config: Config, device: str) -> Iterator[str]:
    optimizer = config.get("optimizer")
    if optimizer is None:
        return
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("type"), str):
        yield 'optimizer must be {"type": "AdamW", "params": {...}}, or left out where initialize gets a torch optimizer'
        return
    if device == "cpu" and optimizer["type"].lower() in _ADAM and not _torch_adam(optimizer):
        yield (
            f'optimizer {optimizer["type"]} on a CPU compiles C++ for minutes before the first step; add "torch_adam": true to '
            "its params, or pass a torch optimizer to initialize"
        )
    forced = config.get("zero_force_ds_cpu_optimizer", True)
    if _torch_adam(optimizer) and forced and _goes_away(_zero(config).get("offload_optimizer")):
        yield 'torch_adam with offload_optimizer is refused by DeepSpeed unless "zero_force_ds_cpu_optimizer" is false'


def _torch_adam(optimizer: Config) -> bool:
    params = optimizer.get("params")
    return isinstance(params, Mapping) and params.get("torch_adam") is True


def _compiles(config: Config, device: str) -> bool:
    """Whether DeepSpeed will compile an extension, or load one that it compiled."""
    optimizer = config.get("optimizer")
    adam = isinstance(optimizer, Mapping) and str(optimizer.get("type")).lower() in _ADAM and not _torch_adam(optimizer)
    # on a CPU: its shared-memory communication
    return device == "cpu" or adam or _goes_away(_zero(config).get("offload_optimizer"))


def _said(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


QUIET_S = 60.0
"""While its folder still changes, a lock that no process here holds may be of another container or machine."""


def extensions_folder() -> Path:
    """Where torch keeps the extensions that it compiled for this Python and this torch."""
    import torch

    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"rocm{hip}" if hip is not None else "cpu" if cuda is None else f"cu{cuda}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (
        cache
        / "torch_extensions"
        / f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}_{build.replace('.', '')}"
    )


def stale_locks(folder: Path | None = None) -> list[Path]:
    """The locks below `folder` that no process here has open, and beside which nothing changed for a minute."""
    folder = extensions_folder() if folder is None else folder
    return [lock for lock in sorted(folder.glob("*/lock")) if _quiet(lock.parent) and not _held(lock)]


def _quiet(folder: Path) -> bool:
    return time.time() - max((found.st_mtime for found in _stats(folder.iterdir())), default=0.0) > QUIET_S


def _held(lock: Path) -> bool:
    """Whether a process has it open: a builder does, from beginning to end. Or it was released in this moment."""
    wanted = next(_stats([lock]), None)
    return wanted is None or any(os.path.samestat(wanted, found) for found in _stats(Path("/proc").glob("[0-9]*/fd/*")))


def _stats(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Of those that are there, and not another user's."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield path.stat()
