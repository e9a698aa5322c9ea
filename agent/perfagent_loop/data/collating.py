"""Samples of different lengths as one batch: padded to the longest, or joined into one row.

A sample is a mapping of one-dimensional sequences of one length (`input_ids`, `labels`, `attention_mask` and others
beside), or a sequence of tokens, which counts as its `input_ids`. Where there are no labels, the tokens are the labels,
as language models of Transformers take them: those shift them by one themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from perfagent.errors import ConfigError
from perfagent.measure.batches.values import IGNORED
from perfagent_loop.checks import check_count

__all__ = ["join", "pad"]

Batch: TypeAlias = dict[str, Tensor]


def pad(samples: Sequence[Any], *, pad_id: int = 0, length: int | None = None, multiple_of: int = 1) -> Batch:
    """Pads samples to one batch of shape (samples, longest): a `collate_fn` for language models.

    `input_ids` are padded with `pad_id`, `labels` with -100, everything else with 0. `attention_mask` is 1 where there
    is a token. With settings: `functools.partial(pad, pad_id=...)`.

    Args:
        samples: Mappings of one-dimensional sequences of one length (`input_ids`, `labels` ...), or sequences of
            tokens.
        pad_id: The token id of padding.
        length: The length to pad to; that of the longest sample by default.
        multiple_of: Rounds the length up to a multiple of this.

    Raises:
        ConfigError: A sample is longer than `length`, or its parts have different lengths.
    """
    check_count("multiple_of", multiple_of, "a number of tokens")
    rows = _rows(samples)
    longest = max(len(row["input_ids"]) for row in rows)
    width = -(-(longest if length is None else length) // multiple_of) * multiple_of
    if longest > width:
        raise ConfigError(f"a sample has {longest} tokens and the batch is {width} wide; truncate it")
    for row in rows:
        row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
    filler = {"input_ids": pad_id, "labels": IGNORED}

    def padded(row: Batch, name: str) -> Tensor:
        return functional.pad(row[name], (0, width - len(row[name])), value=filler.get(name, 0))

    return {name: torch.stack([padded(row, name) for row in rows]) for name in _names_of_all(rows)}


def join(samples: Sequence[Any], *, capacity: int | None = None, pad_id: int = 0) -> Batch:
    """Joins samples to one row of shape (1, tokens), for `packed_attention`: a `collate_fn`.

    `position_ids` begin at 0 in every sample. `labels` are -100 where a sample begins. `lengths` (one for each sample)
    and `cu_seqlens` (their running sum from 0, int32) say where samples end.

    Args:
        samples: Mappings of one-dimensional sequences of one length, or sequences of tokens.
        capacity: Fills the row up to this many tokens with `pad_id`, as one more sample without labels, so that all
            rows have one shape.
        pad_id: The token id of padding.
    """
    rows = _rows(samples)
    lengths = [len(row["input_ids"]) for row in rows]
    for row in rows:
        row["labels"] = row["labels"].clone()
        row["labels"][0] = IGNORED
        row["position_ids"] = torch.arange(len(row["input_ids"]))
        row.pop("attention_mask", None)  # it would be all ones
    missing = 0 if capacity is None else capacity - sum(lengths)
    if missing < 0:
        raise ConfigError(f"the samples have {sum(lengths)} tokens and the row is {capacity} long; pack them so")
    names = _names_of_all(rows)
    parts = {name: [row[name] for row in rows] for name in names}
    if missing:
        lengths.append(missing)
        filler = {"input_ids": pad_id, "labels": IGNORED}
        for name, pieces in parts.items():
            end = torch.arange(missing) if name == "position_ids" else torch.full((missing,), filler.get(name, 0))
            pieces.append(end.to(pieces[0].dtype))
    batch = {name: torch.cat(pieces)[None] for name, pieces in parts.items()}
    batch["lengths"] = torch.tensor(lengths)
    batch["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return batch


def _rows(samples: Sequence[Any]) -> list[dict[str, Tensor]]:
    rows = [_parts(sample) for sample in samples]
    if not rows:
        raise ConfigError("there are no samples to make a batch of; leave out batches without samples")
    return rows


def _parts(sample: Any) -> dict[str, Tensor]:
    """A sample's sequences as tensors, with labels."""
    if not isinstance(sample, Mapping):
        sample = {"input_ids": sample}
    if "input_ids" not in sample:
        raise ConfigError(f"a sample needs 'input_ids'; this one has {', '.join(map(str, sample))[:200] or 'nothing'}")
    parts = {str(name): _tensor(name, value) for name, value in sample.items()}
    tokens = parts["input_ids"]
    for name, part in parts.items():
        if part.dim() != 1 or len(part) != len(tokens) or not len(part):
            raise ConfigError(
                f"{name!r} of a sample has the shape {tuple(part.shape)} and input_ids {tuple(tokens.shape)}; all must be one "
                "row of the same length, 1 or more: pad or join what is, and stack the rest in a collate_fn of your own"
            )
    parts.setdefault("labels", tokens)
    if not parts["labels"].is_signed():  # -100 would become a token
        parts["labels"] = parts["labels"].long()
    return parts


def _tensor(name: Any, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name!r} of a sample is {value!r:.60}, and no sequence of numbers; leave it out") from None


def _names_of_all(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    for row in rows:
        if set(row) != set(rows[0]):
            raise ConfigError(f"samples of one batch have different parts: {', '.join(rows[0])} and {', '.join(row)}")
    return [*rows[0]]
