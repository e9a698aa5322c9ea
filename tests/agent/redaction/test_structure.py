"""Objects of every kind: what they become where they are told, and what is not asked of them."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from canaries import BASE62, BY_VALUE

from perfagent.redaction import HIDDEN, redacted

SECRET = BY_VALUE["hf"]


@dataclasses.dataclass
class Login:
    user: str
    password: str
    keys: list[str]


class Pair(NamedTuple):
    name: str
    token: str


@pytest.mark.fault
@pytest.mark.parametrize(
    "nested",
    [
        {"a": {"b": [{"c": (SECRET,)}]}},
        {"login": Login("me", SECRET, [SECRET])},
        {"x": Pair("me", SECRET)},
        {"x": {SECRET}},
        {"x": argparse.Namespace(api_key=SECRET, inner=SimpleNamespace(password=SECRET))},
        {"x": {SECRET: 1}},
        {"headers": [("Authorization", f"Bearer {SECRET}")]},
        {"path": Path("/data") / SECRET},
    ],
)
def test_x10_a_secret_is_found_in_every_kind_of_object(nested: Any) -> None:
    found = str(redacted(nested))
    assert (SECRET in found, HIDDEN in found) == (False, True)


TOLD = [
    (Login("me", "x", ["y"]), {"user": "me", "password": HIDDEN, "keys": ["y"]}),
    (Pair("me", "x"), {"name": "me", "token": HIDDEN}),
    (argparse.Namespace(lr=0.1, betas=(0.9, 0.95)), {"lr": 0.1, "betas": [0.9, 0.95]}),
    (Path("/data/x"), "/data/x"),
    (enum.StrEnum("Strategy", ["STEPS"]).STEPS, "steps"),
    (torch.bfloat16, "torch.bfloat16"),
    (torch.device("cpu"), "cpu"),
    (torch.Size((2, 3)), [2, 3]),
    (torch.nn.functional.cross_entropy, "torch.nn.functional.cross_entropy"),
    (torch.optim.AdamW, "torch.optim.adamw.AdamW"),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (enum.Enum("Kind", ["LAST"]).LAST, 1),
    (BASE62, HIDDEN),
    (["t.py", "--password", 4711, 1], ["t.py", "--password", HIDDEN, 1]),
    (np.int64(3), 3),
    (2**70, str(2**70)),
    (10**10_000, "[an integer of 33220 bits]"),
    (b"123", "[3 bytes]"),
    ({1}, [1]),
    ({5: "five"}, {"5": "five"}),
    ("\ud800x", "?x"),
    ("a\0b", "a\ufffdb"),
]


def test_objects_become_what_can_be_told_of_them() -> None:
    for given, told in TOLD:
        found = redacted({"given": given})["given"]
        assert (found, type(found)) == (told, type(told))
    assert math.isnan(redacted(math.nan))


def test_nothing_of_the_users_is_called() -> None:
    """Printing a tensor waits for the device; a property may do anything."""

    class Trap:
        lr = 0.1

        def __str__(self) -> str:
            raise AssertionError("asked")

        __repr__ = __str__
        device = property(__str__)

    class Changing(dict[str, int]):
        def items(self) -> Any:
            for key in self:
                self[f"{key}x"] = 1
                yield key, 1

    given = {
        "tensor": torch.ones(3),
        "model": torch.nn.Linear(2, 2),
        "trap": Trap(),
        Trap(): 1,
        "config": Changing(a=1),
    }
    told = {"tensor": "[Tensor]", "model": "[Linear]", "trap": "[Trap]", "Trap": 1, "config": "[Changing]"}
    assert redacted(given) == told


def test_what_is_endless_ends() -> None:
    deep: dict[str, Any] = {}
    deep["self"] = deep
    assert len(str(redacted(deep))) < 300
    wide: list[Any] = [0]
    for _ in range(11):
        wide = [wide] * 50
    assert len(str(redacted(wide))) < 500_000
    assert len(redacted("x" * 100_000)) < 21_000
    assert len(redacted(list(range(100_000)))) == len(redacted(dict.fromkeys(range(100_000)))) == 2001
