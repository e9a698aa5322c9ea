"""Two-tower recommender trained on a log of clicks, in the order of time."""

import torch
from torch import nn


class ClickLog(torch.utils.data.IterableDataset):
    """Clicks day by day: dictionaries of users, items and whether they clicked. The number of users grows."""

    def __init__(self, days, clicks_per_day, batch_size):
        self.days, self.clicks_per_day, self.batch_size = days, clicks_per_day, batch_size
        g = torch.Generator().manual_seed(8)
        self.user_taste, self.item_taste = torch.randn(8000, 8, generator=g), torch.randn(2000, 8, generator=g)

    def __iter__(self):
        g = torch.Generator().manual_seed(9)
        for day in range(self.days):
            known = 3000 + 70 * day
            for _ in range(self.clicks_per_day // self.batch_size):
                user = torch.randint(0, known, (self.batch_size,), generator=g)
                item = torch.randint(0, 2000, (self.batch_size,), generator=g)
                affinity = (self.user_taste[user] * self.item_taste[item]).sum(1)
                clicked = torch.bernoulli(torch.sigmoid(affinity), generator=g)
                yield {"day": day, "user_id": user, "item_id": item, "clicked": clicked}


class TwoTower(nn.Module):
    def __init__(self, num_users, num_items, dim=32):
        super().__init__()
        self.user_embedding = nn.Embedding(num_users, dim)
        self.item_embedding = nn.Embedding(num_items, dim)
        self.user_tower = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, dim))

    def forward(self, user_id, item_id):
        u, i = self.user_tower(self.user_embedding(user_id)), self.item_tower(self.item_embedding(item_id))
        return (u * i).sum(-1)


def run():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = ClickLog(days=60, clicks_per_day=20_000, batch_size=512)
    loader = torch.utils.data.DataLoader(log, batch_size=None)
    model = TwoTower(num_users=5000, num_items=2000)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.BCEWithLogitsLoss()
    day, losses = 0, []
    for batch in loader:
        if batch["day"] != day:
            print(f"day {day}: log loss {sum(losses) / len(losses):.4f}", flush=True)
            day, losses = batch["day"], []
        score = model(batch["user_id"], batch["item_id"])
        loss = loss_fn(score, batch["clicked"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


run()
