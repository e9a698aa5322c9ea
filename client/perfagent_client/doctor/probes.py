"""Looks at what may hang or crash, torch and the GPU's driver: each in a process of its own that is ended when it takes
too long.

    python -m perfagent_client.doctor.probes torch|nvml        prints what it found as JSON
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from perfagent.device import accelerator

__all__ = ["probe"]

WITHIN_S = {"torch": 60.0, "nvml": 10.0}
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version")


def probe(what: str, within_s: float | None = None) -> dict[str, Any]:
    """What the look found; {"error": why, "reason": why} where it failed or took too long."""
    limit = WITHIN_S[what] if within_s is None else within_s
    command = [sys.executable, "-m", "perfagent_client.doctor.probes", what]
    environment = os.environ | {"PERFAGENT_DISABLED": "1"}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"gave no answer within {limit:g} s")
    except OSError as error:
        return _failed(str(error))
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        return _failed(last[0][:300])


def _failed(why: str) -> dict[str, Any]:
    return {"error": why, "reason": why}


def _of_torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"missing": True}
    import torch

    backend = accelerator()
    available = bool(backend.ask("is_available"))
    devices = [backend.name(index) for index in range(backend.count())] if available else []
    return {
        "version": torch.__version__, "cuda": torch.version.cuda or torch.version.hip, "available": available,
        "devices": devices,
    }  # fmt: skip


def _of_nvml() -> dict[str, Any]:
    from perfagent.samplers.gpu import kernel_gpu
    from perfagent.samplers.gpu.device import text_of
    from perfagent.samplers.gpu.nvml import NO_DRIVER, load

    library, why = load()
    if library is None:
        gpus = kernel_gpu.boards() if why == NO_DRIVER else []
        names = [f"{gpu.name} at {gpu.pci}" for gpu in gpus]
        return {"devices": names, "driver": kernel_gpu.driver_of(gpus)} if names else {"reason": why}
    count = library.nvmlDeviceGetCount()
    devices = [
        text_of(library.nvmlDeviceGetName(library.nvmlDeviceGetHandleByIndex(number))) for number in range(count)
    ]
    return {"devices": devices, "driver": text_of(library.nvmlSystemGetDriverVersion())}


def has_driver() -> bool:
    """Whether files of NVIDIA's driver are to be seen."""
    return any(os.path.exists(name) for name in _DRIVERS)  # noqa: PTH110 - Path.exists raises where it may not look


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_of_torch() if sys.argv[1] == "torch" else _of_nvml()) + "\n")
