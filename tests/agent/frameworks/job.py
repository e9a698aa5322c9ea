"""`python job.py FOLDER MODULE LOOP ...`: trains each loop of a module without the agent, then again with it.

LOOP is a function and its options, as in `zero,stage=2`. Of the n-th loop, counted from 0, FOLDER/n/rank-R.json is what
both trainings produced and FOLDER/n/record what the agent recorded. Several ranks meet over gloo, as their environment
says.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from script import Script

import perfagent
from perfagent.step.governor import Governor

Governor.period = lambda *_: 1  # gradients in every step: what is looked at here is what is measured, not when


def main(folder: str, module: str, *loops: str) -> None:
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    trainings = importlib.import_module(f"loops.{module}")
    for number, words in enumerate(loops):
        function, *options = words.split(",")
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        loop = getattr(trainings, function)
        both(loop, dict(option.split("=", 1) for option in options), place)
    if dist.is_initialized():
        dist.destroy_process_group()


def both(loop: Callable[..., None], options: dict[str, str], folder: Path) -> None:
    def trained(attach: Any) -> dict[str, Any]:
        script = Script(attach, str(folder))
        script.seed()
        loop(script, **options)
        return {"steps": script.steps, "digest": script.digest}

    told = {"alone": trained(lambda *_: None)}
    told["watched"] = trained(lambda *given: perfagent.attach(*given, record=folder / "record"))
    perfagent.finish()
    rank = dist.get_rank() if dist.is_initialized() else 0
    (folder / f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
