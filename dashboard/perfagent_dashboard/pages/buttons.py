"""Callbacks of buttons: the page does what was asked and says so, or says why it was refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dash import Dash, Input, Output, State, ctx, no_update

from perfagent_dashboard import ids
from perfagent_dashboard.components.feedback import note
from perfagent_dashboard.server_api import Problem

__all__ = ["on_press"]


def on_press(
    app: Dash,
    outputs: Sequence[Output],
    buttons: Sequence[Any],
    fields: Sequence[State | str],
    act: Callable[..., Awaitable[tuple[Any, ...]]],
) -> None:
    """buttons: their ids, or other inputs. fields: ids of what has a value, or other states. act: takes the id of the button and
    the values of the fields; gives what is said, a sentence or notes, and a value for each output."""
    inputs = [one if isinstance(one, Input) else Input(one, "n_clicks") for one in buttons]
    states = [one if isinstance(one, State) else State(one, "value") for one in fields]

    async def pressed(*values: Any) -> tuple[Any, ...]:
        if not any(one["value"] for one in ctx.triggered):  # Dash also calls where a button is drawn
            return (no_update,) * (1 + len(outputs))
        try:
            said, *shown = await act(ctx.triggered_id, *values[len(inputs) :])
        except Problem as problem:
            return note(problem.message, failed=True), *(no_update for _ in outputs)
        return note(said) if isinstance(said, str) else said, *shown

    notes = Output(ids.NOTES, "sendNotifications", allow_duplicate=True)
    app.callback([notes, *outputs], inputs, states, prevent_initial_call=True)(pressed)
