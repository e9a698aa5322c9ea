"""timm: the parts of its train loop: model, LAMB, mixup, NativeScaler with clipping, accumulation, EMA, cosine schedule."""

import timm
import torch
import truth
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler
from torch.utils.data import DataLoader, TensorDataset

truth.seed()
model = timm.create_model("resnet10t", num_classes=3, pretrained=False)
optimizer = truth.follow(create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05))
average, scaler, criterion = ModelEmaV3(model, decay=0.99), NativeScaler(), SoftTargetCrossEntropy()
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=3)
scheduler = CosineLRScheduler(optimizer, t_initial=16, warmup_t=3, warmup_lr_init=1e-5, t_in_epochs=False)
pictures = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(0, 3, (32,)))
updates = 0
for _ in range(3):
    model.train()
    for number, (x, y) in enumerate(DataLoader(pictures, 4, shuffle=True), start=1):
        mixed, targets = mixup(x, y)
        truth.samples(len(mixed))
        loss = truth.loss(criterion(model(mixed), targets)) / 2
        update = number % 2 == 0
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=update)
        if update:
            optimizer.zero_grad()
            updates += 1
            average.update(model, step=updates)
            scheduler.step_update(updates)
    model.eval()
    truth.evaluated()
    with torch.no_grad():
        for x, _ in DataLoader(pictures, 8):
            model(x)
truth.end(model, average.module)
