"""DeepSpeed over gloo."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from models import classifier
from script import Script
from torch import nn

from loops.parallel import BATCH, batches

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer, **config: Any) -> Any:
    settings = {"train_micro_batch_size_per_gpu": BATCH, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings | config, dist_init_required=False)[0]


def zero(script: Script, stage: str, windows: str = "1") -> None:
    """Full precision, clipped."""
    count, model = int(windows), classifier(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = engine_of(
        model, optimizer, gradient_accumulation_steps=count, gradient_clipping=0.5, zero_optimization={"stage": int(stage)},
    )  # fmt: skip
    script.attach()
    losses: list[float] = []
    for x, y in batches(script, count):
        loss = nn.functional.cross_entropy(engine(x), y)
        losses.append(loss.item())
        engine.backward(loss)
        if len(losses) == count:
            gradients = [deepspeed.utils.safe_get_full_grad(parameter) for parameter in model.parameters()]
            norm = float(torch.cat([gradient.double().flatten() for gradient in gradients]).norm())
        engine.step()
        if len(losses) == count:
            script.step(loss=sum(losses) / count, lr=1e-2, norm=norm, samples=BATCH * count)
            losses.clear()
    _end(script, engine)


def zero_brain_float(script: Script) -> None:
    """ZeRO-2 in bfloat16, backward called on the loss itself, a warm-up that the engine moves on."""
    script.attach()
    model = classifier(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warm_up = {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 10, "warmup_type": "linear"}
    engine = engine_of(
        model, optimizer, bf16={"enabled": True}, zero_optimization={"stage": 2}, gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": warm_up},
    )  # fmt: skip
    losses: list[float] = []
    for x, y in batches(script, 2):
        loss = nn.functional.cross_entropy(engine(x.bfloat16()).float(), y)
        losses.append(loss.item())
        loss.backward()
        lr = engine.optimizer.param_groups[0]["lr"]
        engine.step()
        if len(losses) == 2:
            script.step(loss=sum(losses) / 2, lr=lr, norm=float(engine.get_global_grad_norm()), samples=2 * BATCH)
            losses.clear()
    _end(script, engine)


def zero_half(script: Script) -> None:
    """ZeRO-1 in float16: the loss scale begins too high, so that the first steps overflow and are skipped."""
    get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but right
    script.attach()
    model = classifier(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    half = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    engine = engine_of(model, optimizer, fp16=half, zero_optimization={"stage": 1})
    for x, y in batches(script):
        loss = nn.functional.cross_entropy(engine(x.half()), y)
        scale = engine.optimizer.cur_scale
        engine.backward(loss)
        engine.step()
        truth = {"norm": float(engine.get_global_grad_norm())} if engine.was_step_applied() else {}
        script.step(loss=loss.item(), lr=1e-3, samples=BATCH, scale=scale, skipped=engine.skipped_steps, **truth)
    _end(script, engine)


def zero_adversarial(script: Script) -> None:
    """Two engines: a generator, and a smaller discriminator that steps first."""
    script.attach()
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    discriminator = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    make = engine_of(generator, torch.optim.Adam(generator.parameters(), lr=2e-3), zero_optimization={"stage": 1})
    judge = engine_of(
        discriminator, torch.optim.Adam(discriminator.parameters(), lr=1e-3), zero_optimization={"stage": 1}
    )
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in batches(script):
        fake = make(torch.randn(BATCH, 8))
        both = judge(torch.cat([real, fake.detach()]))
        judge.backward(criterion(both, torch.cat([torch.ones(BATCH, 1), torch.zeros(BATCH, 1)])))
        judge.step()
        loss = criterion(judge(fake), torch.ones(BATCH, 1))
        make.backward(loss)
        make.step()
        judge.optimizer.zero_grad()
        script.step(loss=loss.item(), lr=2e-3, norm=float(make.get_global_grad_norm()), samples=BATCH)
    _end(script, make)
    judge.destroy()


def _end(script: Script, engine: Any) -> None:
    if engine.zero_optimization_stage() == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            script.produced(engine.module)
    else:
        script.produced(engine.module)
    engine.destroy()
