"""What a script under test logged, for the test to compare with what the run has."""

import json
from pathlib import Path


def report(folder, logged):
    """logged: (name, step, value) of each scalar."""
    plain = [
        (name, int(step), value.item() if hasattr(value, "item") else float(value)) for name, step, value in logged
    ]
    Path(folder, "logged.json").write_text(json.dumps(plain))


def of_transformers(trainer):
    """What a Transformers Trainer says it logged, under the names that its callbacks write."""
    return [
        (f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", entry["step"], value)
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if name != "step"
    ]


def of_lightning(trainer):
    """What the loggers of a Lightning Trainer will be handed, and how many optimizer steps there were by then."""
    seen = []
    connector = trainer._logger_connector

    def log_metrics(metrics, step=None):
        for name, value in {**metrics, "epoch": trainer.current_epoch}.items():
            seen.append((name, trainer.global_step, float(value)))
        type(connector).log_metrics(connector, metrics, step)

    connector.log_metrics = log_metrics
    return seen
