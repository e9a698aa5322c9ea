"""Configurations of ZeRO: what is written. What is refused is in test_wrong_use.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.deepspeed_config import stale_locks, zero_conflicts

ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}
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
        stage, micro_batch=4, precision=precision, grad_accum=8, clip_norm=1.0, offload=offload, device="cuda",
        overrides={"zero_optimization": {"reduce_bucket_size": 7}},
    )  # fmt: skip
    assert [*zero_conflicts(config, device="cuda", world_size=8)] == []
    read = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert (read.stage, read.reduce_bucket_size) == (stage, 7)
    assert not read.model_extra
    assert [name for name in ("bf16", "fp16") if name in config] == ([] if precision == "fp32" else [precision])
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (8, 1.0)


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
