"""A reader's own small training: what the blocks of the documents take as there."""

import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

import perfagent

warnings.simplefilter("ignore")
torch.manual_seed(0)
inputs, targets = torch.randn(64, 8), torch.randn(64, 1)
dataset = TensorDataset(inputs, targets)
loader = DataLoader(dataset, batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
criterion = torch.nn.MSELoss()


def evaluate(model):
    with torch.no_grad():
        return criterion(model(inputs), targets).item()


def train_step(x, y):
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


_ = perfagent
