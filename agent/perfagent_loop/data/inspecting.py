"""A look at what a loader gives, before hours are spent on it: `print(perfagent.inspect_batches(loader))`.

Reads some batches and says what will hurt: labels that are all left out, ids outside of the vocabulary, values that are
not finite, the same batch again, one class a batch, mostly padding. The loader is left as it was found, so that
training sees the batches that it would have seen: a DataLoader is read through a copy with workers of its own, random
generators and what has a state are put back.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from perfagent.errors import ConfigError
from perfagent_loop import generators
from perfagent_loop.data.collating import IGNORED
from perfagent_loop.data.prefetch import Prefetcher
from perfagent_loop.randomness import random_state, restore_random_state

__all__ = ["BatchReport", "Problem", "inspect_batches"]

_TOKENS = ("input_ids", "tokens", "token_ids", "idx")
_LABELS = ("labels", "label", "targets", "target", "y")
_MASKS = ("attention_mask",)
_LOSS_MASKS = ("loss_mask", "label_mask", "assistant_masks")
_MUCH_PADDING = 0.2
_FEW_ROWS = 4
"""In smaller batches one class is no wonder."""
_MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Problem:
    """kind: a word to test for. severity: critical (training breaks or learns nothing), warning or info. where: pairs
    of batch and row, the first few of `count`; a row of None is the whole batch."""

    kind: str
    severity: str
    text: str
    count: int = 1
    where: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What inspect_batches saw.

    lengths: tokens of each sample, None where the batches hold no tokens. padding: share of tokens that are padding;
    labelled:
    share of labels that count; from 0 to 1; None where unknown. shapes: how many different ones each tensor had.
    """

    batches: int
    samples: int | None
    tensors: dict[str, str]
    shapes: dict[str, int]
    lengths: list[int] | None
    padding: float | None
    labelled: float | None
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing critical was found."""
        return all(problem.severity != "critical" for problem in self.problems)

    def __str__(self) -> str:
        lines = [f"{self.batches} batches" + (f", {self.samples} samples" if self.samples is not None else "")]
        for name, what in self.tensors.items():
            more = f" ({self.shapes[name]} shapes)" if self.shapes[name] > 1 else ""
            lines.append(f"  {name}: {what}{more}")
        if self.lengths:
            middle = statistics.median(self.lengths)
            lines.append(f"  lengths: {min(self.lengths)} to {max(self.lengths)} tokens, median {middle:g}")
        for share, what in ((self.padding, "of the tokens are padding"), (self.labelled, "of the labels count")):
            if share is not None:
                lines.append(f"  {100 * share:.1f} % {what}")
        lines += [f"{problem.severity}: {problem.text}{_places(problem)}" for problem in self.problems]
        if not self.problems:
            lines.append("nothing found")
        return "\n".join(lines)


def inspect_batches(
    loader: Iterable[Any],
    batches: int = 20,
    *,
    model: nn.Module | None = None,
    pad_id: int | None = None,
    ignored: int = IGNORED,
) -> BatchReport:
    """Reads the first `batches` batches and reports what is in them.

    loader: a DataLoader or another iterable that can be read again. model: its embeddings say which token ids there may
    be. pad_id: tells padding where there is no attention_mask. ignored: the label that the loss leaves out.

    Tensors are found by name (input_ids, labels, attention_mask, loss_mask and a few more) in mappings; of a pair, the
    second is taken for the labels. An error that the loader raises is part of the report. Nothing is counted as data
    wait of the run.
    """
    if type(batches) is not int or batches < 1:
        raise ConfigError(f"batches is how many batches are looked at, 1 or more; got {batches!r:.80}")
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise ConfigError(
            f"inspect_batches takes a DataLoader or another iterable that can be read again, not {type(loader).__name__}: what "
            "it read would be missing in training"
        )
    while isinstance(loader, Prefetcher):
        loader = loader.loader
    look = _Look(model=model, pad_id=pad_id, ignored=ignored)
    with _AsFound(loader) as same:
        ended = False
        try:
            reading = iter(same)
            for number in range(batches):
                batch = next(reading, _END)
                if batch is _END:
                    ended = True
                    break
                look.at(number, batch)
            del reading
        except Exception as error:  # noqa: BLE001 - what the loader raises is what is to be reported
            text = f"the loader raised {type(error).__name__}: {_last_line(error)}"
            look.problem("error", "critical", text, (look.batches, None))
    look.finish(loader, ended=ended)
    return look.report()


_END = object()


class _AsFound:
    """Gives what to read instead of the loader; puts back all that reading changes, and keeps it out of the run's data
    wait."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __enter__(self) -> Any:
        loader = self._loader
        self._random = random_state()
        self._generators = [*generators.of_reading(loader), *generators.of_samples(loader)]
        self._drawn = [generators.state_of(one) for one in self._generators]
        # a loader's own iterator may be in use, and its workers go on from where they are
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader._iterator = None
            parts = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        else:
            parts = [loader]
        stateful: list[Any] = [one for one in parts if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
        self._states = [(one, copy.deepcopy(one.state_dict())) for one in stateful]
        session = sys.modules.get("perfagent.session")
        run = None if session is None else session.current()
        self._phase = None if run is None else run.phase("inspect")
        if self._phase is not None:
            self._phase.__enter__()
        return loader

    def __exit__(self, *error: Any) -> None:
        if self._phase is not None:
            self._phase.__exit__(*error)
        for one, state in self._states:
            one.load_state_dict(state)
        generators.restore(self._generators, self._drawn)
        restore_random_state(self._random)


class _Look:
    """What was seen so far."""

    def __init__(self, *, model: nn.Module | None, pad_id: int | None, ignored: int) -> None:
        self._pad_id, self._ignored = pad_id, ignored
        self._vocabulary = _vocabulary(model)
        self.batches = 0
        self._samples: int | None = 0
        self._tensors: dict[str, str] = {}
        self._shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._lengths: list[int] | None = None
        self._room = self._labels = self._counted = 0
        self._masked = False
        self._found: dict[str, tuple[str, str, list[tuple[int, int | None]]]] = {}
        self._problems: list[Problem] = []
        self._seen: dict[bytes, tuple[int, int | None]] = {}
        self._seen_batches: dict[bytes, int] = {}
        self._classes: list[set[int]] = []
        self._widest: Counter[int] = Counter()

    def problem(self, kind: str, severity: str, text: str, *where: tuple[int, int | None]) -> None:
        """Notes one; several of one kind are reported together."""
        self._found.setdefault(kind, (severity, text, []))[2].extend(where)

    def at(self, number: int, batch: Any) -> None:
        self.batches += 1
        parts = dict(_named(batch))
        if not parts:
            self.problem(
                "no tensors", "warning", f"a batch is a {type(batch).__name__} without tensors", (number, None)
            )
            self._samples = None
            return
        for name, tensor in parts.items():
            self._shapes[name].add(tuple(tensor.shape))
            self._tensors.setdefault(name, _described(tensor))
            self._check_values(number, name, tensor)
        tokens, labels = _first(parts, _TOKENS), _first(parts, _LABELS)
        rows = next(
            (len(tensor) for tensor in (tokens, labels, *parts.values()) if tensor is not None and tensor.dim()), None
        )
        if self._samples is not None:
            self._samples = None if rows is None else self._samples + rows
        if tokens is not None and tokens.dim() == 2 and not tokens.is_floating_point():
            self._check_tokens(number, tokens, _first(parts, _MASKS))
        if labels is not None:
            self._check_labels(number, labels, _first(parts, _LOSS_MASKS), tokens)
        self._check_repeats(number, parts, rows)

    def _check_values(self, number: int, name: str, tensor: Tensor) -> None:
        if not tensor.numel():
            self.problem(f"empty {name}", "critical", f"{name} is empty", (number, None))
            return
        if not tensor.is_floating_point():
            return
        if not bool(torch.isfinite(tensor).all()):
            bad = (
                [row for row, one in enumerate(tensor) if not bool(torch.isfinite(one).all())]
                if tensor.dim()
                else [None]
            )
            text = f"{name} holds NaN or infinite values: the loss becomes NaN"
            self.problem(f"nonfinite {name}", "critical", text, *((number, row) for row in bad))
        elif (
            tensor.numel() > 1 and not re.search("mask|weight", name) and bool((tensor == tensor.reshape(-1)[0]).all())
        ):
            self.problem(f"constant {name}", "warning", f"{name} has one value in all places", (number, None))
        elif tensor.dim() == 4 and float(tensor.amax()) > 16:
            text = f"{name} looks like images that are not normalized (values up to {float(tensor.amax()):g})"
            self.problem(f"range {name}", "info", text, (number, None))
        if tensor.dtype is torch.float64:
            self.problem(
                f"float64 {name}", "info", f"{name} is float64: twice the memory, and slow on a GPU", (number, None)
            )

    def _check_tokens(self, number: int, tokens: Tensor, mask: Tensor | None) -> None:
        rows, width = tokens.shape
        if mask is not None and mask.shape == tokens.shape:
            real = mask.ne(0)
        elif self._pad_id is not None:
            real = tokens.ne(self._pad_id)
        else:
            real = torch.ones_like(tokens, dtype=torch.bool)
        self._masked |= mask is not None or self._pad_id is not None
        lengths = real.sum(1).tolist()
        self._lengths = (self._lengths or []) + lengths
        self._room += rows * width
        self._widest[width] += sum(1 for length in lengths if length == width)
        if not all(lengths):
            empty = [(number, row) for row, length in enumerate(lengths) if not length]
            self.problem(
                "empty sample", "critical", "samples without a token: attention over nothing gives NaN", *empty
            )
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or (self._vocabulary is not None and highest >= self._vocabulary):
            bad = tokens.lt(0) | (tokens.ge(self._vocabulary) if self._vocabulary is not None else False)
            limit = "0" if self._vocabulary is None else f"0 to {self._vocabulary - 1}"
            text = f"token ids from {lowest} to {highest}, outside of {limit}: the embedding fails, on a GPU without saying where"
            self.problem("token ids", "critical", text, *((number, int(row)) for row in bad.any(1).nonzero()))

    def _check_labels(self, number: int, labels: Tensor, loss_mask: Tensor | None, tokens: Tensor | None) -> None:
        if labels.is_floating_point() or not labels.dim():
            return
        counts = labels.ne(self._ignored)
        if loss_mask is not None and loss_mask.shape == labels.shape:
            counts &= loss_mask.ne(0)
        self._labels += labels.numel()
        self._counted += int(counts.sum())
        if labels.dim() == 1 and len(labels) >= _FEW_ROWS:
            self._classes.append(set(labels[counts].tolist()))
        same = tokens is not None and tokens.shape == labels.shape
        shifted = counts[:, 1:] if same and labels.dim() == 2 and labels.shape[1] > 1 else counts
        if not bool(shifted.any()):
            text = "no label of the batch counts: its loss is 0 / 0, NaN"
            self.problem("batch without labels", "critical", text, (number, None))
        elif labels.dim() >= 2:
            none = [row for row, one in enumerate(shifted) if not bool(one.any())]
            if none:
                text = "samples of which no label counts: they cost time and teach nothing (a prompt that fills the sample, a "
                text += "template that does not match, truncation)"
                self.problem("sample without labels", "warning", text, *((number, row) for row in none))
        wrong = counts & labels.lt(0)
        if bool(wrong.any()):
            text = f"labels below 0 that are not {self._ignored}: the loss fails, on a GPU without saying where"
            self.problem("negative labels", "critical", text, (number, None))
        if tokens is not None and tokens.dim() == labels.dim() == 2 and tokens.shape != labels.shape:
            text = f"labels have the shape {tuple(labels.shape)} and tokens {tuple(tokens.shape)}: right for an encoder-decoder"
            self.problem("shape of labels", "info", text, (number, None))

    def _check_repeats(self, number: int, parts: Mapping[str, Tensor], rows: int | None) -> None:
        whole = _digest(parts.values())
        first = self._seen_batches.setdefault(whole, number)
        if first != number:
            self.problem("repeated batch", "warning", f"the same batch again (first as batch {first})", (number, None))
            return
        if rows is None or len(self._seen) > _MOST_ROWS:
            return
        aligned = [tensor for tensor in parts.values() if tensor.dim() and len(tensor) == rows]
        for row in range(rows if rows > 1 else 0):
            place = self._seen.setdefault(_digest(tensor[row] for tensor in aligned), (number, row))
            if place != (number, row):
                self.problem(
                    "repeated sample", "warning", "samples that came before, in this batch or another", (number, row)
                )

    def finish(self, loader: Any, *, ended: bool) -> None:
        if not self.batches and "error" not in self._found:
            self.problem("no batch", "critical", "the loader gave no batch")
        padding = self.padding
        if padding is not None and padding > _MUCH_PADDING:
            text = f"{100 * padding:.0f} % of the tokens are padding: batch by length (TokenBudgetBatchSampler, "
            self.problem("padding", "warning", text + "LengthBucketBatchSampler) or pack (PackedBatchSampler)")
        self._check_truncation()
        if (
            len(self._classes) > 2
            and all(len(one) == 1 for one in self._classes)
            and len(set.union(*self._classes)) > 1
        ):
            self.problem(
                "one class a batch", "warning", "every batch holds one class: the data is sorted and not shuffled"
            )
        if max((len(shapes) for shapes in self._shapes.values()), default=1) > 8:
            self.problem(
                "shapes", "info", "more than 8 shapes: torch.compile makes a graph for each unless dynamic=True"
            )
        if isinstance(loader, DataLoader):
            self._check_loader(loader, ended=ended)

    def _check_truncation(self) -> None:
        lengths = self._lengths
        if not lengths or not self._masked or len(lengths) < 8:
            return
        longest = max(lengths)
        share = lengths.count(longest) / len(lengths)
        if 0.1 <= share < 1.0 and len(set(lengths)) > 2:
            text = (
                f"{100 * share:.0f} % of the samples have exactly {longest} tokens, the most of all: "
                "they were probably truncated"
            )
            self.problem("truncated", "info", text)

    def _check_loader(self, loader: DataLoader[Any], *, ended: bool) -> None:
        sampler = loader.sampler
        if (
            isinstance(sampler, torch.utils.data.SequentialSampler)
            and type(loader.batch_sampler) is torch.utils.data.BatchSampler
        ):
            self.problem(
                "not shuffled", "info", "samples come in the dataset's order, every epoch: shuffle=True for training"
            )
        if torch.cuda.is_available() and not loader.pin_memory:
            self.problem(
                "not pinned", "info", "batches are not in pinned memory: copies to the GPU wait; pin_memory=True"
            )
        last = [shapes for name, shapes in self._shapes.items() if any(shape[:1] == (1,) for shape in shapes)]
        if ended and last and self.batches > 1 and not loader.drop_last:
            self.problem(
                "last batch", "info", "the last batch has one sample, with which batch norm fails: drop_last=True"
            )

    @property
    def padding(self) -> float | None:
        return None if not self._room or not self._masked else 1.0 - sum(self._lengths or []) / self._room

    def report(self) -> BatchReport:
        order = {"critical": 0, "warning": 1, "info": 2}
        problems = [
            Problem(kind, severity, text, max(1, len(where)), tuple(where[:5]))
            for kind, (severity, text, where) in self._found.items()
        ]
        return BatchReport(
            batches=self.batches,
            samples=self._samples,
            tensors=self._tensors,
            shapes={name: len(shapes) for name, shapes in self._shapes.items()},
            lengths=self._lengths,
            padding=self.padding,
            labelled=self._counted / self._labels if self._labels else None,
            problems=sorted(problems, key=lambda problem: order[problem.severity]),
        )


def _named(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch with a name, on the CPU; of an unnamed pair, inputs and labels."""
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided and not batch.is_nested:
            yield name or "batch", batch.detach().cpu()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        names: Sequence[str] = getattr(batch, "_fields", ())
        if not names and not name and len(batch) == 2:
            names = ("inputs", "labels")
        names = names or [f"{name or 'batch'}[{number}]" for number in range(len(batch))]
        for key, value in zip(names, itertools.islice(batch, 16), strict=False):
            yield from _named(value, key)


def _first(parts: Mapping[str, Tensor], names: Iterable[str]) -> Tensor | None:
    return next((parts[name] for name in names if name in parts), None)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {' x '.join(map(str, tensor.shape)) or 'scalar'}"


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        content = bytearray(tensor.nbytes)
        if content:
            torch.frombuffer(content, dtype=tensor.dtype).copy_(tensor.reshape(-1))
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(content)
    return digest.digest()


def _vocabulary(model: nn.Module | None) -> int | None:
    """Rows of the model's largest embedding: positions have one too, of fewer rows."""
    if model is None:
        return None
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(sizes, default=None)


def _last_line(error: Exception) -> str:
    """What it says; of an error in a worker, without the worker's traceback."""
    said = str(error).strip()
    return (said.splitlines()[-1] if "Original Traceback" in said else said)[:300]


def _places(problem: Problem) -> str:
    if not problem.where:
        return ""
    told = [f"batch {batch}" if row is None else f"batch {batch} row {row}" for batch, row in problem.where]
    more = f" and {problem.count - len(told)} more" if problem.count > len(told) else ""
    return f" [{', '.join(told)}{more}]"
