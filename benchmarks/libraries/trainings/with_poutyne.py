"""Poutyne: fit_generator, also with several batches to a step, and fit_dataset."""

import torch
import truth
from poutyne import Model, ModelCheckpoint, StepLR

truth.seed()
net = truth.Net()
optimizer = truth.follow(torch.optim.SGD(net.parameters(), lr=0.05))
model = Model(net, optimizer, truth.Loss(), batch_metrics=["accuracy"], device="cpu")
training, evaluation = truth.loaders()
keep = ModelCheckpoint(f"{truth.FOLDER}/{{epoch}}.pt")
model.fit_generator(training, evaluation, epochs=3, callbacks=[StepLR(1), keep], verbose=False)
model.fit_generator(training, evaluation, epochs=2, batches_per_step=4, verbose=False)
model.fit_dataset(truth.dataset(40), truth.dataset(20), epochs=2, batch_size=8, verbose=False)
truth.end(net)
