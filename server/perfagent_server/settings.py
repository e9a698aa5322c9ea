"""The server's settings: one typed value, made once and passed in. The environment is read in one function, here.

Every field is an environment variable `PERFAGENT_<FIELD>`, some are options of `perfagent up`, too. scripts/references writes
the docstrings and the help into docs/reference/settings.md.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from perfagent.endpoint.local_server import data_folder
from perfagent.errors import ConfigError
from perfagent.wire import MAX_DECODED_BYTES, MAX_SENT_BYTES
from perfagent.wire.limits import MAX_NAMES_PER_RUN
from perfagent_server.limits import LIMITS, Limits

__all__ = ["RETENTION_SETTINGS", "Auth", "LogFormat", "LogLevel", "Settings"]

Auth = Literal["auto", "required"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
RETENTION_SETTINGS = (
    "samples_days",
    "rollup16_days",
    "rollup256_days",
    "runs_days",
    "events_days",
    "profiles_days",
    "media_days",
    "alerts_days",
    "audit_days",
    "max_bytes",
)
"""The settings of how long, or how much, is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an option of `perfagent up` says in its help is not said again here."""

    host: str = "127.0.0.1"
    port: int = 8420
    data: Path = field(default_factory=data_folder)
    database: str | None = None
    replica: bool = False
    metrics: str | None = field(default=None, repr=False)
    folder: Path | None = None
    auth: Auth = "auto"
    insecure_no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    forwarded_allow_ips: tuple[str, ...] = ()
    public_url: str | None = None
    """the address that people open in their browser, for links in alerts (default: `http://host:port`); with `https://`,
    browsers log in over https only"""
    webhook_allow: tuple[str, ...] = ()
    """loopback or private receivers that the server may call: `host:port`, host or network, separated by commas"""
    admin_token: str | None = field(default=None, repr=False)
    """at least 16 characters; replaces the file in `data` (default: made at the first start)"""
    key_pepper: str | None = field(default=None, repr=False)
    """the secret with which keys are hashed: at least 16 characters; replaces the file in `data`, and replicas need the same
    (default: made at the first start)"""
    max_body_bytes: int = MAX_SENT_BYTES
    """the largest request body as sent"""
    max_decoded_bytes: int = MAX_DECODED_BYTES
    """the largest request body after decompression"""
    read_timeout_s: float = 10.0
    """how long the head of a request, and its body, may take to arrive"""
    keep_alive_s: int = 75
    """how long an idle connection stays open; more than twice the agents' interval of sending"""
    samples_days: float | None = None
    """samples older than this are deleted; minimum, maximum, mean and count of every 16 steps stay"""
    rollup16_days: float | None = None
    """this long after the end of a run, its 16-step averages are merged into 256-step averages"""
    rollup256_days: float | None = None
    """this long after the end of a run, these are merged into 4096-step averages (zoomed charts keep one for every 1024)"""
    runs_days: float | None = None
    """a run is deleted this long after its end or last contact"""
    events_days: float | None = None
    """older console lines, stacks and other events are deleted; states, context and GPUs of a run stay"""
    profiles_days: float | None = None
    """older profiles and their traces are deleted"""
    media_days: float | None = None
    """older images, audio, tables and histograms are deleted"""
    alerts_days: float | None = None
    """an alert is deleted this long after its end, if its run had no contact since; firing alerts stay"""
    audit_days: float | None = None
    """older entries of the audit log are deleted"""
    max_bytes: float | None = None
    """the size budget of the database, in bytes (docs/server/operations.md#keep-the-data-small) (default: no limit)"""
    metrics_runs: int = 100
    """how many active runs are in `/metrics` and sent by OTLP; 0: none"""
    otlp_endpoint: str | None = None
    """an OpenTelemetry collector, such as `http://collector:4318` (docs/server/operations.md#opentelemetry)"""
    otlp_headers: tuple[str, ...] = field(default=(), repr=False)
    """`NAME=VALUE`, separated by commas, sent with it"""
    otlp_interval_s: float = 60.0
    """seconds between two exports"""
    requests_per_s: float = 2_000.0
    """requests per second"""
    samples_per_s: float = 500_000.0
    """samples per second"""
    bytes_per_s: float = 64.0 * 2**20
    """bytes per second, after decompression"""
    runs_per_hour: float = 20_000.0
    """new runs in an hour, a tenth of them at once"""
    max_projects: int = 1_000
    """how many projects there may be; a sender may begin a tenth of them in an hour, or ten"""
    max_ranks: int = 65_536
    """ranks of a run"""
    max_names: int = MAX_NAMES_PER_RUN
    """metric names of a run that its script logs, and as many of losses, phases and families of layers; those of the catalog
    (docs/reference/metrics.md) always have room"""
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    access_log: bool = False
    oidc_issuer: str | None = None
    """an OpenID provider at which people sign in (docs/server/users.md#sign-in-at-an-identity-provider-openid-connect)"""
    oidc_client_id: str | None = None
    """as registered at the provider"""
    oidc_client_secret: str | None = field(default=None, repr=False)
    """as registered at the provider"""
    oidc_client_secret_file: Path | None = None
    """a file with the secret; wins over the variable"""
    oidc_name: str = "single sign-on"
    """the words after "Sign in with" on the button"""
    oidc_scopes: str = "openid profile email"
    """the scopes that the server asks for"""
    oidc_claim: str = "groups"
    """the claim whose values give roles"""
    oidc_roles: tuple[str, ...] = ()
    """`VALUE=ROLE` or `VALUE=ROLE:PROJECT`, separated by commas"""
    oidc_domains: tuple[str, ...] = ()
    """only people with a verified mail address in one of these domains (default: any)"""

    def __post_init__(self) -> None:
        for name, allowed in (("auth", Auth), ("log_format", LogFormat), ("log_level", LogLevel)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(allowed))}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; allowed are 0 (any free one) to 65535")
        above_zero = (
            "max_body_bytes", "max_decoded_bytes", "read_timeout_s", "keep_alive_s", "max_projects", "max_ranks", "max_names",
            "otlp_interval_s",
        )  # fmt: skip
        for name in (*above_zero, *LIMITS):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint is {self.otlp_endpoint!r}; give an address such as http://collector:4318")
        if not all("=" in one for one in self.otlp_headers):
            raise ConfigError("otlp_headers has an entry without `=`; give NAME=VALUE, several separated by commas")
        if self.metrics_runs < 0:
            raise ConfigError(f"metrics_runs is {self.metrics_runs}; allowed are 0 (no run) and above")
        for name in RETENTION_SETTINGS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0 (inf keeps everything)")
        if self.key_pepper is not None and len(self.key_pepper) < 16:
            raise ConfigError(
                "the key pepper has fewer than 16 characters; take that of the first server, or a longer one"
            )
        if self.admin_token is not None and len(self.admin_token) < 16:
            raise ConfigError(
                "the admin token has fewer than 16 characters; leave PERFAGENT_ADMIN_TOKEN unset to have one made"
            )

    @property
    def limits(self) -> Limits:
        """What a sender may send, unless its key has limits of its own."""
        return Limits(**{name: getattr(self, name) for name in LIMITS})

    @property
    def loopback(self) -> bool:
        """Only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def open_access(self) -> bool:
        """Reading and ingest need no key. Administration always does."""
        return self.insecure_no_auth or (self.auth == "auto" and self.loopback)

    @property
    def url(self) -> str:
        """The address to show and to put into links, without a slash at the end."""
        return self.public_url.rstrip("/") if self.public_url else self.local_url

    @property
    def local_url(self) -> str:
        """The address for jobs and commands on this machine, where the public one may lead nowhere."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104 - nothing is bound here
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from PERFAGENT_<FIELD> variables; an override that is not None wins. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {"data": data_folder(environ)}
        for item in fields(cls):
            text = environ.get(f"PERFAGENT_{item.name.upper()}", "").strip()
            if text:
                values[item.name] = _parse(item.name, str(item.type), text)
        unknown = set(overrides) - {item.name for item in fields(cls)}
        if unknown:
            raise ConfigError(f"unknown settings: {', '.join(sorted(unknown))}")
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)


def _parse(name: str, kind: str, text: str) -> Any:
    variable = f"PERFAGENT_{name.upper()}"
    if kind.startswith("tuple"):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind.startswith("Path"):
        return Path(text).expanduser()
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false", "yes", "no"):
            raise ConfigError(f"{variable} is {text!r}; allowed are 1 and 0")
        return text.lower() in ("1", "true", "yes")
    if kind in ("int", "float", "float | None"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            raise ConfigError(f"{variable} is {text!r}; it must be a number") from None
    return text
