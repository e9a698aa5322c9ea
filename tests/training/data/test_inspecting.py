"""What inspect_batches finds, and that it leaves everything as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from perfagent_loop.data.inspecting import BatchReport, inspect_batches
from perfagent_loop.data.loader import resumable_loader


def kinds(report: BatchReport) -> set[str]:
    return {problem.kind for problem in report.problems}


def text_batches(number: int = 4, rows: int = 4, width: int = 8) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(number):
        ids = torch.randint(1, 50, (rows, width), generator=drawn)
        batches.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    return batches


def images(rows: int = 16) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, 4, 4, generator=drawn), torch.arange(rows) % 4


def test_good_batches_are_described_and_nothing_is_found() -> None:
    report = inspect_batches(text_batches())
    assert report.problems == []
    assert report.ok
    assert (report.batches, report.samples, report.padding, report.labelled) == (4, 16, 0.0, 1.0)
    assert report.lengths == [8] * 16
    assert "input_ids: int64 4 x 8" in str(report)
    assert str(report).endswith("nothing found")
    assert inspect_batches(DataLoader(TensorDataset(*images()), batch_size=4, shuffle=True)).ok


def extra(value: Tensor) -> Any:
    return lambda batch: batch.update(extra=value)


@pytest.mark.parametrize(
    ("change", "kind", "severity", "sample"),
    [
        (lambda batch: batch["labels"].fill_(-100), "batch without labels", "critical", None),
        # the first is shifted out
        (lambda batch: batch["labels"][3, 1:].fill_(-100), "sample without labels", "warning", 3),
        (lambda batch: batch["labels"][0].fill_(-1), "negative labels", "critical", None),
        (lambda batch: batch["attention_mask"][1].zero_(), "empty sample", "critical", 1),
        (lambda batch: batch["input_ids"][3].fill_(50), "token ids", "critical", 3),
        (lambda batch: batch.update(labels=batch["labels"][:, :5]), "shape of labels", "info", None),
        (lambda batch: batch.update(text_batches()[0]), "repeated batch", "warning", None),
        (lambda batch: [value[1].copy_(value[0]) for value in batch.values()], "repeated sample", "warning", 1),
        (extra(torch.tensor([1.0, float("nan"), 1, 1])), "nonfinite extra", "critical", 1),
        (extra(torch.zeros(4, 2)), "constant extra", "warning", None),
        (extra(torch.rand(4, 3, 2, 2) * 255), "range extra", "info", None),
        (extra(torch.empty(4, 0)), "empty extra", "critical", None),
    ],
)
def test_what_will_hurt_is_found_where_it_is(change: Any, kind: str, severity: str, sample: int | None) -> None:
    batches = text_batches()
    change(batches[1])
    report = inspect_batches(batches, model=nn.Embedding(50, 2))
    found = {problem.kind: problem for problem in report.problems}
    assert kind in found, report
    assert (found[kind].severity, found[kind].where) == (severity, ((1, sample),))
    assert report.ok == all(problem.severity != "critical" for problem in report.problems)
    assert found[kind].text in str(report)


def test_padding_is_measured_by_the_mask_or_by_the_pad_id() -> None:
    batches = text_batches(width=10)
    for batch in batches:
        batch["attention_mask"][1:, 4:] = 0
        batch["input_ids"][1:, 4:] = 0
    report = inspect_batches(batches)
    assert report.padding == pytest.approx(0.45)
    assert "padding" in kinds(report)
    bare = [{"input_ids": batch["input_ids"]} for batch in batches]
    assert inspect_batches(bare, pad_id=0).padding == pytest.approx(0.45)
    assert inspect_batches(bare).padding is None
    for batch in batches:
        batch["attention_mask"][1, 2:] = 0
    assert "truncated" in kinds(inspect_batches(batches)), "the others all end at the most tokens"


def batches_of(inputs: Tensor, labels: Tensor, size: int, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(inputs, labels), batch_size=size, shuffle=shuffle)


SORTED = (images(32)[0], images(32)[1].sort().values)
OF_ORDER = {"one class a batch", "not shuffled"}


@pytest.mark.parametrize(
    ("batches", "most", "found", "absent"),
    [
        (batches_of(*SORTED, 8, shuffle=False), 20, {"one class a batch"}, {"last batch"}),
        (batches_of(*SORTED, 8), 20, set(), OF_ORDER),
        (batches_of(*SORTED, 1), 20, set(), OF_ORDER),
        (batches_of(*images(17), 4), 20, {"last batch"}, OF_ORDER),
        (batches_of(*images(17), 4), 3, set(), {"last batch"}),
        ([{"x": torch.rand(2, width)} for width in range(2, 14)], 20, {"shapes"}, set()),
        ([["a", "b"]], 20, {"no tensors"}, set()),
        ([], 20, {"no batch"}, set()),
    ],
)
def test_what_the_whole_of_the_batches_shows_is_found(batches: Any, most: int, found: Any, absent: Any) -> None:
    torch.manual_seed(0)
    kinds_found = kinds(inspect_batches(batches, most))
    assert (found - kinds_found, absent & kinds_found) == (set(), set())


@pytest.mark.real
def test_an_error_of_the_loader_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # torch waits for a worker that raised
    samples: Any = dict.fromkeys((*range(5), 6, 7, "conversations"), torch.ones(2))  # sample 5 is missing
    for workers in (0, 1):
        report = inspect_batches(DataLoader(samples, batch_size=2, num_workers=workers))
        (error,) = [problem for problem in report.problems if problem.kind == "error"]
        assert not report.ok
        assert "KeyError: 5" in error.text
        assert error.where == ((2, None),)
    gc.collect()


class Drawing(list[int]):
    """Draws at random for each sample, as augmentation does."""

    def __getitem__(self, index: Any) -> Any:
        return torch.rand(2) + super().__getitem__(index)


@pytest.mark.real
@pytest.mark.parametrize(
    ("make", "generator", "workers"), [(DataLoader, False, 0), (DataLoader, True, 1), (resumable_loader, False, 1)]
)
def test_training_sees_the_batches_that_it_would_have_seen(make: Any, generator: bool, workers: int) -> None:
    def first_epoch(*, looks: bool) -> list[list[float]]:
        torch.manual_seed(4)
        own = torch.Generator().manual_seed(5) if generator else None
        more: dict[str, Any] = {"persistent_workers": True} if workers else {}
        loader = make(Drawing(range(12)), batch_size=4, shuffle=True, num_workers=workers, generator=own, **more)
        if looks:
            inspect_batches(loader, 2)
        return [batch.flatten().tolist() for batch in loader]

    assert first_epoch(looks=True) == first_epoch(looks=False)


@pytest.mark.real
def test_an_epoch_that_has_begun_goes_on_where_it_was() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=1, persistent_workers=True)
    reading = iter(loader)
    first = next(reading)[0].tolist()
    inspect_batches(loader)
    assert [first, *(batch.tolist() for (batch,) in reading)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
