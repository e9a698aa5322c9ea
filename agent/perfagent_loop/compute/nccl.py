"""NCCL's environment: few settings for few situations, by the names that NCCL and torch read today.

NCCL finds out most of what there is to set. A preset says what it cannot know (which network, how patient).

Sources: NVIDIA's NCCL user guide, "Environment Variables" (2.32); PyTorch's "ProcessGroupNCCL Environment Variables" (2.13).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, get_args

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice

__all__ = ["NcclCorrection", "NcclPreset", "check_nccl_environment", "nccl_preset"]

NcclPreset = Literal["default", "ethernet", "infiniband", "roce", "no-p2p", "debug"]

_PRESETS: dict[str, dict[str, str]] = {  # each with TORCH_NCCL_ASYNC_ERROR_HANDLING=3
    "default": {},
    "ethernet": {"NCCL_IB_DISABLE": "1"},
    "infiniband": {"NCCL_NET": "IB", "NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"},
    "roce": {"NCCL_NET": "IB", "NCCL_IB_TIMEOUT": "22", "NCCL_IB_ROCE_VERSION_NUM": "2"},
    "no-p2p": {"NCCL_P2P_DISABLE": "1"},
    "debug": {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    },
}  # fmt: skip
_INTERFACE = {"ethernet": "NCCL_SOCKET_IFNAME", "infiniband": "NCCL_IB_HCA", "roce": "NCCL_IB_HCA"}


@dataclass(frozen=True, slots=True)
class NcclCorrection:
    """name, value: as found. instead: what does today what was meant; None where nothing need be set."""

    name: str
    value: str
    instead: tuple[str, str] | None
    why: str

    def __str__(self) -> str:
        what = "leave it out" if self.instead is None else f"set {self.instead[0]}={self.instead[1]}"
        return f"{self.name}={self.value}: {self.why}; {what}"


def nccl_preset(
    name: NcclPreset = "default", *, interface: str | None = None, apply: bool = True, **more: str | int
) -> dict[str, str]:
    """Sets NCCL's environment variables for a network. Call it on every rank, before `init_process_group`.

    Variables that are already set stay as they are.

    Args:
        name: "default": torch's default, said explicitly: a rank whose collective failed or hangs is ended. "ethernet":
            TCP, without looking for InfiniBand. "infiniband" and "roce": never fall back to TCP, and wait 2 minutes on
            large fabrics. "no-p2p": for GPUs whose peer-to-peer traffic hangs (some virtual machines and IOMMU
            settings). "debug": logs what NCCL chose, and the last 2000 collectives at a timeout.
        interface: Network interfaces by name, such as "eth0" or "mlx5_0".
        apply: False only returns the variables.
        **more: Further variables. Old names are corrected.

    Returns:
        The variables of the preset.

    Raises:
        ConfigError: There is no such preset or variable.

    Source: NVIDIA's [NCCL environment variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    """
    check_choice("preset", name, get_args(NcclPreset))
    wanted = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", **_PRESETS[name]}
    if interface is not None:
        if name not in _INTERFACE:
            raise ConfigError(f"interface belongs to ethernet, infiniband and roce, not to {name!r}; leave it out")
        wanted[_INTERFACE[name]] = interface if interface[:1] in ("=", "^") else f"={interface}"
    wanted |= _corrected(more)
    environment = os.environ if apply else {}
    if apply:
        for variable, value in wanted.items():
            environment.setdefault(variable, value)
    return {variable: environment.get(variable, value) for variable, value in wanted.items()}


def check_nccl_environment(
    environment: MutableMapping[str, str] | None = None, *, correct: bool = False
) -> list[NcclCorrection]:
    """What the environment says to NCCL under old names, or to no effect, with what to say instead.

    environment: os.environ by default. correct: also put it right there; a new name that is set already stays as it is.
    """
    given = os.environ if environment is None else environment
    found = [correction for name in sorted(given) if (correction := _correction(name, given[name], given)) is not None]
    if correct:
        for correction in found:
            del given[correction.name]
            if correction.instead is not None:
                given.setdefault(*correction.instead)
    return found


# ---- old names. (what to set instead, or None; the reason). Versions are NCCL's unless torch is named.

