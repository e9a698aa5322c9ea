"""perfagent with Lightning's Trainer: one line before `fit()`, no callback and no logger.

pip install lightning
python examples/lightning_trainer.py --steps 100
"""

import argparse

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self, lr: float = 1e-3) -> None:  # noqa: ARG002 - kept by save_hyperparameters
        super().__init__()
        self.save_hyperparameters()  # where perfagent finds them
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(8192, 64)
loader = DataLoader(TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True).sin()), batch_size=64, shuffle=True)

module = Regression()
perfagent.attach(module, project="examples", name="lightning")
trainer = lightning.Trainer(
    max_steps=options.steps, accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, loader)
