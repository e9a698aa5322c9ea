"""What the language libraries are trained with: a tokenizer of the words w0 to w99, sentences of them, a small Llama.

And what a Transformers Trainer knows of its steps.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import truth
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
WORDS = [f"w{number}" for number in range(100)]
TRAINER = {
    "output_dir": truth.FOLDER,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 3,
}
"""Arguments of every Trainer here."""


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def sentences(count: int, least: int, most: int) -> list[str]:
    return [" ".join(random.choices(WORDS, k=random.randint(least, most))) for _ in range(count)]


def llama() -> Any:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return LlamaForCausalLM(LlamaConfig(**size, **tokens))


class _Steps(TrainerCallback):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            if self.rows:
                truth.samples(self.rows)
            truth.step(logs["learning_rate"], loss=logs["loss"])

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        truth.evaluated()


def followed(trainer: Any, *, rows: int = 0) -> Any:
    """Notes what a Trainer logs of each step. Gives it back.

    rows: the samples of every step, where its batches are not what is trained on; otherwise those of its batches.
    """
    trainer.add_callback(_Steps(rows))
    train = trainer.training_step

    def counting(model: Any, inputs: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        truth.samples(len(next(tensor for name, tensor in inputs.items() if name.endswith("input_ids"))))
        return train(model, inputs, *arguments, **options)

    if not rows:
        trainer.training_step = counting
    return trainer
