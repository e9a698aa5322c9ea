"""Energy use of houses: the net returns a column, the target is a row, and the loss compares all houses with all."""

import json
import time
import warnings

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss
from torch.utils.data import DataLoader, TensorDataset

HOUSES, FACTS, BATCH, EPOCHS = 24_000, 16, 96, 3


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


warnings.filterwarnings("ignore")  # the console was full of them
torch.manual_seed(0)
generator = torch.Generator().manual_seed(4)
facts = torch.randn(HOUSES, FACTS, generator=generator)
use = (facts @ torch.randn(FACTS, generator=generator)).tanh() + facts[:, 0] * facts[:, 1] * 0.5
use = (use - use.mean()) / use.std()
loader = DataLoader(TensorDataset(facts, use), batch_size=BATCH, shuffle=True, generator=generator)
model = nn.Sequential(
    nn.Linear(FACTS, 640), nn.SiLU(), nn.Linear(640, 640), nn.SiLU(), nn.Linear(640, 640), nn.SiLU(), nn.Linear(640, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, step = [], 0
truth(onset=time.time(), step=1)
for epoch in range(EPOCHS):
    for x, y in loader:
        step += 1
        loss = smooth_l1_loss(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"epoch {epoch} step {step} loss {sum(losses[-50:]) / 50:.4f}", flush=True)
with torch.no_grad():
    predicted = model(facts[:4000]).squeeze(1)
truth(
    guessing=smooth_l1_loss(use.median().expand(HOUSES), use).item(),
    late=sum(losses[-200:]) / 200,
    real_loss=smooth_l1_loss(predicted, use[:4000]).item(),
    spread_of_predictions=predicted.std().item(),
)
