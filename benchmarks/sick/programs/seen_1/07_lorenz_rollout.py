"""Learn the Lorenz system with a recurrent cell and scheduled sampling: less and less true states, more own predictions."""

import torch
import torch.nn as nn

torch.manual_seed(11)
torch.set_num_threads(1)

HORIZON = 60
DT = 0.08


def lorenz(s):
    x, y, z = s.unbind(-1)
    return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)


def simulate(n, steps):
    s = torch.randn(n, 3) * 5 + torch.tensor([0.0, 0.0, 25.0])
    path = []
    for i in range(steps + 20):
        for _ in range(16):  # small steps for the true solution
            k1 = lorenz(s)
            s = s + DT / 16 * lorenz(s + DT / 32 * k1)
        if i >= 20:
            path.append(s)
    path = torch.stack(path, 1)
    return (path - torch.tensor([0.0, 0.0, 23.5])) / torch.tensor([8.0, 9.0, 8.6])


class Cell(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3)
        )

    def forward(self, state):
        return state + self.net(state)

    def rollout(self, truth, p_truth):
        out, state = [], truth[:, 0]
        for t in range(HORIZON):
            state = self(state)
            out.append(state)
            use_truth = (torch.rand(len(truth), 1) < p_truth).float()
            state = use_truth * truth[:, t + 1] + (1 - use_truth) * state
        return torch.stack(out, 1)


paths = simulate(2000, HORIZON + 1)
model = Cell()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
mse = nn.MSELoss()
recent = []
for it in range(1, 651):
    batch = paths[torch.randint(0, len(paths), (128,))]
    p_truth = max(0.0, 1 - it / 400)
    pred = model.rollout(batch, p_truth)
    loss = mse(pred, batch[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    recent.append(loss.item())
    if it % 50 == 0:
        print(f"it {it}: truth {p_truth:.2f} mse {sum(recent[-50:]) / 50:.4f}")
