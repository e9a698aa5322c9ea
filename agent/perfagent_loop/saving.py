"""Writes one checkpoint: the parts of every rank into one folder, then the sums of all files, then the rename.

What a part holds follows from the state. `shared.pt` is what all ranks have alike, written by rank 0. `rank_R.pt` is
what each rank has for itself: random generators, the place in the data. `sharded/` is what is spread over the ranks,
written by torch.distributed.checkpoint (FSDP2). `engine/` is what a DeepSpeed engine writes itself. All ranks take part
in every save; when one of them fails, none has a new checkpoint and the last one stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from perfagent.errors import CheckpointError
from perfagent_loop.collectives import Ranks
from perfagent_loop.deepspeed_engine import save_engine
from perfagent_loop.folder import Folder, sync_file
from perfagent_loop.manifest import FileSum, Manifest, sum_of
from perfagent_loop.retry import is_transient
from perfagent_loop.snapshot import bytes_of, find_nan

__all__ = ["ENGINE", "PER_RANK", "SHARDED", "SHARED", "Parts", "Saved", "is_fatal", "part_of_rank", "split", "write"]

T = TypeVar("T")
PER_RANK = ("rng", "sampler", "loop")
"""Entries of a state that each rank has for itself; rank 0's "loop" is shared too, for new ranks."""
SHARED, SHARDED, ENGINE = "shared.pt", "sharded", "engine"


def part_of_rank(rank: int) -> str:
    return f"rank_{rank}.pt"


@dataclass(slots=True)
class Parts:
    """A state divided by who writes it; sharded is None where no tensor is spread over ranks."""

    shared: dict[str, Any]
    own: dict[str, Any]
    sharded: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is there. duration_s: until it was, on this rank."""

    path: Path
    manifest: Manifest
    duration_s: float


def split(state: dict[str, Any], *, sharded: bool) -> Parts:
    """sharded: model and optimizer are spread over the ranks."""
    own = {name: state[name] for name in PER_RANK if name in state}
    spread: dict[str, Any] = {name: state[name] for name in ("model", "optimizer") if sharded and name in state}
    shared = {name: value for name, value in state.items() if name not in ("rng", "sampler", *spread)}
    return Parts(shared, own, spread if sharded else None)


def write(parts: Parts, draft: Manifest, *, folder: Folder, ranks: Ranks, engine: Any = None) -> Saved:
    """Writes and commits; every rank calls it, with parts that nobody changes meanwhile.

    draft: the manifest without number and files. engine: a DeepSpeed engine, which writes its part itself. Raises
    CheckpointError on every rank when it failed on any; the folder then holds what it held before.
    """
    began = time.monotonic()
    all_or_none = _Stages(draft.step, folder, ranks)
    all_or_none(lambda: _check_numbers(parts))
    tmp, number = _begin(parts, draft.step, folder, ranks)
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
        raise CheckpointError(
            f"the checkpoint of step {self._step} was not kept{where}: {said}",
            transient=all(one[2] for one in problems),
        )


def is_fatal(error: BaseException) -> bool:
    """Whether an exception is about the process, not the checkpoint. (DCP's CheckpointException is no Exception.)"""
    return isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


def _check_numbers(parts: Parts) -> None:
    for state in (parts.shared, parts.sharded or {}):
        place = find_nan(state.get("model"))
        if place is not None:
            raise CheckpointError(f"{place} of the model holds NaN, and going on from there would be of no use")


def _begin(parts: Parts, step: int, folder: Folder, ranks: Ranks) -> tuple[Path, int]:
    """The folder to write into and the number of this save, both from rank 0."""
    mine = bytes_of(parts.own) + bytes_of(parts.sharded or {}) + (bytes_of(parts.shared) if ranks.first else 0)
    needed = sum(ranks.gather(mine))
    path: Path | None = None
    number, problem, passes = 0, "", False
    if ranks.first:
        try:
            known = folder.candidates()
            number = 1 + max((manifest.number for _, manifest in known), default=0)
            path = folder.begin(step, max(needed, known[0][1].total_bytes if known else 0))
        except (OSError, CheckpointError) as error:
            problem, passes = _say(error), is_transient(error)
    path, number, problem, passes = ranks.gather((path, number, problem, passes))[0]
    if path is None:
        raise CheckpointError(f"the checkpoint of step {step} was not begun: {problem}", transient=passes)
    return path, number


def _write_parts(parts: Parts, tmp: Path, ranks: Ranks, engine: Any) -> None:
    if ranks.first:
        _save(parts.shared, tmp / SHARED)
    _save(parts.own, tmp / part_of_rank(ranks.rank))
    if parts.sharded is not None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(parts.sharded, checkpoint_id=tmp / SHARDED, process_group=ranks.group, no_dist=ranks.group is None)
    if engine is not None:
        save_engine(engine, tmp)


def _save(state: dict[str, Any], path: Path) -> None:
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
