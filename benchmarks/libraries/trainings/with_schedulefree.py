"""Schedule-Free AdamW with warm-up: the optimizer itself goes from training to evaluation and back."""

import schedulefree
import torch
import truth

truth.seed()
model, criterion = truth.Net(), truth.Loss()
optimizer = truth.follow(schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=3))
training, evaluation = truth.loaders()
for _ in range(3):
    model.train()
    optimizer.train()
    for x, y in training:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        for x, _ in evaluation:
            model(x)
truth.end(model)
