"""Distillation (Hinton et al. 2015): a small model learns from the probabilities of a large one and from the labels.

    python examples/recipes/distillation.py --steps 300

The loss is alpha * T^2 * KL(teacher's at temperature T || student's at temperature T) + (1 - alpha) * cross entropy.
The factor T^2 keeps the two gradients in proportion when T changes; "batchmean" is the KL divergence, "mean" divides it
by the classes as well. The agent recognizes a teacher by the name of its variable.
"""

import argparse

import torch
from torch.nn import functional

import perfagent

ALPHA, TEMPERATURE, CLASSES = 0.5, 4.0, 10

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

torch.manual_seed(0)
centers = torch.randn(CLASSES, 16)


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(CLASSES, (count,))
    return centers[labels] + 1.2 * torch.randn(count, 16), labels


def network(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES))


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logits (batch, classes) of both, labels (batch,)."""
    soft = functional.kl_div(
        functional.log_softmax(student / TEMPERATURE, dim=-1),
        functional.log_softmax(teacher / TEMPERATURE, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return ALPHA * TEMPERATURE**2 * soft + (1 - ALPHA) * functional.cross_entropy(student, labels)


teacher = network(256)
optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
for _ in range(options.steps):
    x, labels = examples(128)
    functional.cross_entropy(teacher(x), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
teacher.eval().requires_grad_(False)

student = network(8)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
perfagent.attach(student, optimizer, project="examples", name="distillation")
for _ in range(options.steps):
    x, labels = examples(128)
    with torch.no_grad():
        wanted = teacher(x)
    distillation_loss(student(x), wanted, labels).backward()
    optimizer.step()
    optimizer.zero_grad()

x, labels = examples(4096)
right = [(model(x).argmax(dim=1) == labels).float().mean().item() for model in (teacher, student)]
sizes = [sum(p.numel() for p in model.parameters()) for model in (teacher, student)]
print(f"teacher: {right[0]:.3f} right with {sizes[0]:,} parameters; student: {right[1]:.3f} with {sizes[1]:,}")
