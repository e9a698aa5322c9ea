"""A plain loop of torch, none of the libraries: tests/benchmarks/test_libraries.py tries the comparison on it."""

import torch
import truth

truth.seed()
model, criterion = truth.Net(), truth.Loss()
optimizer = truth.follow(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
training, evaluation = truth.loaders()
for _ in range(3):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        for x, _ in evaluation:
            model(x)
truth.end(model)
