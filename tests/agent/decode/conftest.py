"""Shares the virtual clock of the hooks' tests."""

from agent.hooks.conftest import clock

__all__ = ["clock"]
