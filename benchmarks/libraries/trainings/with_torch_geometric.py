"""PyTorch Geometric: small graphs, each a sample, in its own loader; evaluation after each epoch."""

import torch
import truth
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = GCNConv(6, 16), GCNConv(16, 16), nn.Linear(16, 3)

    def forward(self, x, edges, batch):
        return self.out(global_mean_pool(self.second(self.first(x, edges).relu(), edges).relu(), batch))


def graph(nodes):
    return Data(
        x=torch.randn(nodes, 6), edge_index=torch.randint(0, nodes, (2, 3 * nodes)), y=torch.randint(0, 3, (1,))
    )


truth.seed()
graphs = [graph(nodes) for nodes in torch.randint(5, 12, (50,)).tolist()]
model, criterion = Graphs(), truth.Loss()
optimizer = truth.follow(torch.optim.Adam(model.parameters(), 1e-2))
for _ in range(4):
    model.train()
    for batch in DataLoader(graphs[:40], batch_size=12, shuffle=True):
        truth.samples(batch.num_graphs)
        optimizer.zero_grad()
        criterion(model(batch.x, batch.edge_index, batch.batch), batch.y).backward()
        optimizer.step()
    model.eval()
    truth.evaluated()
    with torch.no_grad():
        for batch in DataLoader(graphs[40:], batch_size=12):
            model(batch.x, batch.edge_index, batch.batch)
truth.end(model)
