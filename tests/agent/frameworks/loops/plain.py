"""Loops in plain torch."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from models import LENGTH, VOCABULARY, WIDTH, Points, classifier, language
from script import Script, norm_of, train
from torch import nn
from torch.utils.data import DataLoader


def loader_and_scheduler(script: Script) -> None:
    """A DataLoader, AdamW, clipping and a scheduler."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    loader = DataLoader(Points(48), batch_size=8, shuffle=True)
    train(script, model, [optimizer], loader, clip=0.5, after=lambda _: scheduler.step())


def own_batches(script: Script) -> None:
    """No DataLoader: batches of tokens drawn by hand; the model is named."""
    model = language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    script.attach(model)
    batches = torch.randint(0, VOCABULARY, (6, 4, LENGTH + 1))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train(script, model, [optimizer], batches, loss_of, samples=4, tokens=4 * LENGTH)


def accumulation_divided(script: Script) -> None:
    """Four micro-batches a step, each loss divided by four; the last window is short."""
    script.attach()
    model = classifier()

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) / 4

    train(script, model, batches=DataLoader(Points(88), batch_size=4), loss_of=loss_of, window=4)


def accumulation_plain(script: Script) -> None:
    """Three micro-batches a step, losses as they are: the loss of the step is their mean."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(script, model, [optimizer], DataLoader(Points(60), batch_size=4), window=3, total=statistics.fmean)


def closure(script: Script) -> None:
    """LBFGS evaluates the loss several times a step; loss and norm are those of the weights it starts from."""
    model = classifier(dropout=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    script.attach(model, optimizer)
    data = Points(32)
    for _ in range(4):
        seen: list[tuple[float, float]] = []

        def evaluate(seen: list[tuple[float, float]] = seen) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data.x), data.y)
            loss.backward()
            seen.append((loss.item(), norm_of(model.parameters())))
            return loss

        optimizer.step(evaluate)
        script.step(loss=seen[0][0], lr=0.1, norm=seen[0][1], samples=32 * len(seen))
    script.produced(model)


def evaluation_between(script: Script) -> None:
    """A validation pass with its own loader and a second forward-only model every two steps."""
    script.attach()
    model = classifier()
    validation = DataLoader(Points(24), batch_size=12)

    def evaluate(number: int) -> None:
        if number % 2 == 0:
            model.eval()
            with torch.no_grad():
                for seen, _ in validation:
                    model(seen)
            model.train()

    train(script, model, after=evaluate)


def loader_with_workers(script: Script) -> None:
    """Batches that two processes collate, in random order."""
    script.attach()
    model = classifier()
    train(script, model, batches=DataLoader(Points(48), batch_size=8, shuffle=True, num_workers=2))


def back_to_a_checkpoint(script: Script) -> None:
    """Saves weights, optimizer and random state after step 3, and goes back to them after step 5."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    file = Path(script.folder) / "checkpoint.pt"

    def save_or_go_back(number: int) -> None:
        if number == 3:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            torch.save(saved, file)
        elif number == 5:
            saved = torch.load(file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["random"])

    train(script, model, [optimizer], DataLoader(Points(64), batch_size=8), after=save_or_go_back)


def becomes_nan(script: Script) -> None:
    """The loss is NaN from step 4 on, and so are the weights after it."""
    script.attach()
    model = classifier()

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        factor = float("nan") if len(script.steps) == 3 else 1.0
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * factor

    train(script, model, loss_of=loss_of)


def without_gradients(script: Script) -> None:
    """An evolution strategy: no optimizer, no backward pass; it logs its own loss."""
    run = script.attach()
    model = nn.Linear(WIDTH, 1)
    data = Points(32)
    with torch.no_grad():
        best = float("inf")
        for number in range(1, 7):
            kept = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
            loss = model(data.x).square().mean().item()
            if loss > best:
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old)
            best = min(best, loss)
            if run is not None:
                run.log({"loss": best}, step=number)
            script.step(loss=best)
    script.produced(model)
