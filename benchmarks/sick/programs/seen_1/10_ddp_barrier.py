"""Two ranks train a classifier; rank 0 keeps the best checkpoint."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(n, classes=3):
    label = torch.arange(n) % classes
    t = torch.rand(n)
    angle = 6 * t + label * 2 * torch.pi / classes
    xy = torch.stack([t * torch.cos(angle), t * torch.sin(angle)], 1) + 0.02 * torch.randn(n, 2)
    return TensorDataset(xy, label)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))

    def forward(self, x):
        return self.layers(x)


def evaluate(model, dataset):
    model.eval()
    x, y = dataset.tensors
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return accuracy


def main():
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    train_set, test_set = spirals(24_000), spirals(2_000)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-4)
    best = 0.95
    for epoch in range(60):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            accuracy = evaluate(model.module, test_set)
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}", flush=True)
            if accuracy > best:
                best = accuracy
                torch.save(model.module.state_dict(), "best.pt")
                dist.barrier()  # the others must not read it before it is written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
