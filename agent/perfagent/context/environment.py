"""Describes a process: host, command line, versions, installed packages, and the environment variables that say how a job
was placed and tuned: a list of what may leave, never of what may not. The values are redacted all the same.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from perfagent.libraries import ENVIRONMENT

__all__ = ["describe", "environment", "packages"]

_NAMES = frozenset((
    "CONDA_DEFAULT_ENV", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "FI_PROVIDER", "GLOO_SOCKET_IFNAME", "HIP_VISIBLE_DEVICES", "HOSTNAME", "KMP_AFFINITY",
    "KUBERNETES_SERVICE_HOST", "LOCAL_WORLD_SIZE", "LSB_JOBID", "MALLOC_ARENA_MAX", "MASTER_ADDR", "MASTER_PORT",
    "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "PBS_JOBID", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "VIRTUAL_ENV", "WORLD_SIZE", "XLA_FLAGS", *ENVIRONMENT,
))  # fmt: skip
_PREFIXES = (
    "NCCL_", "PYTORCH_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_", "SLURM_JOB_", "SLURM_NNODES",
    "SLURM_NTASKS", "SLURM_GPUS", "SLURM_CPUS_", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME", "UCX_", "OMP_",
)  # fmt: skip
MAX_CHARACTERS = 1000


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """name -> value of what is on the list, sorted by name."""
    found = dict(os.environ if variables is None else variables)
    return {
        name: found[name][:MAX_CHARACTERS] for name in sorted(found) if name in _NAMES or name.startswith(_PREFIXES)
    }


def describe() -> dict[str, object]:
    """What the first event of a run says about its process; what is not known is absent."""
    cwd = None
    with contextlib.suppress(OSError):  # the folder was removed
        cwd = str(Path.cwd())
    found: dict[str, object] = {
        "host": platform.node(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "command": list(sys.orig_argv),  # scripts edit sys.argv
        "cwd": cwd,
        "cpus": os.cpu_count(),
        "user": os.environ.get("USER"),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        found["cuda"] = getattr(getattr(torch, "version", None), "cuda", None)
    return {key: value for key, value in found.items() if value not in (None, "", [])}


_FOLDER = r"(?P<name>[A-Za-z0-9._-]+?)-(?P<version>[0-9][^-]*)(?:-py[0-9.]+)?\.(?:dist-info|egg-info)"


def packages() -> dict[str, str]:
    """name -> version of the packages on the import path. Names as on PyPI, in lower case with hyphens; the first of a name
    is the one that is imported.

    Read from the names of the metadata folders alone: `importlib.metadata` opens a file for each package, which takes a
    thousand times as long. An old editable install, whose folder has no version in its name, is left out.
    """
    found: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError):  # a zip file, or nothing at all
            for match in filter(None, (re.fullmatch(_FOLDER, name) for name in sorted(os.listdir(folder or ".")))):  # noqa: PTH208
                found.setdefault(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])
    return found
