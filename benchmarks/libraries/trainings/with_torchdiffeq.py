"""torchdiffeq: a neural differential equation, by its solver and by adjoints.

Samples are left out: of adjoints nothing tells them.
"""

import torch
import truth
from torch import nn
from torchdiffeq import odeint, odeint_adjoint


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, t, y):
        return self.net(y**3)


truth.seed()
times, spiral = torch.linspace(0, 2, 20), torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
with torch.no_grad():
    path = odeint(lambda _, y: y**3 @ spiral, torch.tensor([[2.0, 0.0]]), times, method="rk4")
model = Slope()
optimizer = truth.follow(torch.optim.RMSprop(model.parameters(), lr=1e-3))
for solve in (odeint, odeint_adjoint):
    for _ in range(8):
        starts = torch.randint(0, 10, (8,))
        wanted = torch.stack([path[starts + ahead, 0] for ahead in range(5)])
        optimizer.zero_grad()
        truth.loss((solve(model, path[starts, 0], times[:5], method="dopri5") - wanted).abs().mean()).backward()
        optimizer.step()
truth.end(model)
