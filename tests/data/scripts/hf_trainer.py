"""A tiny GPT-2 in the Transformers Trainer with accumulation, a short last window and items counted over it."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
torch.manual_seed(0)
config = GPT2Config(
    n_layer=1, n_head=2, n_embd=32, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0, pad_token_id=0
)  # fmt: skip
model = GPT2LMHeadModel(config)
samples = [torch.randint(0, 97, (12 + index % 3 * 8,)) for index in range(42)]


def collate(batch):
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


arguments = TrainingArguments(
    output_dir=sys.argv[1], per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=1, logging_steps=1,
    report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collate)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"logged {entry['step']}: loss {entry['loss']} norm {entry['grad_norm']} lr {entry['learning_rate']}")
