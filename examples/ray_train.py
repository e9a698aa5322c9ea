"""perfagent with Ray Train: `attach` in the function that the workers run; all workers together are one run.

pip install 'ray[train]'
python examples/ray_train.py --steps 200
"""

import argparse

import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import perfagent


def train(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(ray.train.get_context().get_world_rank())
    # `with` ends the run with the training: Ray's workers live on, and are killed
    with perfagent.attach(model, optimizer, project="examples", name="ray train", config=config):
        for _ in range(config["steps"]):
            inputs = torch.randn(64, 64, device=next(model.parameters()).device)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :8].sum(dim=1, keepdim=True).sin())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--workers", type=int, default=2)
options = parser.parse_args()
scaling = ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available())
TorchTrainer(train, train_loop_config={"steps": options.steps}, scaling_config=scaling).fit()
