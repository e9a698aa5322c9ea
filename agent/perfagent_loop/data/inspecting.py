"""A look at what a loader gives, before hours are spent on it: `print(perfagent.inspect_batches(loader))`.

Reads some batches and says what will hurt: labels that are all left out, ids outside of the vocabulary, values that are
not finite, the same batch again, one class a batch, mostly padding. The loader is left as it was found, so that
training sees the batches that it would have seen.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from perfagent.errors import ConfigError
from perfagent.signals.batch_padding import TOKENS
from perfagent.signals.batch_values import IGNORED, LABELS, LEAST_ROWS, LOSS_MASKS
from perfagent_loop import randomness
from perfagent_loop.checks import check_count
from perfagent_loop.data.mapped import bytes_of
from perfagent_loop.data.prefetch import unwrapped
from perfagent_loop.events import phase
from perfagent_loop.kinds import Batch, Loader

__all__ = ["BatchReport", "Problem", "inspect_batches"]

Where: TypeAlias = tuple[int, int | None]
_MASKS = ("attention_mask",)
_MUCH_PADDING = 0.2
_MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Problem:
    """kind: a word to test for. severity: critical (training breaks or learns nothing), warning or info. where: pairs
    of batch and row, the first few of `count`; a row of None is the whole batch."""

    kind: str
    severity: str
    text: str
    count: int = 1
    where: tuple[Where, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What inspect_batches saw.

    lengths: tokens of each sample, None where the batches hold no tokens. padding: share of tokens that are padding;
    labelled: share of labels that count; from 0 to 1; None where unknown. shapes: how many each tensor had.
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
    loader: Iterable[Batch],
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
    second is taken for the labels. An error that the loader raises is part of the report.
    """
    check_count("batches", batches)
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise ConfigError(f"loader must be an iterable that can be read again, not {type(loader).__name__}")
    loader = unwrapped(loader)
    look = _Look(model=model, pad_id=pad_id, ignored=ignored)
    with _as_found(loader) as same:
        ended = False
        try:
            for batch in itertools.islice(same, batches):
                look.at(batch)
            ended = look.batches < batches
        except Exception as error:  # noqa: BLE001 - what the loader raises is what is to be reported
            text = f"the loader raised {type(error).__name__}: {_last_line(error)}"
            look.problem("error", "critical", text, (look.batches, None))
    look.finish(loader, ended=ended)
    return look.report()


