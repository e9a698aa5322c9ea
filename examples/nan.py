"""A training that breaks: one value of one batch is NaN. `perfagent show nan` then names the step and the input.

python examples/nan.py          # with `perfagent up` running
"""

import torch

import perfagent

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

perfagent.attach(model, optimizer, project="examples", name="nan")

for step in range(1, 301):
    x = torch.randn(32, 16)
    y = x[:, :4].sum(dim=1, keepdim=True)
    if step == 200:
        x[7, 3] = float("nan")  # a sensor that failed, a division by zero in the preprocessing ...
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
