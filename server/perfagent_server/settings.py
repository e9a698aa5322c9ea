"""The server's settings: one typed value, made once and passed in. The environment is read in one function, here.

Every field is an option of `perfagent up` or an environment variable `PERFAGENT_<FIELD>`, and a row of
docs/reference/settings.md.
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
    """host, port: where the server listens. data: folder of the database, the admin token and the key pepper (0700).

    database: SQLAlchemy URL, None for SQLite in `data`. replica: whether other servers use the same database, too.
    metrics: URL of a separate store for samples, None for the database. folder: a folder of offline recordings that is
    uploaded at start. auth: "auto" asks for keys unless bound to loopback, "required" always. insecure_no_auth: reading
    and ingest without a key even on a public address. allowed_hosts: names in the Host header besides loopback and
    `host`; "*" is any. forwarded_allow_ips: proxies whose X-Forwarded-For is believed. public_url: the address that
    people use, for links in alerts. webhook_allow: receivers (host:port, host, CIDR) that are allowed although they are
    loopback or private. admin_token: replaces the token file. key_pepper: replaces the file of the secret from which
    the digests of keys are made; replicas need the same. max_body_bytes, max_decoded_bytes: of one request, as sent and
    decoded. read_timeout_s: for a request's head and for its body. keep_alive_s: for an idle connection; above twice
    the agents' flush interval, so that the server never closes one that is about to be used.
    samples_days: after so many days full resolution is dropped and cells of 16 steps stay. rollup16_days,
    rollup256_days: so many days after a run's end its cells of 16 steps become cells of 256 steps, and those become
    cells of 4096. runs_days: after so many days without a word a run is deleted. events_days, profiles_days,
    media_days, alerts_days, audit_days: after so many days console lines, stacks and other events, profiles, images and
    other media, alerts that are over,
    and rows of the audit log are deleted. max_bytes: of the database; when it has more, the oldest runs lose their
    samples, then their cells, and then go. None: kept for ever, and without a limit.
    requests_per_s, samples_per_s, bytes_per_s, runs_per_hour: of one sender (limits.py). max_projects: of this server;
    max_ranks, max_names: of a run.
    metrics_runs: so many runs are in /metrics, those that were heard of last; 0: none.
    otlp_endpoint: the address to which the same runs, and their GPUs, are sent as OTLP over HTTP, such as
    http://collector:4318; otlp_headers: NAME=VALUE, sent with it; otlp_interval_s: how often.
    log_format: "text", or "json" for one object a line. log_level: the least level that is logged. access_log: a line for
    each request.
    oidc_issuer: the address of an OpenID provider at which people sign in; oidc_client_id, oidc_client_secret (or a file
    with it): as registered there; oidc_name: what the button says; oidc_scopes: what is asked for, separated by spaces;
    oidc_claim: whose values give roles; oidc_roles: VALUE=ROLE or VALUE=ROLE:PROJECT; oidc_domains: only people with a
    verified mail address in one of these.
    """

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
    webhook_allow: tuple[str, ...] = ()
    admin_token: str | None = field(default=None, repr=False)
    key_pepper: str | None = field(default=None, repr=False)
    max_body_bytes: int = MAX_SENT_BYTES
    max_decoded_bytes: int = MAX_DECODED_BYTES
    read_timeout_s: float = 10.0
    keep_alive_s: int = 75
    samples_days: float | None = None
    rollup16_days: float | None = None
    rollup256_days: float | None = None
    runs_days: float | None = None
    events_days: float | None = None
    profiles_days: float | None = None
    media_days: float | None = None
    alerts_days: float | None = None
    audit_days: float | None = None
    max_bytes: float | None = None
    metrics_runs: int = 100
    otlp_endpoint: str | None = None
    otlp_headers: tuple[str, ...] = field(default=(), repr=False)
    otlp_interval_s: float = 60.0
    requests_per_s: float = 2_000.0
    samples_per_s: float = 500_000.0
    bytes_per_s: float = 64.0 * 2**20
    runs_per_hour: float = 20_000.0
    max_projects: int = 1_000
    max_ranks: int = 65_536
    max_names: int = MAX_NAMES_PER_RUN
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"
    access_log: bool = False
    oidc_issuer: str | None = None
    oidc_client_id: str | None = None
    oidc_client_secret: str | None = field(default=None, repr=False)
    oidc_client_secret_file: Path | None = None
    oidc_name: str = "single sign-on"
    oidc_scopes: str = "openid profile email"
    oidc_claim: str = "groups"
    oidc_roles: tuple[str, ...] = ()
    oidc_domains: tuple[str, ...] = ()

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
