"""Tensors of an attention, and a model whose blocks call it."""

import torch

import perfagent

torch.manual_seed(0)
q, k, v = (torch.randn(1, 16, 1024, 64) for _ in range(3))
mask = None


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(64, 3 * 64)

    def forward(self, x):
        heads = self.projection(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


model, x = Model(), torch.randn(8, 128, 64)
_ = perfagent
