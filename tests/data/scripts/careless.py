"""A training script that is careless with secrets in every way, and fails in the end."""

import argparse
import dataclasses
import os
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--api-key")
parser.add_argument("--database")
parser.add_argument("--run-label", default="baseline")
parser.add_argument("words", nargs="*")
ARGUMENTS = parser.parse_args()


@dataclasses.dataclass
class Login:
    user: str
    password: str
    more: list


def train(secrets):
    config = {
        "batch_size": 4,
        "login": {
            "nested": [
                Login(
                    "me", secrets["NAMED_PASSWORD"], [value for name, value in secrets.items() if "NAMED" not in name]
                )
            ]
        },
        "endpoints": [("Authorization", "Bearer " + secrets["NAMED_BEARER"])],
        "auth": {"token": secrets["NAMED_TOKEN"]},
    }
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=ARGUMENTS.lr)
    for step in range(5):
        loss = model(torch.ones(config["batch_size"], 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item()!r} commit 9ee4a0bf527be1dfadf0713484afc43b44c543cc")
    for name, value in secrets.items():
        if not name.startswith("NAMED_"):
            print(f"loaded {value}")
            sys.stderr.write(f"trying {value[: len(value) // 2]}")
            sys.stderr.flush()
            sys.stderr.write(f"{value[len(value) // 2 :]} now\n")
        print(f"api_key={value} password: {value}")
        print({"token": value})
    print("POST /", {"Authorization": "Basic " + secrets["NAMED_BEARER"]})
    print("trained from commit 9ee4a0bf527be1dfadf0713484afc43b44c543cc")
    print(f"connecting to postgresql://me:{secrets['NAMED_PASSWORD']}@db:5432/x")
    raise RuntimeError(f"cannot log in: {'; '.join(f'secret={value}' for value in secrets.values())}")


train({name.removeprefix("CANARY_"): value for name, value in os.environ.items() if name.startswith("CANARY_")})
