"""skorch: fit and partial_fit with its own split for validation, a schedule, checkpoints."""

import torch
import truth
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, LRScheduler

truth.seed()
x, y = (tensor.numpy() for tensor in truth.dataset(80).tensors)
classifier = NeuralNetClassifier(
    truth.Net,
    criterion=truth.Loss,
    optimizer=lambda parameters, **options: truth.follow(torch.optim.SGD(parameters, **options)),
    lr=0.1,
    max_epochs=3,
    batch_size=8,
    callbacks=[LRScheduler(policy="StepLR", step_size=1), Checkpoint(dirname=truth.FOLDER)],
    verbose=0,
)
classifier.fit(x, y)
classifier.partial_fit(x, y)
classifier.predict(x)
truth.end(classifier.module_)
