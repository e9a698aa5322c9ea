"""Reads the newest checkpoint that is whole.

From the newest to the oldest, all ranks verify a share of the files each; the first one in which no rank finds damage
is loaded. What was passed over, and why, is logged. A whole checkpoint that does not fit the model is an error, and not
passed over: an older one would not fit either.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from perfagent.errors import CheckpointError
from perfagent_loop.collectives import Ranks
from perfagent_loop.deepspeed_engine import load_engine
from perfagent_loop.events import count, tell
from perfagent_loop.folder import Folder
from perfagent_loop.manifest import DamagedCheckpoint, Manifest, check_file, check_list
from perfagent_loop.retry import retry
from perfagent_loop.saving import SHARDED, SHARED, is_fatal, part_of_rank

__all__ = ["newest_whole", "read"]


def newest_whole(folder: Folder, ranks: Ranks) -> tuple[Path, Manifest, list[Path]] | None:
    """The newest checkpoint that verifies, and the newer ones that do not; None without one. A collective."""
    candidates, unreadable = ranks.gather(folder.look() if ranks.first else ([], []))[0]
    damaged = [path for path, _ in unreadable]
    said = [f"{path.name}: {why}" for path, why in unreadable]
    for path, manifest in candidates:
        why = _verify(path, manifest, folder, ranks)
        if why is None:
            _tell_passed_over(said, path, ranks)
            return path, manifest, damaged
        damaged.append(path)
        said.append(why)
    _tell_passed_over(said, None, ranks)
    return None


def _verify(path: Path, manifest: Manifest, folder: Folder, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, from any rank; None when it is whole."""
    why: str | None = None
    try:
        if ranks.first:
            check_list(path, manifest, folder.files(path))
        for name in ranks.share(sorted(manifest.files)):
            check_file(path, name, manifest.files[name])
    except DamagedCheckpoint as error:
        why = str(error)
    return next((one for one in ranks.gather(why) if one), None)


def _tell_passed_over(said: list[str], used: Path | None, ranks: Ranks) -> None:
    if not said or not ranks.first:
        return
    instead = f"{used.name} is used instead" if used else "no other is there: training starts anew"
    tell("damaged checkpoint", f"{'; '.join(said)}; {instead}", level="warning" if used else "critical")
    count("checkpoint/damaged", float(len(said)))


def read(
    path: Path, manifest: Manifest, ranks: Ranks, *, into: dict[str, Any] | None, engine: Any, kind: str | None
) -> dict[str, Any]:
    """The state in a verified checkpoint, tensors on the CPU. Every rank calls it.

    into: a state of the same shape, whose sharded tensors are overwritten in place; needed for a sharded checkpoint
    only. engine: a DeepSpeed engine, which reads its own files. kind: what the model at hand can take, where that is
    known. Raises CheckpointError when the state does not fit.
    """
    _check_kind(path, manifest, engine, kind, ranks)
    state = _load(path / SHARED)
    own = path / part_of_rank(ranks.rank)
    if own.exists():
        state.update(_load(own))
    else:
        state |= {"rng": None, "sampler": None}  # this rank is new: its random numbers are as the script seeded them
    if ranks.world != manifest.world_size:
        _fit_to_ranks(state, path, manifest, ranks, new=not own.exists())
    if manifest.kind == "sharded":
        state.update(_load_sharded(path, ranks, into))
    if engine is not None:
        load_engine(engine, path)
    return state


def _check_kind(path: Path, manifest: Manifest, engine: Any, kind: str | None, ranks: Ranks) -> None:
    """Raises CheckpointError for a checkpoint of a model that was wrapped in another way."""
    what = None
    if manifest.kind == "deepspeed" and engine is None:
        what = "was saved by a DeepSpeed engine: pass engine=, or give the loop an engine"
    elif manifest.kind != "deepspeed" and engine is not None:
        what = "was saved without DeepSpeed: load it without engine="
    elif manifest.kind == "deepspeed" and manifest.world_size != ranks.world:
        what = (
            f"was saved by {manifest.world_size} ranks under DeepSpeed, whose files fit no other number, and here are "
            f"{ranks.world}: start {manifest.world_size}, or convert it with DeepSpeed's ds_to_universal"
        )
    elif kind == "plain" and manifest.kind == "sharded":
        what = "was saved under FSDP2: wrap the model with perfagent.fsdp(model) here too, on any number of ranks (one will do)"
    elif kind == "sharded" and manifest.kind == "plain":
        what = (
            "was saved from a model that was not sharded: go on with perfagent.ddp(model), or begin anew and load its weights "
            f"before perfagent.fsdp(model): torch.load('{SHARED}', weights_only=True)['model']"
        )
    if what is not None:
        raise CheckpointError(f"{path} {what}")


def _fit_to_ranks(state: dict[str, Any], path: Path, manifest: Manifest, ranks: Ranks, *, new: bool) -> None:
    """The place in the data counts the batches of one rank: of as many samples, where there are more ranks or fewer."""
    place = state.get("loop")
    if isinstance(place, dict) and "batch" in place:
        place |= {"batch": place["batch"] * manifest.world_size // ranks.world, "estimated": True}
        if new:
            place["epoch_random"] = None  # of rank 0: two ranks must not draw the same numbers
    if ranks.first:
        tell(
            "resumed with another number of ranks",
            f"{path.name} was saved by {manifest.world_size} ranks and {ranks.world} go on: each passes over its share of the "
            "samples that were seen in this epoch; losses are not those of a training that was not interrupted",
        )


def _load(path: Path) -> dict[str, Any]:
    load = functools.partial(torch.load, path, map_location="cpu", weights_only=True)
    loaded: dict[str, Any] = retry(load, what=f"reading {path.parent.name}")
    return loaded


def _load_sharded(path: Path, ranks: Ranks, into: dict[str, Any] | None) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict_loader import load

    if into is None:
        raise CheckpointError(
            f"{path} is sharded: pass into= a state of the same model and optimizer (get_state_dict), on every rank, to be filled"
        )
    spread: dict[str, Any] = {name: into[name] for name in ("model", "optimizer") if name in into}
    try:
        load(spread, checkpoint_id=path / SHARDED, process_group=ranks.group, no_dist=ranks.group is None)
    except BaseException as error:
        if is_fatal(error):
            raise
        said = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"{path} is whole, but does not fit this model and optimizer: {said[-1]:.400}") from error
    return spread
