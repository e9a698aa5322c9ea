"""A Trainer callback sends the metrics of each step and waits 60 ms for an answer: more than the step itself."""

import json
import os
import time

import torch
from torch.utils.data import Dataset

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCABULARY, LENGTH, STEPS = 150, 32, 320


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Verses(Dataset):
    def __init__(self, n):
        generator = torch.Generator().manual_seed(56)
        lines = torch.randint(1, VOCABULARY, (30, 8), generator=generator)
        self.ids = lines[torch.randint(0, 30, (n, LENGTH // 8), generator=generator)].flatten(1)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Dashboard(TrainerCallback):
    """Posts a point and waits for 'OK' (here a sleep, as long as the far side takes)."""

    seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        start = time.perf_counter()
        time.sleep(0.06)
        self.seconds += time.perf_counter() - start


if __name__ == "__main__":
    set_seed(2)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    arguments = TrainingArguments(
        output_dir="/tmp/verses", max_steps=STEPS, per_device_train_batch_size=8, learning_rate=2e-3, logging_steps=20,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    dashboard = Dashboard()
    trainer = Trainer(model=model, args=arguments, train_dataset=Verses(3000), callbacks=[dashboard])
    begin = time.perf_counter()
    truth(onset=time.time(), step=1)
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    truth(share_in_callback=dashboard.seconds / (time.perf_counter() - begin), first=losses[0], late=losses[-1])
