"""docs/reference/settings.md: tables of the settings of agent and server. The rest of the page is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path

from perfagent.agent_config import _SWITCHES, _VARIABLES, AgentConfig
from perfagent_server.settings import RETENTION_SETTINGS, Settings
from references.command_line import help_of, parsers
from references.markdown import filled, linked, meanings, table

__all__ = ["settings"]

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"
_AGENT = {**_VARIABLES, **_SWITCHES, "state_dir": "XDG_STATE_HOME"}
_LIMITS = "requests_per_s samples_per_s bytes_per_s runs_per_hour max_projects max_ranks max_names"
_SERVER = {
    "network": "host port public_url allowed_hosts forwarded_allow_ips webhook_allow max_body_bytes max_decoded_bytes "
    "read_timeout_s keep_alive_s",
    "database": "data database metrics replica folder",
    "keys": "auth insecure_no_auth admin_token key_pepper oidc_issuer oidc_client_id oidc_client_secret "
    "oidc_client_secret_file oidc_name oidc_scopes oidc_claim oidc_roles oidc_domains",
    "retention": " ".join(RETENTION_SETTINGS),
    "limits": _LIMITS,
    "telemetry": "metrics_runs otlp_endpoint otlp_headers otlp_interval_s",
    "logs": "log_format log_level access_log",
}
"""The parts of the page, and the settings in each."""
_UNSET = {"retention": "for ever"}


def settings() -> str:
    """The page. Raises ValueError for a setting of the server that no part has, KeyError for one that nothing explains."""
    page, agent = _PAGE.read_text("utf-8"), meanings(AgentConfig)
    named = [
        _row(field, agent[field.name], f"`{_AGENT[field.name]}`")
        for field in fields(AgentConfig)
        if field.name in _AGENT
    ]
    page = filled(page, "agent", table(("setting", "variable", "default", "meaning"), named))
    fixed = (_row(field, agent[field.name]) for field in fields(AgentConfig) if field.name not in _AGENT)
    page = filled(page, "fixed", table(("setting", "value", "meaning"), fixed))
    left = {field.name: field for field in fields(Settings)}
    for part, names in _SERVER.items():
        page = filled(page, part, _of_server([left.pop(name) for name in names.split()], _UNSET.get(part, "none")))
    if left:
        raise ValueError(f"no part of the page has {', '.join(left)}")
    return page


def _of_server(rows: Iterable[Field], unset: str) -> str:
    up, written, made = parsers()["up"], meanings(Settings), []
    options = {action.dest: action for action in up._actions}
    for field in rows:
        called = f"`PERFAGENT_{field.name.upper()}`"
        if field.name in options:
            called += f", `{options[field.name].option_strings[0]}`"
            made.append(_row(field, help_of(options[field.name], up), called, unset=unset))
        else:
            made.append(_row(field, written[field.name], called, unset=unset))
    return table(("setting", "variable, option", "default", "meaning"), made)


def _row(field: Field, meaning: str, *called: str, unset: str = "none") -> tuple[str, ...]:
    """A default may be in words, `(default: any)`, where the code finds it out; one that repeats the code's must be the same."""
    value = "" if field.default in (MISSING, None, ()) else _value(field)
    if found := re.search(r" \(default(:?) ([^)]*)\)", meaning):
        meaning = meaning.replace(found[0], "")
        if not found[1] and found[2] != value.strip("`"):
            raise ValueError(f"the help of {field.name} says {found[0]}, and the code {value}")
        value = found[2] if found[1] else value
    return f"`{field.name}`", *called, value or unset, linked(meaning).replace(f"({_PAGE.name}#", "(#")


def _value(field: Field) -> str:
    value = field.default
    if isinstance(value, bool):
        return f"`{value:d}`"
    if isinstance(value, str):
        return f"`{value}`"
    unit = (
        " %" if field.name.endswith("_pct") else " s" if field.name.endswith("_s") and "_per_" not in field.name else ""
    )
    mebibytes = f" ({value // 2**20:g} MiB)" if "bytes" in field.name else ""
    return f"{value:.15g}{unit}{mebibytes}"
