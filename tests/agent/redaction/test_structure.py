from __future__ import annotations

import argparse
import dataclasses
import enum
import math
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from canaries import BY_VALUE

from perfagent.redaction import HIDDEN, redacted

SECRET = BY_VALUE["hf"]


@dataclasses.dataclass
class Login:
    user: str
    password: str
    keys: list[str]


@dataclasses.dataclass(slots=True)
class Slotted:
    api_key: str
    lr: float


Pair = namedtuple("Pair", "name token")


class Strategy(enum.StrEnum):
    STEPS = "steps"


@pytest.mark.fault
@pytest.mark.parametrize(
    "nested",
    [
        {"a": {"b": [{"c": (SECRET,)}]}},
        {"login": Login("me", SECRET, [SECRET])},
        {"x": Slotted(SECRET, 0.1)},
        {"x": Pair("me", SECRET)},
        {"x": argparse.Namespace(api_key=SECRET, inner=SimpleNamespace(password=SECRET))},
        {"x": {SECRET: 1}},
        {"x": {SECRET}},
        {"headers": [("Authorization", f"Bearer {SECRET}")]},
        {"path": Path("/data") / SECRET},
    ],
)
def test_x10_a_secret_is_found_at_every_depth_and_in_every_kind_of_object(nested: Any) -> None:
    found = str(redacted(nested))
    assert SECRET not in found
    assert HIDDEN in found


def test_objects_with_fields_become_dicts_of_them() -> None:
    given = {
        "login": Login("me", "x", ["y"]),
        "namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
        "pair": Pair("me", "x"),
        "strategy": Strategy.STEPS,
        "path": Path("/data/x"),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "shape": torch.Size((2, 3)),
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": torch.optim.AdamW,
        "number": np.float32(0.5),
        "count": np.int64(3),
    }
    assert redacted(given) == {
        "login": {"user": "me", "password": HIDDEN, "keys": ["y"]},
        "namespace": {"lr": 0.1, "betas": [0.9, 0.95]},
        "pair": {"name": "me", "token": HIDDEN},
        "strategy": "steps",
        "path": "/data/x",
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "shape": [2, 3],
        "loss": "torch.nn.functional.cross_entropy",
        "optimizer": "torch.optim.adamw.AdamW",
        "number": 0.5,
        "count": 3,
    }


def test_nothing_of_the_users_is_called() -> None:
    """Printing a tensor waits for the device; a property may do anything."""

    class Trap:
        lr = 0.1

        def __str__(self) -> str:
            raise AssertionError("printed")

        __repr__ = __str__

        @property
        def device(self) -> str:
            raise AssertionError("asked for a property")

    assert redacted({"tensor": torch.ones(3), "model": torch.nn.Linear(2, 2), "trap": Trap(), Trap(): 1}) == {
        "tensor": "[Tensor]",
        "model": "[Linear]",
        "trap": "[Trap]",
        "Trap": 1,
    }


def test_anything_becomes_encodable() -> None:
    given = {
        "big": 2**70,
        "huge": 10**10_000,
        "nan": math.nan,
        "bytes": b"123",
        "set": {1},
        5: "five",
        "lone": "\ud800x",
        "nul": "a\0b",
    }
    found = redacted(given)
    assert found["big"] == str(2**70)
    assert found["huge"] == "[an integer of 33220 bits]"
    assert math.isnan(found["nan"])
    assert (found["bytes"], found["set"], found["5"], found["lone"]) == ("[3 bytes]", [1], "five", "?x")
    assert "\0" not in found["nul"]


def test_what_is_endless_ends() -> None:
    deep: dict[str, Any] = {}
    deep["self"] = deep
    assert len(str(redacted(deep))) < 300
    wide: list[Any] = [0]
    for _ in range(11):
        wide = [wide] * 50
    assert len(str(redacted(wide))) < 500_000
    assert len(redacted("x" * 100_000)) < 21_000
    assert len(redacted(list(range(100_000)))) == 2001


def test_a_dict_that_changes_meanwhile_does_no_harm() -> None:
    class Changing(dict[str, int]):
        def items(self) -> Any:
            for key in self:
                self[f"{key}x"] = 1
                yield key, 1

    assert redacted({"config": Changing(a=1), "lr": 0.1}) == {"config": "[Changing]", "lr": 0.1}


def test_lines_of_source_with_counts_are_no_lines_of_output() -> None:
    told = {"lines": [{"line": "train.py:42", "count": 3}]}
    assert redacted(told) == told
