"""What a run says of calls that it cannot take as they are meant: each kind once, with what was given, what is allowed
and what to do. None of it raises: a slip in a loop must not end a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfagent.boundary.agent_log import logger

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Sender

__all__ = ["Misuse"]


class Misuse:
    """Of one run. Counts calls of log() that were left out as `refused_log_calls`."""

    def __init__(self, sender: Sender) -> None:
        self._sender, self._silent = sender, sender.config.disabled
        self._said: set[str] = set()

    def no_metrics(self, given: Any) -> None:
        """log() of what is no dict."""
        self._left_out()
        example = f"{{{given!r:.60}: value}}" if isinstance(given, str) else "{'loss': value}"
        self._say(
            f"log of {type(given).__name__}",
            f"log() takes a dict of names and numbers, not {_shown(given)}; left out. Write log({example})",
        )

    def no_step(self, step: Any) -> None:
        """log() with a step that no series can have."""
        self._left_out()
        kind = "negative" if isinstance(step, int) and step < 0 else type(step).__name__
        self._say(
            f"step {kind}",
            f"log(step=...) takes a whole number from 0 to 2**53, not {_shown(step)}; left out. Without step= the values belong "
            "to the step in progress",
        )

    def goes_back(self, step: int, newest: int) -> None:
        """log() of the same name for an earlier step than before."""
        self._say(
            "step back",
            f"log(step={step}) came after log(step={newest}) of the same name; the value is stored at step {step}. Steps of a "
            "run should rise: give the step of the whole training, not of an epoch, or leave step= out",
        )

    def too_late(self, call: str, run: str) -> None:
        """A call of a run that has ended."""
        self._say(
            f"late {call}",
            f"{call}() was called after the end of the run {run}; left out. perfagent.{call}() goes to the current run; attach() "
            "or init() begins one",
        )

    def another_model(self, run: str, step: int) -> None:
        """attach() of another model, without a name."""
        self._say(
            "another model",
            f"attach() was called with another model and without a name: the run {run} goes on after step {step:,}, and its "
            "curves hold both trainings. For a run of its own, call run.finish() before, or give attach() a name=",
        )

    def phase_name(self, name: str) -> str:
        """The name that a phase gets: of letters, digits, `_`, `-` and `.`, as part of the name of a series."""
        kept = "".join(letter if letter.isalnum() or letter in "_-." else "_" for letter in name)
        if kept != name:
            self._say(
                f"phase {name}",
                f"phase({name!r}): a phase's name has letters, digits, '_', '-' and '.'; its time is recorded as phase/{kept}_s",
            )
        return kept

    def _left_out(self) -> None:
        self._sender.counters["refused_log_calls"] = self._sender.counters.get("refused_log_calls", 0) + 1

    def _say(self, kind: str, sentence: str) -> None:
        if kind not in self._said and not self._silent:
            self._said.add(kind)
            logger.warning("perfagent: %s", sentence)


def _shown(value: Any) -> str:
    """In a few words; only what is plain shows itself: the text of a tensor would wait for its device."""
    if value is None or type(value) in (str, bytes, int, float, bool):
        return repr(value[:80] if isinstance(value, (str, bytes)) else value)[:90]
    return f"a value of type {type(value).__name__:.80}"
