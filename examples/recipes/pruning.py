"""Pruning with torch.nn.utils.prune: a fifth of the weights is set to zero, and the rest trains on.

    python examples/recipes/pruning.py --steps 200

`l1_unstructured` takes single weights, the smallest first: the tensors keep their shape, and nothing gets faster or
smaller without kernels for such weights. `ln_structured` takes whole rows, which can then be cut out. While a mask is
on, the model keeps the weight and the mask: more memory than before. `prune.remove` makes the zeros permanent.
"""

import argparse

import torch
from torch.nn.utils import prune

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200, help="before pruning, and again after it")
parser.add_argument("--amount", type=float, default=0.2)
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(4096, 32)
targets = inputs[:, :8].sum(dim=1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(steps: int) -> None:
    for _ in range(steps):
        chosen = torch.randint(len(inputs), (128,))
        torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def error() -> float:
    return torch.nn.functional.mse_loss(model(inputs), targets).item()


train(options.steps)
before = error()
layers = [(module, "weight") for module in model if isinstance(module, torch.nn.Linear)]
prune.global_unstructured(
    layers, pruning_method=prune.L1Unstructured, amount=options.amount
)  # the smallest of all layers together
pruned = error()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the parameters are others now: weight_orig
perfagent.attach(model, optimizer, project="examples", name="pruning")
train(options.steps)
after = error()
for module, name in layers:
    prune.remove(module, name)
zeros = sum((module.weight == 0).sum().item() for module, _ in layers) / sum(
    module.weight.numel() for module, _ in layers
)
print(f"zeros: {100 * zeros:.1f} %; error {before:.4f} trained, {pruned:.4f} pruned, {after:.4f} trained on")
