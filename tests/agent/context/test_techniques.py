from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from builders import RecordingSender
from torch.nn.utils import prune

from perfagent.context.collector import Context
from perfagent.context.techniques import elements, of_model, of_process, of_variable


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 64, bias=False)
    )


def test_a_model_that_trains_everything_uses_no_technique() -> None:
    assert of_model(network()) == {}


def test_an_adapter_is_told_with_its_options_the_trainable_share_and_what_it_saves() -> None:
    import peft  # here: five seconds of the collection of all tests

    model = peft.get_peft_model(
        network(), peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["0", "2"])
    )
    told = of_model(torch.nn.DataParallel(model))
    assert told["adapters"]["default"] == {
        "method": "LORA", "rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["0", "2"],
    }  # fmt: skip
    trained, frozen = 2 * 2 * 4 * 64, 2 * 64 * 64
    assert told["frozen"]["trainable_pct"] == round(100 * trained / (trained + frozen), 4)
    assert told["frozen"]["saved_bytes"] == 3 * 4 * frozen


def test_weights_in_four_bits_count_as_what_they_stand_for() -> None:
    import bitsandbytes  # here, as above

    model = torch.nn.Sequential(
        bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4", compute_dtype=torch.float32),
        torch.nn.Linear(128, 2),
    ).to("cpu")
    packed = model[0].weight
    assert packed.numel() == 64 * 128 // 2
    assert elements(packed) == 64 * 128
    told = of_model(model)["quantization"]
    assert (told["library"], told["bits"], told["type"]) == ("bitsandbytes", 4, "nf4")
    assert told["saved_bytes"] == 2 * 64 * 128 - 64 * 128 // 2


def test_pruned_weights_are_told_with_the_share_of_zeros() -> None:
    model = network()
    prune.l1_unstructured(model[0], "weight", amount=0.25)
    told = of_model(model)["pruning"]
    assert (told["methods"], told["tensors"], told["pruned_pct"], told["saved_bytes"]) == (
        ["L1Unstructured"],
        1,
        25.0,
        0,
    )
    prune.remove(model[0], "weight")
    assert of_model(model) == {}


def test_a_teacher_and_the_loaders_of_other_libraries_are_known_by_the_script_s_variables() -> None:
    assert of_variable("teacher", network()) == {
        "distillation": {"teacher": "Sequential", "teacher_parameters": 2 * 64 * 64}
    }
    assert of_variable("my_teacher", torch.nn.LazyLinear(3)) == {"distillation": {"teacher": "LazyLinear"}}
    assert of_variable("student", network()) == {}
    shards = webdataset.WebDataset(["shard-0.tar"], shardshuffle=False)
    expected = {"loader": {"library": "WebDataset", "class": "WebLoader"}}
    assert of_variable("loader", webdataset.WebLoader(shards, batch_size=None)) == expected
    over = torch.utils.data.DataLoader(shards, batch_size=None)
    assert of_variable("loader", over) == {"loader": {"library": "WebDataset", "class": "DataLoader"}}
    assert of_variable("loader", torch.utils.data.DataLoader([1, 2])) == {}


def test_dali_is_known_without_being_imported() -> None:
    iterator = type("DALIGenericIterator", (), {"__module__": "nvidia.dali.plugin.pytorch"})()
    assert of_variable("train_loader", iterator) == {"loader": {"library": "DALI", "class": "DALIGenericIterator"}}
    assert "nvidia.dali" not in sys.modules


@pytest.mark.parametrize(
    ("variables", "library"),
    [
        ({"NSYS_PROFILING_SESSION_ID": "17"}, "Nsight Systems"),
        ({"NV_COMPUTE_PROFILER_PERFWORKS_DIR": "/opt"}, "Nsight Compute"),
    ],
)
def test_nsight_is_known_by_the_environment_of_what_it_starts(variables: dict[str, str], library: str) -> None:
    assert of_process(variables) == {"profiler": {"library": library}}
    assert of_process({"PATH": "/bin"}) == {}


def test_what_is_recognized_is_told_with_the_configuration(tmp_path: Path) -> None:
    sender = RecordingSender(tmp_path)
    sender.identity.rank = 0
    model = network()
    model[0].weight.requires_grad_(False)
    told: list[dict[str, Any]] = []
    context = Context(sender, {}, lambda: model, lambda: None, clock=lambda: 0.0)  # type: ignore[arg-type]
    context.install()
    teacher = network()  # noqa: F841 - found among the variables of this function
    context.first_step()
    sender.closing_at = 1.0
    context.poll()
    context.close()
    told = [data for kind, data, _ in sender.events if kind == "context"]
    techniques = told[-1]["config"]["techniques"]
    assert techniques["frozen"]["trainable_pct"] == 50.0
    assert techniques["distillation"]["teacher"] == "Sequential"
