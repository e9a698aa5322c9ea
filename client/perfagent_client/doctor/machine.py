"""Python, torch, the GPUs and the allocator: judges what each of them says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfagent.process.host_allocator import reason_against
from perfagent_client.doctor.checks import Check

__all__ = ["allocator", "gpus", "python", "torch_build"]

OLDEST_PYTHON, FIRST_UNKNOWN_PYTHON = (3, 11), (3, 15)
_INSTALL = "install torch here: pip install torch (https://pytorch.org/get-started picks the build for a GPU)"


_WITHOUT_GPU = {
    "no_driver": Check("GPU", "ok", "no NVIDIA driver on this machine: no GPU metrics"),
    "no_package": Check("GPU", "warning", "nvidia-ml-py is missing", "GPU metrics need it: pip install nvidia-ml-py"),
    "apple": Check(
        "GPU", "warning", "GPU figures of Apple devices are not available",
        "the training's own metrics work, without utilization, power and temperature",
    ),
}  # fmt: skip
"""By what the probe of NVML said."""


def python(version: Sequence[int], executable: str, platform: str) -> Check:
    """version: the first three numbers of sys.version_info; platform: sys.platform."""
    text = f"{'.'.join(map(str, version[:3]))}, {executable}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        return Check(
            "Python", "problem", text, "make a virtual environment with Python 3.11 or later, which perfagent needs"
        )
    if tuple(version[:2]) >= FIRST_UNKNOWN_PYTHON:
        return Check("Python", "warning", text, "perfagent was tested with 3.11 to 3.14: use one of these if it fails")
    if platform not in ("linux", "darwin"):
        return Check("Python", "problem", f"{text} on {platform}", "use Linux or macOS; on Windows WSL 2")
    return Check("Python", "ok", text)


def torch_build(found: Mapping[str, Any], driver: bool) -> Check:
    """found: what the probe of torch said, {"error": ...} where it failed. driver: whether a driver of NVIDIA's is
    here."""
    if found.get("missing"):
        step = f"metrics by log() work without it; to watch a training {_INSTALL}"
        return Check("torch", "warning", "not installed here", step)
    if "error" in found:
        step = "run `python -c 'import torch'` and mend what it says"
        return Check("torch", "problem", f"cannot be imported: {found['error']}", step)
    if found.get("cuda") is None:
        text = f"{found['version']}, built for CPU"
        if driver:
            return Check("torch", "problem", f"{text}, and this machine has an NVIDIA driver", _INSTALL)
        return Check("torch", "ok", text)
    text = f"{found['version']}, built for CUDA {found['cuda']}"
    if found.get("available"):
        return Check("torch", "ok", f"{text}; sees {', '.join(found['devices'])}")
    if not driver:
        return Check("torch", "ok", f"{text}; trains on the CPU, as this machine has no NVIDIA driver")
    step = (
        "look at the driver with nvidia-smi; it must be as new as this build's CUDA, and CUDA_VISIBLE_DEVICES not empty"
    )
    return Check("torch", "problem", f"{text}, and it sees no GPU", step)


def gpus(found: Mapping[str, Any]) -> Check:
    """found: what the probe of NVML said, "reason" where there is none."""
    if "devices" in found:
        devices = ", ".join(found["devices"]) or "no devices"
        return Check("GPU", "ok", f"{devices}; driver {found.get('driver', 'unknown')}")
    reason = found.get("reason", "no answer")
    step = "run nvidia-smi: an upgraded driver needs a reboot, a GPU that was lost a reset"
    return _WITHOUT_GPU.get(reason, Check("GPU", "problem", f"NVML does not start: {reason}", step))


def allocator(libc: tuple[str, str], environ: Mapping[str, str], *, wanted: bool = True) -> Check:
    """The allocator that a process with perfagent will have, as far as settings show. libc: name and version. wanted: the
    setting `tune_malloc`."""
    name = " ".join(filter(None, libc)) or "an unknown C library"
    reason = reason_against(wanted, environ)
    if reason is not None and not wanted:
        step = "a CPU step may take page faults for memory that it just gave back: unset PERFAGENT_MALLOC unless you measured"
        return Check("allocator", "warning", f"{name}, not tuned: PERFAGENT_MALLOC is off", step)
    if reason is not None or libc[0] != "glibc":
        return Check("allocator", "ok", f"{name}, left as it is{f': {reason}' if reason else ''}")
    return Check("allocator", "ok", f"{name}; attach() keeps it from giving memory back between steps")
