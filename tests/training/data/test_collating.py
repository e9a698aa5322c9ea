"""Samples padded into a batch, or joined into a row."""

from __future__ import annotations

import pytest
import torch

from perfagent_loop.data.collating import join, pad


def test_padding_is_neither_attended_to_nor_learned() -> None:
    batch = pad([{"input_ids": [5, 6, 7], "weight": [1.0, 2.0, 3.0]}, {"input_ids": [8], "weight": [4.0]}], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["weight"].tolist() == [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]]


def test_joined_samples_do_not_predict_one_another() -> None:
    labels = torch.tensor([1, 2, 3])
    batch = join([{"input_ids": torch.tensor([1, 2, 3]), "labels": labels}, {"input_ids": [7, 8], "labels": [7, 8]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 8]]
    assert batch["lengths"].tolist() == [3, 2]
    assert batch["cu_seqlens"].tolist() == [0, 3, 5]
    assert batch["cu_seqlens"].dtype is torch.int32
    assert labels.tolist() == [1, 2, 3]  # the dataset's own


def test_a_row_of_fixed_width_ends_with_what_counts_for_nothing() -> None:
    batch = join([[1, 2], [3]], capacity=6, pad_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, -100, -100, -100, -100]]
    assert batch["lengths"].tolist() == [2, 1, 3]
    small = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)]
    assert join(small)["labels"].tolist() == [[-100, 2, -100]]


@pytest.mark.frameworks
def test_a_model_sees_joined_samples_as_it_sees_each_alone() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation="sdpa", **shape)).eval()
    samples = [torch.randint(1, 64, (length,)) for length in (5, 3, 7)]
    row = join(samples, capacity=20)
    given = {name: row[name] for name in ("input_ids", "position_ids", "labels")}
    with torch.no_grad():
        joined = model(**given, use_cache=False)
        alone = [model(input_ids=sample[None], labels=sample[None]) for sample in samples]
    logits = torch.cat([one.logits for one in alone], 1)
    torch.testing.assert_close(joined.logits[:, :15], logits, rtol=1e-5, atol=1e-5)
    counts = torch.tensor([4.0, 2.0, 6.0])
    losses = torch.stack([one.loss for one in alone])
    torch.testing.assert_close(joined.loss, (losses * counts).sum() / counts.sum(), rtol=1e-5, atol=1e-5)
