"""Texts as token ids, of which no two need be equally long."""

import random

import torch
from torch.utils.data import DataLoader

import perfagent
from perfagent_loop.data.collating import pad

random.seed(0)
dataset = [{"input_ids": torch.randint(1, 100, (random.randint(5, 60),))} for _ in range(200)]
dataset = [sample | {"labels": sample["input_ids"]} for sample in dataset]
model = torch.nn.Embedding(100, 8)
_ = DataLoader, perfagent, pad
