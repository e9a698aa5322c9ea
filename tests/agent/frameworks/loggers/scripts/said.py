"""What a script under test logged, for the test to compare with what the run has."""

import json
from pathlib import Path


def report(folder, logged):
    """logged: (name, step, value) of each scalar."""
    plain = [
        (name, int(step), value.item() if hasattr(value, "item") else float(value)) for name, step, value in logged
    ]
    Path(folder, "logged.json").write_text(json.dumps(plain))
