"""MONAI: SupervisedTrainer with its loader of dictionaries, ValidationHandler, schedule, checkpoints."""

import torch
import truth
from monai.data import CacheDataset, DataLoader
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import CheckpointSaver, LrScheduleHandler, ValidationHandler

truth.seed()
items = [{"image": x, "label": y} for x, y in truth.dataset(60)]
training = CacheDataset(items[:40], (lambda item: item), progress=False, num_workers=1)
model = truth.Net()
optimizer = truth.follow(torch.optim.Adam(model.parameters(), lr=0.01))
evaluator = SupervisedEvaluator(torch.device("cpu"), DataLoader(items[40:], batch_size=5), model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
handlers = [
    ValidationHandler(1, evaluator),
    CheckpointSaver(truth.FOLDER, {"net": model}, save_interval=1),
    LrScheduleHandler(scheduler, print_lr=False),
]
loader = DataLoader(training, batch_size=5, shuffle=True)
SupervisedTrainer(torch.device("cpu"), 3, loader, model, optimizer, truth.Loss(), train_handlers=handlers).run()
truth.end(model)
