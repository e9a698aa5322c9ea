"""An end that waits until all is written and sent, for tests that read what is there afterwards. Else it has 1.5 s, and
what a busy machine does not get done in them is missing."""

from __future__ import annotations

import importlib

import pytest

__all__ = ["IN_A_SCRIPT", "whole_end"]

END_S = 60.0
"""The end comes as soon as all is done."""
IN_A_SCRIPT = f"import importlib; importlib.import_module('perfagent.lifecycle').EXIT_S = {END_S}\n"
"""A line for a script. It imports perfagent, so it does not stand before what a test asks of that import."""


def whole_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs of this process."""
    monkeypatch.setattr(importlib.import_module("perfagent.lifecycle"), "EXIT_S", END_S)
