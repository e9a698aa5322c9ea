"""`python job.py MODULE FUNCTION FOLDER [NAME=VALUE ...]`: trains one loop without the agent, then again with it.

Writes what both produced to FOLDER/rank-N.json and what the agent recorded to FOLDER/record. `--launched` trains once only, under
`perfagent run`, which has attached already. Several ranks meet over gloo, as their environment says.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from script import Script

import perfagent
from perfagent.governor import Governor

Governor.period = lambda *_: 1  # gradients in every step: what is looked at here is what is measured, not when


def main(module: str, function: str, folder: str, *more: str) -> None:
    options = dict(word.split("=", 1) for word in more if "=" in word)
    launched = "--launched" in more
    torch.set_num_threads(1)
    parallel = "WORLD_SIZE" in os.environ and options.pop("meet", "gloo") == "gloo"
    if parallel:
        dist.init_process_group("gloo")
    loop = getattr(importlib.import_module(f"loops.{module}"), function)

    def trained(attach: Any, *, watched: bool) -> Script:
        script = Script(attach, watched, folder)
        script.seed()
        loop(script, **options)
        return script

    told: dict[str, Any] = {}
    if launched:
        told["watched"] = vars_of(trained(lambda *_: None, watched=True))
    else:
        told["alone"] = vars_of(trained(lambda *_: None, watched=False))
        record = Path(folder) / "record"
        script = trained(lambda *given: perfagent.attach(*given, record=record), watched=True)
        perfagent.finish()
        told["watched"] = vars_of(script)
    (Path(folder) / f"rank-{script_rank()}.json").write_text(json.dumps(told), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def vars_of(script: Script) -> dict[str, Any]:
    return {"steps": script.steps, "digest": script.digest}


def script_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
