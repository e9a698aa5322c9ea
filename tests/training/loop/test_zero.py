"""Configurations of ZeRO: what is written, and each conflict in a sentence."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.deepspeed_config import check_zero_config, stale_locks, zero_conflicts

ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}
OFF = {"device": "cpu"}
BATCH = {"train_micro_batch_size_per_gpu": 4}


@pytest.fixture(autouse=True)
def no_extensions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of compiled extensions with nothing in it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions"


@pytest.mark.real  # the import of deepspeed binds a socket
@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    [(0, "fp32", None), (1, "fp16", "optimizer"), (2, "bf16", "optimizer"), (3, "bf16", "all")],
)
def test_what_is_written_has_no_conflict_and_deepspeed_reads_it(stage: int, precision: Any, offload: Any) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = perfagent.zero_config(
        stage, micro_batch=4, precision=precision, grad_accum=8, clip_norm=1.0, offload=offload, device="cuda"
    )
    assert [*zero_conflicts(config, device="cuda", world_size=8)] == []
    read = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert read.stage == stage
    assert not read.model_extra
    assert [name for name in ("bf16", "fp16") if name in config] == ([] if precision == "fp32" else [precision])
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (8, 1.0)


def test_overrides_are_laid_over_and_judged() -> None:
    def overridden(elements: Any) -> Any:
        overrides = {"zero_optimization": {"reduce_bucket_size": elements}}
        config = perfagent.zero_config(2, micro_batch=1, device="cuda", overrides=overrides)
        return config["zero_optimization"]

    assert (overridden(7)["reduce_bucket_size"], overridden(7)["stage"]) == (7, 2)
    with pytest.raises(ConfigError, match=r'zero_optimization\.reduce_bucket_size is "auto"'):
        overridden("auto")


@pytest.mark.parametrize(
    ("config", "device", "words"),
    [
        ({"bf16": {"enabled": True}, "amp": {"enabled": True}}, "cuda", "amp is laid over bf16"),
        ({"amp": {"enabled": True}, "zero_optimization": {"stage": 1}}, "cuda", "does not work with ZeRO"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "cuda", "both enabled"),
        ({"fp16": {"enabled": True}}, "cpu", "this is a CPU"),
        ({"bf16": True}, "cuda", 'bf16 is True; it must be an object such as {"enabled": true}'),
        ({"bf16": {"enabled": "true"}}, "cuda", "bf16.enabled is 'true'; it must be true or false"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "cuda", 'optimizer.params.lr is "auto"'),
        ({"optimizer": ADAM}, "cpu", '"torch_adam": true'),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "cuda", "offload_param needs stage 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": OFF}, "optimizer": ADAM}, "cpu", "in host memory already"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": OFF}}, "cuda", "zero_force_ds_cpu_optimizer"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "cuda", "no nvme_path"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cuda", "old name"),
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1}}, "cuda", "no effect in stage 2"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}}, "cuda", "number of elements"),
        ({"gradient_clipping": -1}, "cuda", "largest norm"),
        ({"train_batch_size": 100, "gradient_accumulation_steps": 4}, "cuda", "4 samples x 4 micro-steps x 8 ranks are 128"),
    ],
)  # fmt: skip
def test_a_conflict_is_refused(config: dict[str, Any], device: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_zero_config(BATCH | config, device=device, world_size=8)
    assert words in str(refused.value)


def test_all_conflicts_are_told_at_once() -> None:
    both = {"optimizer": ADAM, "fp16": {"enabled": True}, "gradient_clipping": "auto"}
    assert len([*zero_conflicts(BATCH | both, device="cpu")]) == 3
    assert len([*zero_conflicts({}, device="cuda")]) == 1  # no batch size
    sound = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zero_optimization": {"stage": 3}}
    assert [*zero_conflicts(BATCH | sound, device="cpu")] == []


def test_a_lock_of_a_killed_build_is_refused_where_it_matters(no_extensions: Path) -> None:
    lock = no_extensions / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - 3600,) * 2)
    assert stale_locks() == [lock]
    for said, options in (("build that was killed", {"device": "cpu"}), ("cpu_adam", {"offload": "optimizer"})):
        with pytest.raises(ConfigError, match=said):
            perfagent.zero_config(2, micro_batch=1, **{"device": "cuda"} | options)  # type: ignore[arg-type]
    assert perfagent.zero_config(2, micro_batch=1, device="cuda")  # compiles nothing
    with lock.open():  # a builder of this machine goes on
        assert stale_locks() == []
    assert stale_locks() == [lock]
    (lock.parent / "cpu_adam.o").touch()  # one of another
    assert stale_locks() == []
