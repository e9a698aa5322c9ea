"""Samples on disk: what comes back, from many processes, after damage and on a full disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import job_environment
from preloaded import run, started
from torch.utils.data import TensorDataset

from perfagent_loop.data.cache import CachedDataset, DiskCache
from perfagent_loop.data.cache_record import DamagedEntry, decode, encode

JOB = Path(__file__).with_name("cache_job.py")


class Counting(list[int]):
    """Counts how often each sample was made."""

    def __getitem__(self, index: Any) -> Any:
        self[index] = super().__getitem__(index) + 1
        return {"x": torch.arange(4) + index, "y": float(index)}


def counting(number: int = 6) -> Counting:
    return Counting([0] * number)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.sample"))


def test_a_sample_comes_back_as_it_was() -> None:
    sample = {
        "tokens": torch.arange(7, dtype=torch.int16),
        "half": torch.randn(2, 3).bfloat16(),
        "turned": torch.randn(3, 2).t(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "array": np.arange(6, dtype=np.float64).reshape(2, 3),
        "number": np.float32(0.5),
        "rest": (1, -2.5, "täxt", b"\x00\xff", None, True, [1, (2, [])], {3: "three"}, 2**63),
    }
    back = decode(bytearray(encode("k", sample)), "k")
    assert back.keys() == sample.keys()
    tensors = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
    assert all(back[name].dtype == value.dtype and torch.equal(back[name], value) for name, value in tensors.items())
    assert isinstance(back["array"], np.ndarray)
    assert np.array_equal(back["array"], sample["array"])
    assert (back["number"], back["rest"]) == (0.5, sample["rest"])
    back["tokens"] += 1  # it may be changed


def test_a_change_of_any_byte_and_any_cut_is_found() -> None:
    content = encode("7", {"x": torch.arange(5), "y": "text"})
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        for damaged in (changed, bytearray(content[:place])):
            with pytest.raises(DamagedEntry):
                decode(damaged, "7")
    with pytest.raises(DamagedEntry, match="it is the entry of '7'"):
        decode(bytearray(content), "8")


def test_a_sample_is_made_once_for_all_epochs_and_runs(tmp_path: Path) -> None:
    first, second = (CachedDataset(counting(), tmp_path, version="a") for _ in range(2))
    for _ in range(2):
        assert [int(first[index]["x"][0]) for index in range(6)] == [0, 1, 2, 3, 4, 5]
    assert second[-1]["y"] == 5.0
    assert (first.dataset, second.dataset) == ([1] * 6, [0] * 6)
    assert (first.cache.hits, first.cache.misses, second.cache.hits) == (6, 6, 1)
    with pytest.raises(IndexError):
        second[6]
    for other in (CachedDataset(counting(), tmp_path, version="b"), CachedDataset(counting(5), tmp_path, version="a")):
        other[0]
        assert other.dataset == [1, *[0] * (len(other) - 1)]


def test_a_damaged_entry_is_found_told_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = CachedDataset(counting(), tmp_path)
    before = [dataset[index]["x"].tolist() for index in range(6)]
    for number, path in enumerate(entries(tmp_path)):
        content = bytearray(path.read_bytes())
        content[-1 - number * 3] ^= 0x10
        path.write_bytes(content)
    again = CachedDataset(counting(), tmp_path)
    assert [again[index]["x"].tolist() for index in range(6)] == before
    assert again.dataset == [1] * 6
    assert (again.cache.damaged, again.cache.misses, again.cache.hits) == (6, 6, 0)
    assert "is damaged" in caplog.text
    first, *rest = entries(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    assert [again.cache.verify(), again.cache.verify(), entries(tmp_path)] == [[first], [], rest]
    again.cache.clear()
    assert entries(tmp_path) == []


@pytest.mark.real
def test_ranks_with_workers_share_entries_and_one_may_be_killed(tmp_path: Path) -> None:
    cache, whole = tmp_path / "cache", f"{500 * sum(range(40))} 0"
    first, second = (job_environment(tmp_path, SEED=seed) for seed in "12")
    with started([str(JOB), str(cache), "10000"], tmp_path / "streams", [first]) as [dying]:
        dying.stdout.readline()
        dying.send_signal(signal.SIGKILL)
        assert dying.wait() == -signal.SIGKILL
    (folder,) = cache.iterdir()
    left = folder / "tmp" / "1-left"
    left.write_bytes(b"half of an entry")
    os.utime(left, (1, 1))
    assert CachedDataset(TensorDataset(torch.ones(1)), cache).cache.verify() == []
    assert DiskCache(folder).verify() == []
    assert not left.exists()
    DiskCache(folder).clear()
    jobs = run([str(JOB), str(cache), "3"], tmp_path, [first, second])
    assert [(one.returncode, one.stdout.splitlines()) for one in jobs] == [(0, [whole] * 3)] * 2, jobs
    assert len(entries(folder)) == 40
    assert [*cache.glob("*/tmp/*")] == []


def test_a_full_disk_ends_writing_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = CachedDataset(counting(), tmp_path, keep_free_bytes=2**80)
    assert [dataset[index]["y"] for index in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not dataset.cache.writing
    assert entries(tmp_path) == []
    assert len([record for record in caplog.records if "takes no more samples" in record.message]) == 1
