"""Loops in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from models import LENGTH, VOCABULARY, WIDTH, Language, Points, classifier, language_loss
from script import Script, norm_of, stepped
from torch import nn
from torch.utils.data import DataLoader


def loader_and_scheduler(script: Script) -> None:
    """A DataLoader, AdamW, clipping and a scheduler."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for x, y in DataLoader(Points(48), batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = norm_of(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        script.step(loss=loss.item(), lr=lr, norm=norm, samples=8)
    script.produced(model)


def own_batches(script: Script) -> None:
    """No DataLoader: batches of tokens drawn by hand; the model is named."""
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    script.attach(model)
    for _ in range(6):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
        loss = language_loss(model(tokens[:, :-1]), tokens[:, 1:])
        stepped(script, model, [optimizer], loss, lr=0.5, samples=4, tokens=4 * LENGTH)
    script.produced(model)


def accumulation_divided(script: Script) -> None:
    """Four micro-batches a step, each loss divided by four; the last window is short."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Points(88), batch_size=4)
    total, samples = 0.0, 0
    for number, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(x), y) / 4
        loss.backward()
        total, samples = total + loss.item(), samples + len(x)
        if number % 4 == 0 or number == len(loader):
            norm = norm_of(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            script.step(loss=total, lr=1e-2, norm=norm, samples=samples)
            total, samples = 0.0, 0
    script.produced(model)


def accumulation_plain(script: Script) -> None:
    """Three micro-batches a step, losses as they are: the loss of the step is their mean."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for number, (x, y) in enumerate(DataLoader(Points(60), batch_size=4), start=1):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if number % 3 == 0:
            norm = norm_of(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            script.step(loss=sum(losses) / 3, lr=1e-2, norm=norm, samples=12)
            losses.clear()
    script.produced(model)


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
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    validation = DataLoader(Points(24), batch_size=12)
    for number, (x, y) in enumerate(DataLoader(Points(48), batch_size=8), start=1):
        stepped(script, model, [optimizer], nn.functional.cross_entropy(model(x), y))
        if number % 2 == 0:
            model.eval()
            with torch.no_grad():
                for seen, _ in validation:
                    model(seen)
            model.train()
    script.produced(model)


def loader_with_workers(script: Script) -> None:
    """Batches that two processes collate, in random order."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in DataLoader(Points(48), batch_size=8, shuffle=True, num_workers=2):
        stepped(script, model, [optimizer], nn.functional.cross_entropy(model(x), y))
    script.produced(model)


def back_to_a_checkpoint(script: Script) -> None:
    """Saves weights, optimizer and random state after step 3, and goes back to them after step 5."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    file = Path(script.folder) / "checkpoint.pt"
    for number, (x, y) in enumerate(DataLoader(Points(64), batch_size=8), start=1):
        stepped(script, model, [optimizer], nn.functional.cross_entropy(model(x), y))
        if number == 3:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            torch.save(saved, file)
        elif number == 5:
            saved = torch.load(file, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["random"])
    script.produced(model)


def becomes_nan(script: Script) -> None:
    """The loss is NaN from step 4 on, and so are the weights after it."""
    script.attach()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(DataLoader(Points(48), batch_size=8), start=1):
        factor = float("nan") if number == 4 else 1.0
        stepped(script, model, [optimizer], nn.functional.cross_entropy(model(x), y) * factor)
    script.produced(model)


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
