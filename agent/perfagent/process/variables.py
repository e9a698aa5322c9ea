"""Names of environment variables: which ones perfagent reads, and which one was probably meant.

Values are read elsewhere (`AgentConfig.from_env`, the server's `Settings.from_env`); here only their names are looked
at, so that PERFAGENT_DISABELD=1 is not passed over in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

__all__ = ["KNOWN", "misspelt", "warn_of_misspelt"]

PREFIX = "PERFAGENT_"
_OF_TESTS = PREFIX + "TEST_"
_AGENT = (
    "SERVER", "API_KEY", "PROJECT", "RUN_ID", "RECORD", "TENSORBOARD", "DISABLED", "MALLOC", "CAPTURE_LOGS", "RUN_LAUNCH",
)  # fmt: skip
_SERVER = (
    "HOST", "PORT", "DATA", "DATABASE", "REPLICA", "FOLDER", "AUTH", "INSECURE_NO_AUTH", "ALLOWED_HOSTS",
    "FORWARDED_ALLOW_IPS", "PUBLIC_URL", "WEBHOOK_ALLOW", "ADMIN_TOKEN", "KEY_PEPPER", "MAX_BODY_BYTES",
    "MAX_DECODED_BYTES", "METRICS", "OIDC_CLAIM", "OIDC_CLIENT_ID", "OIDC_CLIENT_SECRET", "OIDC_CLIENT_SECRET_FILE",
    "OIDC_DOMAINS", "OIDC_ISSUER", "OIDC_NAME", "OIDC_ROLES", "OIDC_SCOPES", "OTLP_ENDPOINT", "OTLP_HEADERS", "OTLP_INTERVAL_S",
    "READ_TIMEOUT_S", "KEEP_ALIVE_S", "SAMPLES_DAYS", "ROLLUP16_DAYS", "ROLLUP256_DAYS",
    "RUNS_DAYS", "EVENTS_DAYS", "PROFILES_DAYS", "MEDIA_DAYS", "ALERTS_DAYS",
    "AUDIT_DAYS", "MAX_BYTES", "METRICS_RUNS", "LOG_FORMAT", "LOG_LEVEL", "ACCESS_LOG", "REQUESTS_PER_S",
    "SAMPLES_PER_S", "BYTES_PER_S", "RUNS_PER_HOUR", "MAX_PROJECTS", "MAX_RANKS", "MAX_NAMES",
)  # fmt: skip
KNOWN = frozenset(PREFIX + name for name in (*_AGENT, *_SERVER))
"""Variables of the agent and of the server: one environment often serves both."""
_warned: set[str] = set()


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable of an environment that has our prefix and that nobody reads."""
    strangers = [
        name for name in environ if name.startswith(PREFIX) and name not in KNOWN and not name.startswith(_OF_TESTS)
    ]
    return [f"there is no setting {name}; {_advice(name)}" for name in sorted(strangers)]


def warn_of_misspelt(say: Callable[[str], None], environ: Mapping[str, str] | None = None) -> None:
    """Says each of them once in this process."""
    for sentence in misspelt(os.environ if environ is None else environ):
        if sentence not in _warned:
            _warned.add(sentence)
            say(sentence)


def _advice(name: str) -> str:
    import difflib  # not with the training: most environments have no such name

    near = difflib.get_close_matches(name.removeprefix(PREFIX), sorted((*_AGENT, *_SERVER)), 1)
    return f"did you mean {PREFIX}{near[0]}?" if near else "docs/reference/settings.md lists those that there are"
