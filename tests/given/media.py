"""What is logged beside numbers."""

import torch
from PIL import Image

import perfagent


class Figure:
    """What perfagent.Image asks a figure of matplotlib for."""

    def savefig(self, file, **_):
        Image.new("RGB", (16, 16)).save(file, "PNG")


images, predicted = torch.rand(8, 3, 16, 16), list(range(8))
figure = Figure()
waveform = torch.rand(16_000) * 2 - 1
rows = [["a question", "an answer"]]
model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 2)})
run = perfagent.init()
