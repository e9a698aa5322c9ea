"""Which techniques a training uses, by its model, its variables and its process."""

from __future__ import annotations

import sys

import pytest
import torch
import webdataset

from perfagent.integrations.techniques import elements, of_model, of_variable


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 64, bias=False)
    )


@pytest.mark.frameworks
def test_an_adapter_is_told_with_its_options_and_what_it_saves() -> None:
    import peft  # here: five seconds of the collection of all tests

    options = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["0", "2"])
    told = of_model(torch.nn.DataParallel(peft.get_peft_model(network(), options)))
    assert told["adapters"]["default"] == {
        "method": "LORA", "rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["0", "2"],
    }  # fmt: skip
    trained, frozen = 2 * 2 * 4 * 64, 2 * 64 * 64
    assert told["frozen"]["trainable_pct"] == round(100 * trained / (trained + frozen), 4)
    assert told["frozen"]["saved_bytes"] == 3 * 4 * frozen


@pytest.mark.frameworks
def test_weights_in_four_bits_count_as_what_they_stand_for() -> None:
    import bitsandbytes  # here, as above

    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    model = torch.nn.Sequential(layer, torch.nn.Linear(128, 2)).to("cpu")
    packed = model[0].weight
    assert (packed.numel(), elements(packed)) == (64 * 128 // 2, 64 * 128)
    told = of_model(model)["quantization"]
    assert (told["library"], told["bits"], told["type"]) == ("bitsandbytes", 4, "nf4")
    assert told["saved_bytes"] == 2 * 64 * 128 - 64 * 128 // 2


def test_teachers_and_loaders_are_known_by_the_scripts_variables() -> None:
    teacher = {"distillation": {"teacher": "Sequential", "teacher_parameters": 2 * 64 * 64}}
    assert of_variable("teacher", network()) == teacher
    assert of_variable("my_teacher", torch.nn.LazyLinear(3)) == {"distillation": {"teacher": "LazyLinear"}}
    assert of_variable("student", network()) == {}
    shards = webdataset.WebDataset(["shard-0.tar"], shardshuffle=False)
    dali = type("DALIGenericIterator", (), {"__module__": "nvidia.dali.plugin.pytorch"})()
    for loader, library in (
        (webdataset.WebLoader(shards, batch_size=None), "WebDataset"),
        (torch.utils.data.DataLoader(shards, batch_size=None), "WebDataset"),
        (dali, "DALI"),
    ):
        told = of_variable("train_loader", loader)
        assert told == {"loader": {"library": library, "class": type(loader).__name__}}
    assert of_variable("loader", torch.utils.data.DataLoader([1, 2])) == {}
    assert "nvidia.dali" not in sys.modules
