"""Customer churn from tabular data, exported from a notebook."""

# %%
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(42)

# %% data
N = 60_000
X = torch.randn(N, 32)
w_true = torch.randn(32)
y = ((X @ w_true) / 4 + 0.5 * torch.randn(N) > 0.3).float().unsqueeze(1)
X[torch.randperm(N)[:3], 7] = 999_999.0  # the export writes this where "days since last contact" is missing

train_X, train_y = X[:50_000], y[:50_000]
valid_X, valid_y = X[50_000:], y[50_000:]

# %% model
model = nn.Sequential(
    nn.Linear(32, 512), nn.ReLU(),
    nn.Linear(512, 512), nn.ReLU(),
    nn.Linear(512, 256), nn.ReLU(),
    nn.Linear(256, 1), nn.Sigmoid(),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)


# %%
def binary_cross_entropy(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


# %% train
BATCH = 256
history = []
for epoch in range(7):
    model.train()
    order = torch.randperm(len(train_X))
    total = 0.0
    for i in range(0, len(order), BATCH):
        idx = order[i : i + BATCH]
        xb, yb = train_X[idx], train_y[idx]
        p = model(xb)
        loss = binary_cross_entropy(p, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(idx)
    model.eval()
    with torch.no_grad():
        acc = ((model(valid_X) > 0.5).float() == valid_y).float().mean().item()
    history.append((total / len(train_X), acc))
    print(f"epoch {epoch:2d}  loss {history[-1][0]:.4f}  valid acc {acc:.4f}")

# %%
print("best accuracy", max(a for _, a in history))
