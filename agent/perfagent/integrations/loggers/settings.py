"""Settings of the run that the script gave to other loggers, by logger: the config of W&B and trackio, MLflow's
parameters, TensorBoard's hyperparameters.

Written on the thread that logs; read on the sender's, for the run's configuration (context/hyperparameters.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["forget", "given", "note"]

MOST = 500
"""Settings of one logger."""
_noted: dict[str, dict[str, object]] = {}


def note(logger: str, settings: Mapping[str, object]) -> None:
    """Adds settings of one logger; the newest value of a name counts."""
    known = _noted.setdefault(logger, {})
    known.update({name: value for name, value in settings.items() if name in known or len(known) < MOST})


def forget() -> None:
    """For a new run."""
    _noted.clear()


def given() -> dict[str, dict[str, object]]:
    """All settings so far. Of W&B those of the run in progress, whose config scripts also change without a call."""
    config: Any = getattr(getattr(sys.modules.get("wandb"), "run", None), "config", None)
    if config is not None:
        # another version, or changed at this moment: the next look has it
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):
            note("wandb", dict(config.items()))
    return {logger: dict(settings) for logger, settings in list(_noted.items()) if settings}
