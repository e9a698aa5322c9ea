"""Two losses of one's own: focal loss for rare classes, and several tasks in one training.

    python examples/recipes/losses.py --steps 300

Focal loss (Lin et al. 2017) weighs each sample by (1 - p)^gamma, p being the probability of its class: what is right
already counts little. gamma = 2 and alpha = 1 are usual; with gamma = 0 it is cross entropy. Tasks are weighed by a
learned uncertainty each (Kendall et al. 2018), so that no task drowns the others because its numbers are larger.
"""

import argparse

import torch
from torch.nn import functional

import perfagent


def focal_loss(logits: torch.Tensor, labels: torch.Tensor, *, alpha: float = 1.0, gamma: float = 2.0) -> torch.Tensor:
    """Mean over the batch; logits (batch, classes), labels (batch,)."""
    cross_entropy = functional.cross_entropy(logits, labels, reduction="none")
    right = torch.exp(-cross_entropy)  # the probability of the label's class
    return (alpha * (1 - right) ** gamma * cross_entropy).mean()


class Tasks(torch.nn.Module):
    """Sum of the tasks' losses, each divided by a learned variance; the logarithm keeps the variances from growing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.log_variance = torch.nn.Parameter(torch.zeros(count))

    def forward(self, losses: list[torch.Tensor]) -> torch.Tensor:
        return (torch.stack(losses) * torch.exp(-self.log_variance) + self.log_variance).sum()


class Network(torch.nn.Module):
    """One body; one head that tells a rare class, one for a number of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU())
        self.rare, self.number = torch.nn.Linear(64, 2), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.rare(hidden), self.number(hidden).squeeze(-1)


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 16)
    return x, (x[:, 0] + x[:, 1] > 2.3).long(), 100 * x[:, 2]  # about one in twenty is of the rare class


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, tasks = Network(), Tasks(2)
    optimizer = torch.optim.AdamW([*model.parameters(), *tasks.parameters()], lr=1e-2)
    run = perfagent.attach(model, optimizer, project="examples", name="losses")
    for _ in range(options.steps):
        x, rare, number = samples(256)
        told, guessed = model(x)
        losses = [focal_loss(told, rare), functional.mse_loss(guessed, number)]
        tasks(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log({"focal": losses[0].detach(), "squared": losses[1].detach()})  # each task has a chart of its own
    x, rare, number = samples(4096)
    with torch.no_grad():
        told, guessed = model(x)
    found = (told.argmax(dim=1)[rare == 1] == 1).float().mean().item()
    weights = [f"{weight:.3g}" for weight in torch.exp(-tasks.log_variance.detach())]
    print(
        f"found {100 * found:.0f} % of the rare class; number off by {(guessed - number).abs().mean():.1f}; weights "
        f"{', '.join(weights)}"
    )


if __name__ == "__main__":
    main()
