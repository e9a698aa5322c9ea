"""The clock that only a test's own naps move, as the hooks' tests have it."""

from agent.hooks.conftest import clock

__all__ = ["clock"]