@contextlib.contextmanager
def _as_found(loader: Loader) -> Iterator[Batch]:
    """Gives what to read instead of the loader, outside of the run's data wait; puts back all that reading changes."""
    random, own = (
        randomness.random_state(),
        [*randomness.generators_of_reading(loader), *randomness.generators_of_samples(loader)],
    )
    drawn = [randomness.generator_state(one) for one in own]
    parts = [loader]
    if isinstance(loader, DataLoader):
        parts = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        loader = copy.copy(loader)
        loader._iterator = None  # it may be in use, and its workers go on from where they are
    stateful: list[Any] = [one for one in parts if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    states = [copy.deepcopy(one.state_dict()) for one in stateful]
    try:
        with phase("inspect"):
            yield loader
    finally:
        for one, state in zip(stateful, states, strict=True):
            one.load_state_dict(state)
        randomness.restore_generators(own, drawn)
        randomness.restore_random_state(random)


class _Look:
    """What was seen so far."""

    def __init__(self, *, model: nn.Module | None, pad_id: int | None, ignored: int) -> None:
        self._pad_id, self._ignored = pad_id, ignored
        # rows of the model's largest embedding: positions have one too, of fewer rows
        embeddings = [one for one in (model.modules() if model is not None else ()) if isinstance(one, nn.Embedding)]
        self._vocabulary = max((one.num_embeddings for one in embeddings), default=None)
        self.batches = 0
        self._samples: int | None = 0
        self._tensors: dict[str, str] = {}
        self._shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._lengths: list[int] | None = None
        self._room = self._labels = self._counted = 0
        self._masked = False
        self._found: dict[str, tuple[str, str, list[Where]]] = {}
        self._seen: dict[bytes, Where] = {}
        self._seen_batches: dict[bytes, int] = {}
        self._classes: list[set[int]] = []

    def problem(self, kind: str, severity: str, text: str, *where: Where) -> None:
        """Notes one; several of one kind are reported together."""
        self._found.setdefault(kind, (severity, text, []))[2].extend(where)

    def _of_rows(self, kind: str, severity: str, text: str, bad: Tensor) -> None:
        """bad: of each row of this batch, whether it has the problem."""
        if bool(bad.any()):
            self.problem(kind, severity, text, *((self.batches - 1, row) for row in bad.nonzero().flatten().tolist()))

    def at(self, batch: Batch) -> None:
        place: Where = (self.batches, None)
        self.batches += 1
        parts = dict(_named(batch))
        if not parts:
            self.problem("no tensors", "warning", f"a batch is a {type(batch).__name__} without tensors", place)
            self._samples = None
            return
        for name, tensor in parts.items():
            self._shapes[name].add(tuple(tensor.shape))
            size = " x ".join(map(str, tensor.shape)) or "scalar"
            self._tensors.setdefault(name, f"{str(tensor.dtype).removeprefix('torch.')} {size}")
            self._check_values(name, tensor, place)
        tokens, labels, mask, loss_mask = (_first(parts, names) for names in (TOKENS, LABELS, _MASKS, LOSS_MASKS))
        with_rows = (len(one) for one in (tokens, labels, *parts.values()) if one is not None and one.dim())
        rows = next(with_rows, None)
        self._samples = None if rows is None or self._samples is None else self._samples + rows
        if tokens is not None and tokens.dim() == 2 and not tokens.is_floating_point():
            self._check_tokens(tokens, mask)
        if labels is not None and labels.dim() and not labels.is_floating_point():
            self._check_labels(labels, loss_mask, tokens, place)
        self._check_repeats(parts, rows, place)

    def _check_values(self, name: str, tensor: Tensor, place: Where) -> None:
        if not tensor.numel():
            self.problem(f"empty {name}", "critical", f"{name} is empty", place)
        if not tensor.numel() or not tensor.is_floating_point():
            return
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            kind, text = f"nonfinite {name}", f"{name} holds NaN or infinite values: the loss becomes NaN"
            if tensor.dim():
                self._of_rows(kind, "critical", text, ~finite.flatten(1).all(1) if tensor.dim() > 1 else ~finite)
            else:
                self.problem(kind, "critical", text, place)
        elif tensor.numel() > 1 and not re.search("mask|weight", name) and bool((tensor == tensor.flatten()[0]).all()):
            self.problem(f"constant {name}", "warning", f"{name} has one value in all places", place)
        elif tensor.dim() == 4 and (most := float(tensor.amax())) > 16:
            text = f"{name} looks like images that are not normalized (values up to {most:g})"
            self.problem(f"range {name}", "info", text, place)
        if tensor.dtype is torch.float64:
            self.problem(f"float64 {name}", "info", f"{name} is float64: twice the memory, and slow on a GPU", place)

    def _check_tokens(self, tokens: Tensor, mask: Tensor | None) -> None:
        real = torch.ones_like(tokens, dtype=torch.bool)
        if mask is not None and mask.shape == tokens.shape:
            real = mask.ne(0)
        elif self._pad_id is not None:
            real = tokens.ne(self._pad_id)
        self._masked |= mask is not None or self._pad_id is not None
        lengths = real.sum(1)
        self._lengths = (self._lengths or []) + lengths.tolist()
        self._room += tokens.numel()
        text = "samples without a token: attention over nothing gives NaN"
        self._of_rows("empty sample", "critical", text, lengths == 0)
        most, allowed = self._vocabulary, "0" if self._vocabulary is None else f"0 to {self._vocabulary - 1}"
        bad = tokens.lt(0) if most is None else tokens.lt(0) | tokens.ge(most)
        text = f"token ids from {int(tokens.min())} to {int(tokens.max())}, outside of {allowed}: the embedding fails, on a GPU "
        self._of_rows("token ids", "critical", f"{text}without saying where", bad.any(1))

    def _check_labels(self, labels: Tensor, loss_mask: Tensor | None, tokens: Tensor | None, place: Where) -> None:
        counts = labels.ne(self._ignored)
        if loss_mask is not None and loss_mask.shape == labels.shape:
            counts &= loss_mask.ne(0)
        self._labels += labels.numel()
        self._counted += int(counts.sum())
        if labels.dim() == 1 and len(labels) >= LEAST_ROWS:
            self._classes.append(set(labels[counts].tolist()))
        same = tokens is not None and tokens.shape == labels.shape
        shifted = counts[:, 1:] if same and labels.dim() == 2 and labels.shape[1] > 1 else counts
        if not bool(shifted.any()):
            text = "no label of the batch counts: its loss is 0 / 0, NaN"
            self.problem("batch without labels", "critical", text, place)
        elif labels.dim() >= 2:
            text = (
                "samples of which no label counts: they cost time and teach nothing (a prompt that fills the sample, a template "
                "that does not match, truncation)"
            )
            self._of_rows("sample without labels", "warning", text, ~shifted.flatten(1).any(1))
        if bool((counts & labels.lt(0)).any()):
            text = f"labels below 0 that are not {self._ignored}: the loss fails, on a GPU without saying where"
            self.problem("negative labels", "critical", text, place)
        if tokens is not None and tokens.dim() == labels.dim() == 2 and not same:
            text = f"labels have the shape {tuple(labels.shape)} and tokens {tuple(tokens.shape)}: right for an encoder-decoder"
            self.problem("shape of labels", "info", text, place)

    def _check_repeats(self, parts: Mapping[str, Tensor], rows: int | None, place: Where) -> None:
        first = self._seen_batches.setdefault(_digest(parts.values()), place[0])
        if first != place[0]:
            self.problem("repeated batch", "warning", f"the same batch again (first as batch {first})", place)
            return
        if rows is None or len(self._seen) > _MOST_ROWS:
            return
        aligned = [tensor for tensor in parts.values() if tensor.dim() and len(tensor) == rows]
        for row in range(rows if rows > 1 else 0):
            here: Where = (place[0], row)
            if self._seen.setdefault(_digest(tensor[row] for tensor in aligned), here) != here:
                self.problem("repeated sample", "warning", "samples that came before, in this batch or another", here)

    def finish(self, loader: Loader, *, ended: bool) -> None:
        """What all batches together show, and the loader's settings."""
        if not self.batches and "error" not in self._found:
            self.problem("no batch", "critical", "the loader gave no batch")
        padding, lengths, classes = self.padding or 0.0, self._lengths or [0], self._classes
        if padding > _MUCH_PADDING:
            text = f"{100 * padding:.0f} % of the tokens are padding: batch by length (TokenBudgetBatchSampler, "
            self.problem("padding", "warning", text + "LengthBucketBatchSampler) or pack (PackedBatchSampler)")
        longest = max(lengths)
        share = lengths.count(longest) / len(lengths)
        if self._masked and len(lengths) >= 8 and 0.1 <= share < 1.0 and len(set(lengths)) > 2:
            text = f"{100 * share:.0f} % of the samples have exactly {longest} tokens, the most of all"
            self.problem("truncated", "info", f"{text}: they were probably truncated")
        if len(classes) > 2 and all(len(one) == 1 for one in classes) and len(set.union(*classes)) > 1:
            text = "every batch holds one class: the data is sorted and not shuffled"
            self.problem("one class a batch", "warning", text)
        if max((len(shapes) for shapes in self._shapes.values()), default=1) > 8:
            text = "more than 8 shapes: torch.compile makes a graph for each unless dynamic=True"
            self.problem("shapes", "info", text)
        if not isinstance(loader, DataLoader):
            return
        if isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler:
            text = "samples come in the dataset's order, every epoch: shuffle=True for training"
            self.problem("not shuffled", "info", text)
        if torch.cuda.is_available() and not loader.pin_memory:
            text = "batches are not in pinned memory: copies to the GPU wait; pin_memory=True"
            self.problem("not pinned", "info", text)
        alone = any(shape[:1] == (1,) for shapes in self._shapes.values() for shape in shapes)
        if ended and alone and self.batches > 1 and not loader.drop_last:
            text = "the last batch has one sample, with which batch norm fails: drop_last=True"
            self.problem("last batch", "info", text)

    @property
    def padding(self) -> float | None:
        return None if not self._room or not self._masked else 1.0 - sum(self._lengths or []) / self._room

    def report(self) -> BatchReport:
        problems = [
            Problem(kind, severity, text, max(1, len(where)), tuple(where[:5]))
            for kind, (severity, text, where) in self._found.items()
        ]
        return BatchReport(
            batches=self.batches, samples=self._samples, tensors=self._tensors, lengths=self._lengths, padding=self.padding,
            shapes={name: len(shapes) for name, shapes in self._shapes.items()},
            labelled=self._counted / self._labels if self._labels else None,
            problems=sorted(problems, key=lambda problem: ("critical", "warning", "info").index(problem.severity)),
        )  # fmt: skip


def _named(batch: Batch, name: str = "") -> Iterator[tuple[str, Tensor]]:
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


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(bytes_of(tensor))
    return digest.digest()


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
