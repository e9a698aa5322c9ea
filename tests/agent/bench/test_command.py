from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from command_line import command
from torch_versions import TORCH, since_torch

from perfagent_tools.bench.command import BENCHMARKS

MARKS = {"compile": pytest.mark.long, "workers": pytest.mark.long, "prefetch": pytest.mark.real}
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*torch.jit:DeprecationWarning")


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    ended = command(capsys, "bench", *words, "--json", "--device", "cpu")
    assert ended.code == 0, ended.err
    return dict(json.loads(ended.out))


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in BENCHMARKS])
def test_a_benchmark_measures_here_and_says_when_it_helps(capsys: pytest.CaptureFixture[str], name: str) -> None:
    if TORCH < (2, 7) and name == "async-checkpoint":
        pytest.skip("torch 2.6 has no stager of copies")
    found = report(capsys, name, "--quick")
    assert found["device"] == "cpu"
    assert found["figures"]
    for figure in found["figures"].values():
        assert figure["here"]
        assert figure["condition"]
        assert figure["value"] is None or math.isfinite(figure["value"])
    assert found["rows"]
    assert all(len(row) == len(found["head"]) for row in found["rows"])


@since_torch(2, 7, "the CPU has no flash attention for them")
def test_attention_is_measured_on_the_user_s_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--length", "48", "96", "--heads", "4", "--kv-heads", "2", "--batch", "1", "--head-dim", "16", "--quick")
    found = report(capsys, "attention", *words)
    assert {row[0] for row in found["rows"]} == {"48", "96"}
    assert {row[1] for row in found["rows"]} == {"math", "flash"}
    assert "(1, 4, length, 16), 2 heads of keys, fp32, causal" in found["setup"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    ended = command(capsys, "bench", "amp", "--device", "cuda")
    assert ended.code == 1
    assert "--device is cuda, and torch sees no GPU here; use --device cpu, or a torch with CUDA" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("faster",), "NAME is 'faster'; allowed are amp, "),
        (("async-checkpoint", "--mib", "0"), "--mib is '0', not a whole number above 0"),
        (("attention", "--heads", "4", "--kv-heads", "3", "--device", "cpu"), "must be a multiple"),
        (("async-checkpoint", "--folder", "/nowhere"), "--folder is '/nowhere', and there is no such folder"),
    ],
)
def test_wrong_use_ends_with_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    ended = command(capsys, "bench", *words)
    assert ended.code == 2
    assert said in ended.err
