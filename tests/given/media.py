"""What is logged beside numbers."""

import torch
from matplotlib.figure import Figure

import perfagent

images, predicted = torch.rand(8, 3, 16, 16), list(range(8))
figure = Figure()
waveform = torch.rand(16_000) * 2 - 1
rows = [["a question", "an answer"]]
model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 2)})
run = perfagent.init()
