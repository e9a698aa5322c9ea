"""The batch that a bad step was trained on, found among the variables of the loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_accelerator import Control

from perfagent.causes.batch import Fingerprint, count_nonfinite
from perfagent.causes.variables import in_callers


def found_here() -> list[str]:
    """The names of what a function that calls this has of six samples."""
    return [name for name, _ in in_callers(6, sys._getframe(1))[1]]


def test_the_batch_of_the_loop_is_found_by_its_size() -> None:
    def train() -> tuple[str, list[str]]:
        inputs, labels = torch.ones(6, 3), torch.zeros(6)  # noqa: F841
        table, loss = torch.ones(5, 3), torch.ones(6, requires_grad=True).exp()  # noqa: F841
        return in_callers(6, sys._getframe())[0], found_here()

    where, names = train()
    assert names == ["inputs", "labels"]
    assert (where["key"], where["function"]) == ("local_variables", "train")


@pytest.mark.parametrize(
    ("folder", "written"), [("here", "train.py"), ("here/deeper", "here/train.py"), ("", "here/train.py")]
)
def test_its_place_is_written_as_the_user_types_it(tmp_path: Path, monkeypatch: Any, folder: str, written: str) -> None:
    """folder: the working directory; empty: it was removed while the run trained."""
    here = tmp_path / (folder or "gone")
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    if not folder:
        here.rmdir()
    names: dict[str, Any] = {"torch": torch, "found": in_callers, "frame": sys._getframe}
    exec(compile("x = torch.ones(6, 3)\nanswer = found(6, frame())", str(tmp_path / "here/train.py"), "exec"), names)
    assert names["answer"][0]["line"].endswith(f"{written}:2")


class Store(Mapping[int, Any]):
    """Reads each item from somewhere when it is asked, as h5py, zarr and shelve do."""

    reads = 0

    def __len__(self) -> int:
        return 20_000

    def __iter__(self) -> Iterator[int]:
        return iter(range(20_000))

    def __getitem__(self, key: int) -> Any:
        self.reads += 1
        return torch.ones(6)


def test_no_store_is_read_and_no_long_list_looked_through() -> None:
    store, history = Store(), [0.5] * 10_000
    history.append(torch.ones(6))

    def train(rows: Any, losses: Any) -> list[str]:
        inputs = torch.ones(6, 3)  # noqa: F841
        return found_here()

    assert train(store, history) == ["inputs"]
    assert store.reads == 0


def test_a_fingerprint_is_of_the_values() -> None:
    x = torch.randn(4, 3)
    same, other = x.clone(), x.clone()
    other[3, 2] += 1e-3
    hashes = [Fingerprint(1, "", [("x", tensor)]).result()["hash"] for tensor in (x, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    for kind in (torch.uint16, torch.float8_e4m3fn, torch.complex64):  # have no order
        (shown,) = Fingerprint(1, "", [("x", torch.ones(6, 2).to(kind))]).result()["tensors"]
        assert shown["hash"]
        assert "min" not in shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_range_of_a_batch_is_of_its_finite_values(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, torch.nan, -3.0], [torch.inf, 2.0, -torch.inf]], dtype=dtype)
    named = [("x", x), ("bad", x[:, 1:2] * torch.inf), ("sound", x[:, :1].nan_to_num(0, 0, 0))]
    x, bad, sound = Fingerprint(1, "", named).result()["tensors"]
    assert (x["min"], x["max"], x["nonfinite"], x["minus_infinite"]) == (-3.0, 2.0, 3, 1)
    assert "min" not in bad and (sound["min"], sound["max"], sound["nonfinite"]) == (0.0, 1.0, 0)


def test_a_batch_on_a_device_has_the_hosts_fingerprint(fakegpu: Control) -> None:
    x = torch.randn(4, 3)
    there, lost = (Fingerprint(1, "", [("x", x.to(f"fakegpu:{index}"))]) for index in (0, 1))
    assert there.ready()
    assert there.result()["hash"] == Fingerprint(1, "", [("x", x)]).result()["hash"]
    fakegpu.lose()
    assert "hash" not in lost.result()["tensors"][0]


@pytest.mark.parametrize(
    "of", [lambda whole: whole, torch.Tensor.t, lambda whole: whole[:, ::2]], ids=["whole", "turned", "part"]
)
def test_counting_bad_numbers_takes_little_memory(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak of a step that fits just so, masks of a whole activation would not fit."""
    whole, sizes, isfinite = torch.zeros(3, 2**20 + 5), [0], torch.isfinite
    whole[2, 0], whole[0, 2**20], whole[1, 4], whole[1, 6] = torch.nan, torch.inf, -torch.inf, torch.nan
    monkeypatch.setattr(torch, "isfinite", lambda piece: sizes.append(piece.numel()) or isfinite(piece))
    assert count_nonfinite(of(whole)).tolist() == [4, 1]
    assert max(sizes) <= 2**20
