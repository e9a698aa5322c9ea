"""A look at what a loader gives, before hours are spent on it: `print(perfagent.inspect_batches(loader))`.

Reads some batches and says what will hurt: labels that are all left out, ids outside of the vocabulary, values that are
not finite, the same batch again, one class a batch, mostly padding. The loader is left as it was found, so that
training sees the batches that it would have seen."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from perfagent.errors import ConfigError
from perfagent.measure.batches.padding import real_tokens_of
from perfagent.measure.batches.places import TOKENS, Place, are_integers, places_in
from perfagent.measure.batches.values import IGNORED, counted, is_constant, labels_in, loss_mask_in, only_class
from perfagent_loop import randomness
from perfagent_loop.checks import check_count
from perfagent_loop.data.mapped import bytes_of
from perfagent_loop.data.prefetch import unwrapped
from perfagent_loop.events import phase
from perfagent_loop.kinds import Batch, Loader

__all__ = ["BatchReport", "Problem", "inspect_batches"]

Where: TypeAlias = tuple[int, int | None]
_MUCH_PADDING = 0.2
_MOST_ROWS = 100_000
_MOST_SHAPES = 8
_SEVERITIES = ("critical", "warning", "info")
_PROBLEMS = {kind: (severity, text) for kind, severity, text in (line.split(" | ") for line in """\
error | critical | the loader raised {}
no batch | critical | the loader gave no batch
no tensors | warning | a batch is a {} without tensors
empty | critical | {} is empty
nonfinite | critical | {} holds NaN or infinite values: the loss becomes NaN
constant | warning | {} is the same in all rows
range | info | {} looks like images that are not normalized (values up to {:g})
float64 | info | {} is float64: twice the memory, and slow on a GPU
empty sample | critical | samples without a token: attention over nothing gives NaN
token ids | critical | token ids from {} to {}, outside of {}: the embedding fails, on a GPU without saying where
batch without labels | critical | no label of the batch counts: its loss is 0 / 0, NaN
sample without labels | warning | samples of which no label counts: they teach nothing (a prompt that fills it, truncation)
negative labels | critical | labels below 0 that are not {}: the loss fails, on a GPU without saying where
shape of labels | info | labels have the shape {} and tokens {}: right for an encoder-decoder
repeated batch | warning | the same batch again (first as batch {})
repeated sample | warning | samples that came before, in this batch or another
padding | warning | {:.0f} % of the tokens are padding: batch by length (TokenBudgetBatchSampler) or pack (PackedBatchSampler)
truncated | info | {:.0f} % of the samples have exactly {} tokens, the most of all: they were probably truncated
one class a batch | warning | every batch holds one class: the data is sorted and not shuffled
shapes | info | more than 8 shapes: torch.compile makes a graph for each unless dynamic=True
not shuffled | info | samples come in the dataset's order, every epoch: shuffle=True for training
not pinned | info | batches are not in pinned memory: copies to the GPU wait; pin_memory=True
last batch | info | the last batch has one sample, with which batch norm fails: drop_last=True""".splitlines())}  # fmt: skip
"""kind: severity, and what is said of it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """kind: a word to test for. severity: critical (training breaks or learns nothing), warning or info. where: pairs
    of batch and row, the first few of `count`; a row of None is the whole batch."""

    kind: str
    severity: str
    text: str
    count: int = 1
    where: tuple[Where, ...] = ()

    def __str__(self) -> str:
        places = [f"batch {batch}" if row is None else f"batch {batch} row {row}" for batch, row in self.where]
        more = f" and {self.count - len(places)} more" if self.count > len(places) else ""
        return f"{self.severity}: {self.text}" + (f" [{', '.join(places)}{more}]" if places else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What inspect_batches saw.

    lengths: tokens of each sample, None where the batches hold no tokens. padding: share of tokens that are padding;
    labelled: share of labels that count; from 0 to 1; None where unknown. shapes: how many each tensor had."""

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
            lines.append(f"  {name}: {what}" + (f" ({self.shapes[name]} shapes)" if self.shapes[name] > 1 else ""))
        if self.lengths:
            middle = statistics.median(self.lengths)
            lines.append(f"  lengths: {min(self.lengths)} to {max(self.lengths)} tokens, median {middle:g}")
        for share, what in ((self.padding, "of the tokens are padding"), (self.labelled, "of the labels count")):
            if share is not None:
                lines.append(f"  {100 * share:.1f} % {what}")
        return "\n".join([*lines, *(map(str, self.problems) if self.problems else ["nothing found"])])


def inspect_batches(
    loader: Iterable[Batch],
    batches: int = 20,
    *,
    model: nn.Module | None = None,
    pad_id: int | None = None,
    ignored: int = IGNORED,
) -> BatchReport:
    """Reads some batches, and reports what is in them: shapes, padding, labels, and problems such as token ids out of
    range.

    Tensors are found by name in mappings (`input_ids`, `labels`, `attention_mask`, `loss_mask` and a few more). The
    second item of a pair is taken for the labels. An error that the loader raises is part of the report.

    Args:
        loader: A DataLoader, or another iterable that can be read again.
        batches: How many batches to read.
        model: A model whose embeddings say which token ids are allowed.
        pad_id: The token id of padding, where there is no mask.
        ignored: The label that the loss leaves out, -100 by default.

    Returns:
        A report to print, with `ok`, `problems`, `lengths` (tokens of each sample), and `padding` and `labelled`
            (shares from 0 to 1).
    """
    check_count("batches", batches)
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise ConfigError(f"loader must be an iterable that can be read again, not {type(loader).__name__}")
    loader = unwrapped(loader)
    seen = _Inspection(model=model, pad_id=pad_id, ignored=ignored)
    with _as_found(loader) as same:
        ended = False
        try:
            for batch in itertools.islice(same, batches):
                seen.add(batch)
            ended = seen.batches < batches
        except Exception as error:  # noqa: BLE001 - what the loader raises is what is to be reported
            seen.note("error", [(seen.batches, None)], of=(f"{type(error).__name__}: {_last_line(error)}",))
    seen.judge_all(loader, ended=ended)
    return seen.report()


@contextlib.contextmanager
def _as_found(loader: Loader) -> Iterator[Loader]:
    """Gives what to read instead of the loader, outside of the run's data wait; puts back all that reading changes."""
    random = randomness.random_state()
    own = [*randomness.generators_of_reading(loader), *randomness.generators_of_samples(loader)]
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


class _Inspection:
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
        self._lengths: list[int] = []
        self._room = self._labels = self._counted = 0
        self._masked = False
        self._found: dict[str, Problem] = {}
        self._seen: dict[int, Where] = {}  # hashes of batches and samples -> where they were first
        self._classes: list[float | None] = []  # of each batch, the only one

    def note(
        self, kind: str, where: Sequence[Where] | None = None, *, name: str = "", of: Sequence[object] = ()
    ) -> None:
        """Notes a problem; those of one kind are reported together. where: empty if there is none, None for all of the
        batches. name: of the tensor; of: figures."""
        if where is None or where:
            severity, text = _PROBLEMS[kind]
            kind = f"{kind} {name}".rstrip()
            before = self._found.get(kind, Problem(kind, severity, text.format(*filter(None, [name]), *of), 0))
            both = (*before.where, *(where or ()))
            self._found[kind] = replace(before, count=before.count + len(where or [0]), where=both[:5])

    def _rows(self, bad: Tensor) -> list[Where]:
        """bad: of each row of this batch, whether it has a problem."""
        return [(self.batches - 1, row) for row in bad.nonzero().flatten().tolist()]

    def add(self, batch: Batch) -> None:
        here: list[Where] = [(self.batches, None)]
        self.batches += 1
        places = _named(batch)
        if not places:
            self.note("no tensors", here, of=(type(batch).__name__,))
            self._samples = None
            return
        for _, _, name, _, tensor in places:
            self._shapes[name].add(tuple(tensor.shape))
            size = " x ".join(map(str, tensor.shape)) or "scalar"
            self._tensors.setdefault(name, f"{str(tensor.dtype).removeprefix('torch.')} {size}")
            self._check_values(name, tensor, here)
        named = [one for one in places if one.name in TOKENS and one.tensor.dim() == 2 and are_integers(one.tensor)]
        tokens = min(named, key=lambda one: TOKENS.index(one.name), default=None)
        labels = labels_in(places)
        with_rows = (len(one.tensor) for one in (tokens, labels, *places) if one is not None and one.tensor.dim())
        rows = next(with_rows, None)
        self._samples = None if rows is None or self._samples is None else self._samples + rows
        if tokens is not None:
            self._check_tokens(batch, tokens.tensor, places)
        if labels is not None and labels.tensor.dim():
            loss_mask = loss_mask_in(places)
            counts = counted(labels.tensor, None if loss_mask is None else loss_mask.tensor, self._ignored)
            self._check_labels(labels.tensor, counts, None if tokens is None else tokens.tensor, here)
        self._check_repeats([place.tensor for place in places], rows, here)

    def _check_values(self, name: str, tensor: Tensor, here: list[Where]) -> None:
        if not tensor.numel():
            self.note("empty", here, name=name)
        if not tensor.numel() or not tensor.is_floating_point():
            return
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            if tensor.dim():
                self.note("nonfinite", self._rows(~finite.reshape(len(tensor), -1).all(1)), name=name)
            else:
                self.note("nonfinite", here, name=name)
        elif tensor.numel() > 1 and not re.search("mask|weight", name) and is_constant(tensor):
            self.note("constant", here, name=name)
        elif tensor.dim() == 4 and (most := float(tensor.amax())) > 16:
            self.note("range", here, name=name, of=(most,))
        if tensor.dtype is torch.float64:
            self.note("float64", here, name=name)

    def _check_tokens(self, batch: Batch, tokens: Tensor, places: Sequence[Place]) -> None:
        of_tokens = [one for one in places if "mask" not in one.name or one.tensor.shape == tokens.shape]
        real = real_tokens_of(of_tokens, lambda: self._pad_id)
        found = None if real is None else real(batch, sys.maxsize)
        lengths = torch.full((len(tokens),), tokens.shape[1]) if found is None else found[0]
        self._masked |= found is not None
        self._lengths += lengths.tolist()
        self._room += tokens.numel()
        self.note("empty sample", self._rows(lengths == 0))
        most, allowed = self._vocabulary, "0" if self._vocabulary is None else f"0 to {self._vocabulary - 1}"
        bad = tokens.lt(0) if most is None else tokens.lt(0) | tokens.ge(most)
        self.note("token ids", self._rows(bad.any(1)), of=(int(tokens.min()), int(tokens.max()), allowed))

    def _check_labels(self, labels: Tensor, counts: Tensor, tokens: Tensor | None, here: list[Where]) -> None:
        self._labels += labels.numel()
        self._counted += int(counts.sum())
        if labels.dim() == 1 and len(labels) > 3:
            self._classes.append(only_class(labels))
        same = tokens is not None and tokens.shape == labels.shape
        shifted = counts[:, 1:] if same and labels.shape[1] > 1 else counts
        if not bool(shifted.any()):
            self.note("batch without labels", here)
        elif labels.dim() >= 2:
            self.note("sample without labels", self._rows(~shifted.flatten(1).any(1)))
        if bool((counts & labels.lt(0)).any()):
            self.note("negative labels", here, of=(self._ignored,))
        if tokens is not None and labels.dim() == 2 and not same:
            self.note("shape of labels", here, of=(tuple(labels.shape), tuple(tokens.shape)))

    def _check_repeats(self, tensors: Sequence[Tensor], rows: int | None, here: list[Where]) -> None:
        first, _ = self._seen.setdefault(_hash(tensors), here[0])
        if first != here[0][0]:
            self.note("repeated batch", here, of=(first,))
        elif rows is not None and rows > 1 and len(self._seen) <= _MOST_ROWS:
            aligned = [tensor for tensor in tensors if tensor.dim() and len(tensor) == rows]
            places = [(first, row) for row in range(rows)]
            again = [one for one in places if self._seen.setdefault(_hash(x[one[1]] for x in aligned), one) != one]
            self.note("repeated sample", again)

    def judge_all(self, loader: Loader, *, ended: bool) -> None:
        """What all batches together show, and the loader's settings."""
        if not self.batches and "error" not in self._found:
            self.note("no batch")
        padding, lengths, classes = self.padding or 0.0, self._lengths or [0], self._classes
        if padding > _MUCH_PADDING:
            self.note("padding", of=(100 * padding,))
        longest = max(lengths)
        share = lengths.count(longest) / len(lengths)
        if self._masked and len(lengths) >= 8 and 0.1 <= share < 1.0 and len(set(lengths)) > 2:
            self.note("truncated", of=(100 * share, longest))
        if len(classes) > 2 and None not in classes and len(set(classes)) > 1:
            self.note("one class a batch")
        if max((len(shapes) for shapes in self._shapes.values()), default=1) > _MOST_SHAPES:
            self.note("shapes")
        if not isinstance(loader, DataLoader):
            return
        if isinstance(loader.sampler, SequentialSampler) and type(loader.batch_sampler) is BatchSampler:
            self.note("not shuffled")
        if torch.cuda.is_available() and not loader.pin_memory:
            self.note("not pinned")
        alone = any(shape[:1] == (1,) for shapes in self._shapes.values() for shape in shapes)
        if ended and alone and self.batches > 1 and not loader.drop_last:
            self.note("last batch")

    @property
    def padding(self) -> float | None:
        return None if not self._room or not self._masked else 1.0 - sum(self._lengths) / self._room

    def report(self) -> BatchReport:
        return BatchReport(
            batches=self.batches, samples=self._samples, tensors=self._tensors, lengths=self._lengths or None,
            shapes={name: len(shapes) for name, shapes in self._shapes.items()}, padding=self.padding,
            labelled=self._counted / self._labels if self._labels else None,
            problems=sorted(self._found.values(), key=lambda problem: _SEVERITIES.index(problem.severity)),
        )  # fmt: skip


def _named(batch: Batch) -> list[Place]:
    """The dense tensors of a batch, each with a name as its label; of an unnamed pair, inputs and labels."""
    dense = [one for one in places_in(batch) if one.tensor.layout is torch.strided and not one.tensor.is_nested]
    names = {"[0]": "inputs", "[1]": "labels"} if isinstance(batch, (list, tuple)) and len(batch) == 2 else {}
    renamed = [
        names.get(one.label, one.label if one.label[:1] not in ("", "[") else f"batch{one.label}") for one in dense
    ]
    return [
        one._replace(label=name, tensor=one.tensor.detach().cpu()) for one, name in zip(dense, renamed, strict=True)
    ]


def _hash(tensors: Iterable[Tensor]) -> int:
    return hash(tuple((tensor.shape, bytes(bytes_of(tensor))) for tensor in tensors))


def _last_line(error: Exception) -> str:
    """What it says; of an error in a worker, without the worker's traceback."""
    said = str(error).strip()
    return (said.splitlines()[-1] if "Original Traceback" in said else said)[:300]
