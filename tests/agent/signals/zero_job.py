"""Two ranks train under DeepSpeed's ZeRO-1, 2 and 3; each writes what it would send of its pieces of the gradients."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from builders import RecordingSender
from deepspeed.accelerator import get_accelerator
from torch import nn

from perfagent.boundary import guard
from perfagent.session import Run

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
STEPS = 4


def train(stage: int, folder: Path, *, half: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    sender = RecordingSender(folder / f"{rank}", overhead_budget_pct=1e9)
    run = Run(sender.config, name=None, config={}, tags=[], group=None, start_step=None, sender=sender)  # type: ignore[arg-type]
    run.start()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
        "gradient_clipping": 0.01, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    if half:
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    torch.manual_seed(7 + rank)
    norms = []
    for _ in range(STEPS):
        batch = torch.randn(4, 6)
        engine.backward(engine(batch.half() if half else batch).float().square().mean())
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    run.finish()
    names = [name for name, _ in model.named_parameters()]
    return {"rows": sender.drain(), "norms": norms, "names": names, "failures": dict(guard.failures)}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    get_accelerator().is_fp16_supported = lambda: True  # slow on a CPU, but right
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)
    said = {f"ZeRO-{stage}": train(stage, folder, half=False) for stage in (1, 2, 3)}
    said["ZeRO-1, half precision"] = train(1, folder, half=True)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
