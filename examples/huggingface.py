"""perfagent with the Trainer of Hugging Face transformers: one line before `train()`, no callback.

pip install transformers accelerate
python examples/huggingface.py --steps 100
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--output", default="/tmp/perfagent-example")
options = parser.parse_args()


class Bytes(Dataset):
    """Windows of 64 bytes of a module of Python's standard library."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()))

    def __len__(self) -> int:
        return len(self.text) // 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[64 * index : 64 * index + 64]
        return {"input_ids": window, "labels": window}


model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=options.output, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=1e-3, report_to=[]
)
perfagent.attach(model, project="examples", name="hugging face")
Trainer(model=model, args=arguments, train_dataset=Bytes()).train()
