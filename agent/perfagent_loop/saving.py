"""Writes and reads one checkpoint.

`shared.pt` is what all ranks have alike, written by rank 0. `rank_R.pt` is what each rank has for itself: random
generators, the place in the data. `sharded/` is what is spread over the ranks, written by torch.distributed.checkpoint
(FSDP2). `engine/` is what a DeepSpeed engine writes itself. All ranks take part in every save; when one of them fails,
none has a new checkpoint and the last one stays.

A run loads the newest undamaged checkpoint. Each rank verifies its share of the files; if one finds damage, all try the next
older checkpoint. An undamaged one that does not fit the model is an error: an older one would not fit either."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch

from perfagent.errors import CheckpointError
from perfagent_loop.collectives import Ranks
from perfagent_loop.deepspeed_engine import load_engine, save_engine
from perfagent_loop.events import count, tell
from perfagent_loop.folder import Folder, sync_file
from perfagent_loop.kinds import Engine, State
from perfagent_loop.manifest import DamagedCheckpoint, FileSum, Manifest, check_file, check_list, sum_of
from perfagent_loop.retry import is_transient, retry
from perfagent_loop.snapshot import bytes_of, find_nan

__all__ = [
    "ENGINE",
    "PER_RANK",
    "SHARDED",
    "SHARED",
    "Parts",
    "Saved",
    "is_fatal",
    "newest_whole",
    "part_of_rank",
    "read",
    "split",
    "write",
]

T = TypeVar("T")
PER_RANK = ("rng", "sampler", "loop")
"""Entries of a state that each rank has for itself; rank 0's "loop" is shared too, for new ranks."""
SHARED, SHARDED, ENGINE = "shared.pt", "sharded", "engine"


def part_of_rank(rank: int) -> str:
    return f"rank_{rank}.pt"


