"""Which of the node's GPUs CUDA shows to this process, in which order: CUDA_VISIBLE_DEVICES, with indices, UUIDs and
MIG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perfagent.samplers.gpu.device import Gpu

__all__ = ["visible", "with_uuid"]

Slices = Callable[[Gpu], list[Gpu]]


def visible(found: Sequence[Gpu], environ: Mapping[str, str], slices_of: Slices) -> list[Gpu]:
    """The devices in the order in which CUDA counts them in this process.

    An entry is an index, the head of a UUID ("GPU-3f"), a slice ("MIG-<uuid>"), or a slice as drivers before 470 wrote
    it ("MIG-GPU-<uuid>/<instance>/<compute>"). Everything from the first entry that names nothing is ignored, as CUDA
    does. A divided GPU shows its first slice only. CUDA counts by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; the GPUs
    of a training node are alike, so that order is NVML's. `with_uuid` needs none of this, where torch tells the UUID.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [(slices_of(gpu) or [gpu])[0] for gpu in found]
    result: list[Gpu] = []
    for word in (part.strip() for part in chosen.split(",")):
        device = _named(word, found, slices_of)
        if device is None:
            break
        result.append(device)
    return result


def with_uuid(uuid: str, found: Sequence[Gpu], slices_of: Slices) -> Gpu | None:
    """The device that goes by a UUID, with or without its "GPU-" or "MIG-"."""
    tail = uuid.lower().removeprefix("gpu-").removeprefix("mig-")
    if not tail:
        return None
    for gpu in found:
        parts = slices_of(gpu)
        for device in parts or [gpu]:
            if device.uuid.lower().removeprefix("gpu-").removeprefix("mig-") == tail:
                return device
        if len(parts) == 1 and gpu.uuid.lower().removeprefix("gpu-") == tail:
            return parts[0]  # torch gave the board's, and only one slice can be meant
    return None


def _named(word: str, found: Sequence[Gpu], slices_of: Slices) -> Gpu | None:
    if not word:
        return None
    if word.startswith("MIG-GPU-"):
        board, _, place = word.removeprefix("MIG-").partition("/")
        return next(
            (
                part
                for gpu in found
                if gpu.uuid == board
                for part in slices_of(gpu)
                if place == f"{int(part.instance or 0)}/{int(part.compute or 0)}"
            ),
            None,
        )
    if word.startswith("MIG-"):
        return next((part for gpu in found for part in slices_of(gpu) if part.uuid.startswith(word)), None)
    for gpu in found:
        if str(gpu.index) == word or (word.startswith("GPU-") and gpu.uuid.startswith(word)):
            return (slices_of(gpu) or [gpu])[0]
    return None