_OF_TORCH = (  # today TORCH_NCCL_...
    "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)  # fmt: skip
_RENAMED = {
    "NCCL_IB_GDR_LEVEL": ("NCCL_NET_GDR_LEVEL", "was renamed in 2.4"),
    "NCCL_MAX_NRINGS": ("NCCL_MAX_CTAS", "became NCCL_MAX_NCHANNELS in 2.5, which is deprecated since 2.17"),
    "NCCL_MIN_NRINGS": ("NCCL_MIN_CTAS", "became NCCL_MIN_NCHANNELS in 2.5, which is deprecated since 2.17"),
    "NCCL_MAX_NCHANNELS": ("NCCL_MAX_CTAS", "is deprecated since 2.17"),
    "NCCL_MIN_NCHANNELS": ("NCCL_MIN_CTAS", "is deprecated since 2.17"),
}
_GONE = {
    "NCCL_TREE_THRESHOLD": "was removed in 2.5: since then NCCL weighs tree against ring for each size itself",
    "NCCL_LL_THRESHOLD": "was removed in 2.5: since then NCCL chooses its protocol for each size itself",
    "NCCL_SINGLE_RING_THRESHOLD": "was removed in 2.3",
    "NCCL_RINGS": "belongs to NCCL before 2.5, which searches the topology itself now",
    "NCCL_CHECKS_DISABLE": "is deprecated since 2.2.12, when checks became off by default",
    "NCCL_LAUNCH_MODE": "concerns one process with several GPUs, and is deprecated since 2.9",
}
_PATHS = {0: "LOC", 1: "PIX", 2: "PXB", 3: "PHB", 4: "SYS"}
_DEFAULTS = {"NCCL_IB_DISABLE": "0", "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_BUFFSIZE": "4194304"}


def _correction(name: str, value: str, environment: Mapping[str, str]) -> NcclCorrection | None:
    if name in _OF_TORCH:
        new = f"TORCH_{name}"
        why = f"it is torch's, not NCCL's, and is called {new} since torch 2.2; the old name only brings a warning"
        if (name, value) == ("NCCL_ASYNC_ERROR_HANDLING", "1"):
            why += ", and 3 (torch's default) ends a stuck rank without waiting for NCCL"
            return NcclCorrection(name, value, (new, "3"), why)
        return NcclCorrection(name, value, (new, value), why)
    if name == "TORCH_NCCL_TRACE_BUFFER_SIZE" and "TORCH_FR_BUFFER_SIZE" not in environment:
        return NcclCorrection(name, value, ("TORCH_FR_BUFFER_SIZE", value), "torch renamed it in 2.9")
    if name in _GONE:
        no_trees = (name, value) == ("NCCL_TREE_THRESHOLD", "0")
        more = ", and 0 turned trees off, which NCCL_ALGO=^Tree does today (for experiments)" if no_trees else ""
        return NcclCorrection(name, value, None, f"it {_GONE[name]}{more}")
    if name == "NCCL_IB_CUDA_SUPPORT":
        level = "LOC" if value == "0" else "SYS"
        return NcclCorrection(name, value, ("NCCL_NET_GDR_LEVEL", level), "it was removed in 2.4")
    if name == "NCCL_CHECK_POINTERS":
        instead = ("NCCL_CHECK_MODE", "DEBUG_LOCAL") if value == "1" else None
        return NcclCorrection(name, value, instead, "it is deprecated since 2.29.7")
    if name in _RENAMED:
        new, why = _RENAMED[name]
        return NcclCorrection(name, value, (new, _path(value) if new == "NCCL_NET_GDR_LEVEL" else value), f"it {why}")
    if name in ("NCCL_NET_GDR_LEVEL", "NCCL_P2P_LEVEL") and value.isdigit():
        why = "its numbers are of an old count of paths, and NVIDIA advises against them"
        return NcclCorrection(name, value, (name, _path(value)), why)
    if _DEFAULTS.get(name) == value:
        return NcclCorrection(name, value, None, "that is what NCCL does anyway")
    if name == "NCCL_BUFFSIZE" and value.isdigit() and 0 < int(value) < int(_DEFAULTS[name]):
        smaller = f"buffers {int(_DEFAULTS[name]) / int(value):.1f} times smaller than NCCL's own 4194304 bytes"
        return NcclCorrection(name, value, None, f"it makes {smaller}, which saves memory and costs bandwidth")
    return None


def _path(value: str) -> str:
    return _PATHS.get(min(int(value), 4), value) if value.isdigit() else value


def _corrected(more: Mapping[str, str | int]) -> dict[str, str]:
    for name in more:
        if not name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_")):
            raise ConfigError(f"{name} is no variable of NCCL or torch: those begin with NCCL_ or TORCH_NCCL_")
    wanted = {name: str(value) for name, value in more.items()}
    check_nccl_environment(wanted, correct=True)
    return wanted
