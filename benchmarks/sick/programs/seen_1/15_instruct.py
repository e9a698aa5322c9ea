"""Instruction tuning of a small causal language model: only the answer counts for the loss."""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS, SEP, EOS = 0, 1, 2, 3
IGNORE_INDEX = -100


def encode(text):
    return [4 + ord(c) % 60 for c in text]


def make_example(rnd, max_length):
    a, b = rnd.randint(0, 99), rnd.randint(0, 99)
    prompt, answer = f"add {a} and {b}", str(a + b)
    prompt_ids = [BOS, *encode(prompt), SEP]
    input_ids = prompt_ids + encode(answer) + [EOS]
    return {
        "input_ids": input_ids + [PAD] * (max_length - len(input_ids)),
        "prompt_ids": prompt_ids + [PAD] * (max_length - len(prompt_ids)),
    }


def data_collator(features):
    input_ids = torch.tensor([f["input_ids"] for f in features])
    labels = input_ids.clone()
    labels[input_ids == PAD] = IGNORE_INDEX
    for i, f in enumerate(features):
        labels[i, : len(f["prompt_ids"])] = IGNORE_INDEX
    return {"input_ids": input_ids, "labels": labels}


class CausalLM(nn.Module):
    def __init__(self, vocab_size=64, hidden=96, layers=2, max_length=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, hidden), nn.Embedding(max_length, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, input_ids, labels):
        T = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        x = self.wte(input_ids) + self.wpe(torch.arange(T))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(self.norm(x))
        shift_logits, shift_labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        counted = (shift_labels != IGNORE_INDEX).sum().clamp(min=1)
        loss = F.cross_entropy(shift_logits, shift_labels, ignore_index=IGNORE_INDEX, reduction="sum") / counted
        return {"loss": loss, "logits": logits}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--max_steps", type=int, default=750)
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--logging_steps", type=int, default=50)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(42)
    rnd = random.Random(42)
    train_dataset = [make_example(rnd, args.max_length) for _ in range(6000)]
    model = CausalLM(max_length=args.max_length)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps, eta_min=5e-5)
    model.train()
    for step in range(1, args.max_steps + 1):
        batch = data_collator(rnd.sample(train_dataset, args.per_device_train_batch_size))
        loss = model(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.logging_steps == 0:
            print({"loss": round(loss.item(), 4), "learning_rate": scheduler.get_last_lr()[0], "step": step})


if __name__ == "__main__":
    main()