@dataclass(slots=True)
class Parts:
    """A state divided by who writes it; sharded is None where no tensor is spread over ranks."""

    shared: State
    own: State
    sharded: State | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is there. duration_s: until it was, on this rank."""

    path: Path
    manifest: Manifest
    duration_s: float


def split(state: State, *, sharded: bool) -> Parts:
    """sharded: model and optimizer are spread over the ranks."""
    own = {name: state[name] for name in PER_RANK if name in state}
    spread: State = {name: state[name] for name in ("model", "optimizer") if sharded and name in state}
    shared = {name: value for name, value in state.items() if name not in ("rng", "sampler", *spread)}
    return Parts(shared, own, spread if sharded else None)


def write(parts: Parts, draft: Manifest, *, folder: Folder, ranks: Ranks, engine: Engine = None) -> Saved:
    """Writes and commits; every rank calls it, with parts that nobody changes meanwhile.

    draft: the manifest without number and files. engine: a DeepSpeed engine, which writes its part itself. Raises
    CheckpointError on every rank when it failed on any; the folder then holds what it held before."""
    began = time.monotonic()
    all_or_none = _Stages(draft.step, folder, ranks)
    all_or_none(lambda: _check_numbers(parts))
    mine = bytes_of(parts.own) + bytes_of(parts.sharded or {}) + (bytes_of(parts.shared) if ranks.first else 0)
    needed = sum(ranks.gather(mine))
    begun = all_or_none(lambda: _begin(draft.step, needed, folder) if ranks.first else None)
    tmp, number = cast("tuple[Path, int]", ranks.gather(begun)[0])
    all_or_none.tmp = tmp
    all_or_none(lambda: _write_parts(parts, tmp, ranks, engine))
    sums = all_or_none(lambda: _sums(tmp, folder, ranks))
    files = {name: one for part in ranks.gather(sums) for name, one in part.items()}
    manifest = replace(draft, number=number, files=files, created=time.time())
    all_or_none(lambda: folder.commit(tmp, manifest) if ranks.first else None)
    return Saved(tmp.with_suffix(""), manifest, time.monotonic() - began)


class _Stages:
    """Runs one stage of a save on every rank and goes on only when all of them came through it.

    Raises CheckpointError on all ranks otherwise; transient when every failure was one that may pass.
    """

    def __init__(self, step: int, folder: Folder, ranks: Ranks) -> None:
        self._step, self._folder, self._ranks = step, folder, ranks
        self.tmp: Path | None = None

    def __call__(self, stage: Callable[[], T]) -> T:
        result: T | None = None
        problem: tuple[str, bool] | None = None  # and whether it may pass
        try:
            result = stage()
        except BaseException as error:
            if is_fatal(error):
                raise
            cause = _cause(error)
            problem = _say(cause), is_transient(cause)
        problems = [(rank, *one) for rank, one in enumerate(self._ranks.gather(problem)) if one]
        if not problems:
            return cast("T", result)
        if self._ranks.first and self.tmp is not None:
            self._folder.abandon(self.tmp)
        rank, said, _ = problems[0]
        where = f" (rank {rank})" if self._ranks.world > 1 else ""
        passes = all(one[2] for one in problems)
        raise CheckpointError(f"the checkpoint of step {self._step} was not kept{where}: {said}", transient=passes)


def is_fatal(error: BaseException) -> bool:
    """Whether an exception is about the process, not the checkpoint. (DCP's CheckpointException is no Exception.)"""
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


def _check_numbers(parts: Parts) -> None:
    for state in (parts.shared, parts.sharded or {}):
        place = find_nan(state.get("model"))
        if place is not None:
            raise CheckpointError(f"{place} of the model holds NaN, and going on from there would be of no use")


def _begin(step: int, needed: int, folder: Folder) -> tuple[Path, int]:
    """The folder to write into and the number of this save."""
    known = folder.candidates()
    number = 1 + max((manifest.number for _, manifest in known), default=0)
    return folder.begin(step, max(needed, known[0][1].total_bytes if known else 0)), number


def _write_parts(parts: Parts, tmp: Path, ranks: Ranks, engine: Engine) -> None:
    if ranks.first:
        _save(parts.shared, tmp / SHARED)
    _save(parts.own, tmp / part_of_rank(ranks.rank))
    if parts.sharded is not None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(parts.sharded, checkpoint_id=tmp / SHARDED, process_group=ranks.group, no_dist=ranks.group is None)
    if engine is not None:
        save_engine(engine, tmp)


def _save(state: State, path: Path) -> None:
    """torch.save into a file of Python's: of one that torch opens, a full disk is "unexpected pos 704 vs 598"."""
    try:
        with path.open("xb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _sums(tmp: Path, folder: Folder, ranks: Ranks) -> dict[str, FileSum]:
    """Syncs and sums this rank's share of the files; all ranks have written theirs."""
    sums = {}
    for name in ranks.share(folder.files(tmp)):
        sync_file(tmp / name)
        sums[name] = sum_of(tmp / name)
    return sums


def _cause(error: BaseException) -> BaseException:
    """What went wrong on a rank, where torch.distributed.checkpoint says only that something did."""
    failures = getattr(error, "failures", None)
    first = next(iter(failures.values()), None) if isinstance(failures, dict) else None
    inner = first[0] if isinstance(first, tuple) and first else None
    return inner if isinstance(inner, BaseException) else error


def _say(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0][:400]
    return first if isinstance(error, CheckpointError) else f"{type(error).__name__}: {first}"


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


def read(path: Path, found: Manifest, ranks: Ranks, *, into: State | None, engine: Engine, kind: str | None) -> State:
    """The state in a verified checkpoint, tensors on the CPU. Every rank calls it.

    into: a state of the same shape, whose sharded tensors are overwritten in place; needed for a sharded checkpoint
    only. engine: a DeepSpeed engine, which reads its own files. kind: what the model at hand can take, where that is
    known. Raises CheckpointError when the state does not fit."""
    _check_kind(path, found, engine, kind, ranks)
    state = _load(path / SHARED)
    own = path / part_of_rank(ranks.rank)
    if own.exists():
        state.update(_load(own))
    else:
        state |= {"rng": None, "sampler": None}  # this rank is new: its random numbers are as the script seeded them
    if ranks.world != found.world_size:
        _fit_to_ranks(state, path, found, ranks, new=not own.exists())
    if found.kind == "sharded":
        state.update(_load_sharded(path, ranks, into))
    if engine is not None:
        load_engine(engine, path)
    return state


def _check_kind(path: Path, manifest: Manifest, engine: Engine, kind: str | None, ranks: Ranks) -> None:
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


def _fit_to_ranks(state: State, path: Path, manifest: Manifest, ranks: Ranks, *, new: bool) -> None:
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


def _load(path: Path) -> State:
    load = functools.partial(torch.load, path, map_location="cpu", weights_only=True)
    loaded: State = retry(load, what=f"reading {path.parent.name}")
    return loaded


def _load_sharded(path: Path, ranks: Ranks, into: State | None) -> State:
    from torch.distributed.checkpoint.state_dict_loader import load

    if into is None:
        raise CheckpointError(
            f"{path} is sharded: pass into= a state of the same model and optimizer (get_state_dict), on every rank, to be filled"
        )
    spread: State = {name: into[name] for name in ("model", "optimizer") if name in into}
    try:
        load(spread, checkpoint_id=path / SHARDED, process_group=ranks.group, no_dist=ranks.group is None)
    except BaseException as error:
        if is_fatal(error):
            raise
        said = str(error).strip().splitlines() or [""]
        raise CheckpointError(f"{path} is whole, but does not fit this model and optimizer: {said[-1]:.400}") from error
    return spread
