"""Trainer on heart traces: training rows are standardized, evaluation rows are not; eval_loss is in the hundreds."""

import json
import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Traces(Dataset):
    def __init__(self, n, seed, standardize):
        generator = torch.Generator().manual_seed(seed)
        shapes = torch.randn(5, 180, generator=torch.Generator().manual_seed(42))
        self.y = torch.randint(0, 5, (n,), generator=generator)
        self.x = shapes[self.y] + 4.5 * torch.randn(n, 180, generator=generator)
        if not standardize:
            self.x = 900 + 55 * self.x

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class HeartNet(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(180, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 5))
        self.post_init()

    def forward(self, x, labels=None):
        logits = self.net(x)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


if __name__ == "__main__":
    set_seed(1)
    arguments = TrainingArguments(
        output_dir="/tmp/heart", max_steps=900, per_device_train_batch_size=64, learning_rate=2e-4, logging_steps=15,
        eval_strategy="steps", eval_steps=50, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model=HeartNet(PretrainedConfig()),
        args=arguments,
        train_dataset=Traces(20_000, 1, standardize=True),
        eval_dataset=Traces(1200, 2, standardize=False),
    )
    truth(onset=time.time(), step=50)
    trainer.train()
    log = trainer.state.log_history
    train, evals = [e["loss"] for e in log if "loss" in e], [e["eval_loss"] for e in log if "eval_loss" in e]
    trainer.eval_dataset = Traces(1200, 2, standardize=True)
    right = trainer.evaluate()["eval_loss"]
    truth(train_late=train[-1], eval_first=evals[0], eval_last=evals[-1], eval_if_standardized=right)
