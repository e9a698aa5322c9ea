"""What a new user sees: the two ways to watch a training, ready to copy."""

from __future__ import annotations

from dash import dcc, html
from dash.development.base_component import Component

from perfagent_dashboard.words import say

__all__ = ["welcome"]

_USUAL = "http://127.0.0.1:8420"


def welcome(server: str) -> Component:
    """server: the address that training jobs use."""
    other = "" if server.rstrip("/") == _USUAL else f"export PERFAGENT_SERVER={server.rstrip('/')}\n"
    option = f', server="{server.rstrip("/")}"' if other else ""
    return html.Div(
        [
            html.H1(say("empty_title")),
            html.P(say("empty")),
            html.Div(
                [
                    _way("way_run", f"{other}perfagent run train.py"),
                    _way("way_attach", f"import perfagent\n\nperfagent.attach(model, optimizer{option})"),
                ],
                className="ways",
            ),
            html.P(say("way_demo"), className="hint"),
            _code(f"{other}perfagent demo"),
            html.P(say("way_import"), className="hint"),
            _code(f"{other}perfagent import runs/"),
        ],
        className="welcome",
    )


def _way(name: str, code: str) -> Component:
    return html.Section([html.H2(say(name)), html.P(say(f"{name}_text")), _code(code)], className="card way")


def _code(text: str) -> Component:
    return html.Div(
        [html.Pre(html.Code(text)), dcc.Clipboard(content=text, className="button small", title=say("copy"))],
        className="code",
    )
