"""WebDataset: samples in tar files, read in order from shards that are shuffled, as object storage and spinning disks
like it.

    pip install webdataset
    python examples/recipes/webdataset_shards.py --steps 100

Shards of some thousand samples (or 100 MB to 1 GB) each; at least as many as ranks times workers, or some of them get
nothing. An epoch of a stream has no length: `with_epoch` gives every rank the same number of steps, without which a job
of several ranks hangs.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import webdataset

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--folder", type=Path, default=None, help="where the shards are; made without it")
options = parser.parse_args()
BATCH, A_SHARD = 32, 250


def write(folder: Path) -> None:
    """What is done once, beforehand: decoded, resized, tokenized samples, those of a shard one after the other."""
    torch.manual_seed(0)
    with webdataset.ShardWriter(str(folder / "train-%04d.tar"), maxcount=A_SHARD, verbose=0) as writer:
        for index in range(options.samples):
            x = torch.randn(16)
            writer.write({"__key__": f"{index:08d}", "x.pth": x, "y.cls": int(x.sum() > 0)})


def split(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return sample[0], torch.tensor(sample[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not list(folder.glob("train-*.tar")):
            write(folder)
        shards = sorted(map(str, folder.glob("train-*.tar")))
        data = (
            webdataset.WebDataset(shards, shardshuffle=100, nodesplitter=webdataset.split_by_node, seed=0)
            .shuffle(1000)  # samples in hand to draw from
            .decode()
            .to_tuple("x.pth", "y.cls")
            .map(split)
            .batched(BATCH, partial=False)
        )
        loader = webdataset.WebLoader(data, batch_size=None, num_workers=2).repeat().with_epoch(options.steps)

        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run = perfagent.attach(model, optimizer, project="examples", name="webdataset")
        steps = 0
        for x, y in run.batches(loader):  # a loader of another kind: this is how its wait is seen
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        print(f"{len(shards)} shards, {steps} steps of {BATCH}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
