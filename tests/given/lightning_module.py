"""A module and a loader as Lightning takes them."""

import warnings

import lightning
import torch

warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.model(batch).square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.manual_seed(0)
module = Module()
loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
