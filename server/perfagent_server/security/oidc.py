"""Signing in at an OpenID provider: the authorization code flow with PKCE, by authlib. Imported only where a provider is
set up: others need not wait for the libraries.

authlib makes and checks state, nonce and PKCE, fetches the provider's addresses and keys, and verifies the ID token. What
it must know again when the browser comes back (state, nonce, verifier) lies in a cookie that we sign: no server has to
remember it. The provider is named by the administrator, so it may be inside the network; redirects are not followed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
from authlib.integrations.starlette_client import OAuth, OAuthError, StarletteOAuth2App
from joserfc.errors import JoseError
from starlette.requests import Request
from starlette.responses import Response

from perfagent.errors import ConfigError
from perfagent_server.refusal import RefusalError
from perfagent_server.security.access import is_over_https
from perfagent_server.security.accounts import RoleIn, why_no_name
from perfagent_server.security.role_mapping import parse_mapping, roles_given, values_of_claim
from perfagent_server.security.signed_cookies import SignedCookies
from perfagent_server.settings import Settings

__all__ = ["OpenIdProvider", "SignedIn"]

log = logging.getLogger("perfagent.server")

CALLBACK = "/login/oidc/callback"
_COOKIE = "perfagent_oidc"
_PURPOSE = "oidc"
_SIGN_IN_S = 600
_TIMEOUT_S = 10.0
_ASYMMETRIC = ("RS", "PS", "ES", "Ed")
"""How ID tokens may be signed: with a key that only the provider has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedIn:
    """Who has signed in, as far as the provider is to be believed. subject: the provider's id of them, for ever; name: as
    people call them; goes_to: the page that asked for the login."""

    issuer: str
    subject: str
    name: str
    roles: list[RoleIn]
    goes_to: str


class OpenIdProvider:
    """One provider. Nothing is asked of it before the first login, so that the server starts while it is down."""

    def __init__(self, settings: Settings, cookies: SignedCookies) -> None:
        """Raises ConfigError for settings that cannot work."""
        self._settings, self._cookies = settings, cookies
        self.issuer, self.name = (settings.oidc_issuer or "").rstrip("/"), settings.oidc_name
        if urlsplit(self.issuer).scheme not in ("http", "https"):
            raise ConfigError(f"oidc_issuer is {settings.oidc_issuer!r}; give the address of the provider, https://...")
        if not settings.oidc_client_id:
            raise ConfigError("oidc_issuer is set, and oidc_client_id is not; register perfagent at the provider")
        self._mapping = parse_mapping(settings.oidc_roles)
        if not self._mapping:
            raise ConfigError(
                "oidc_roles is empty, so that nobody could sign in; give VALUE=ROLE, such as ml-team=operator"
            )
        self._secret = _secret(settings)
        self._kept = self._new_client()

    async def begin(self, request: Request, goes_to: str) -> Response:
        """Leads the browser to the provider. Raises RefusalError where that does not answer."""
        request.scope["session"] = {}
        client = await self._client()
        try:
            answer: Response = await client.authorize_redirect(request, self._settings.url + CALLBACK)
        except (httpx2.HTTPError, RuntimeError, ValueError) as error:
            raise self._out_of_reach(error) from error
        value = self._cookies.sign(_PURPOSE, {"session": request.session, "next": goes_to})
        answer.set_cookie(
            _COOKIE, value, max_age=_SIGN_IN_S, path="/login", httponly=True, samesite="lax",
            secure=is_over_https(request),
        )  # fmt: skip
        answer.headers["cache-control"] = "no-store"
        return answer

    async def finish(self, request: Request) -> SignedIn:
        """Who came back from the provider. Raises RefusalError: for an answer to no question of ours, for what the provider
        or we refuse, and where the provider does not answer."""
        held = self._cookies.read(_PURPOSE, request.cookies.get(_COOKIE), max_age_s=_SIGN_IN_S)
        if not isinstance(held, dict):
            raise RefusalError(
                "unauthorized", "this sign-in was not begun in this browser, or took too long; begin again"
            )
        request.scope["session"] = held["session"]
        client = await self._client()
        try:
            claims = await self._claims(client, request)
        except OAuthError as error:
            log.warning("a sign-in at %s was refused: %s %s", self.issuer, error.error, error.description)
            said = str(error.description or error.error)[:200]
            raise RefusalError("unauthorized", f"the sign-in was refused: {said}; begin again") from error
        except JoseError as error:
            log.warning("an ID token of %s was refused: %s", self.issuer, error)
            raise RefusalError(
                "unauthorized", "the provider's answer is not valid for this server; begin again"
            ) from error
        except (httpx2.HTTPError, RuntimeError, ValueError, KeyError) as error:
            raise self._out_of_reach(error) from error
        return self._known(claims, str(held["next"]))

    def forget(self, response: Response) -> None:
        """A sign-in is finished once."""
        response.delete_cookie(_COOKIE, path="/login", httponly=True, samesite="lax")

    async def _claims(self, client: StarletteOAuth2App, request: Request) -> Mapping[str, Any]:
        """Those of the ID token, and where these lack what gives roles, of the userinfo endpoint."""
        options = {
            "iss": {"essential": True, "value": self._issuer_of(client)},
            "aud": {"essential": True, "value": self._settings.oidc_client_id},
        }
        token = await client.authorize_access_token(request, claims_options=options)
        claims = dict(token.get("userinfo") or {})
        if not claims:
            raise RefusalError("unauthorized", "the provider sent no ID token; `openid` must be among oidc_scopes")
        wanted = self._settings.oidc_claim.partition(".")[0]
        if "userinfo_endpoint" in client.server_metadata and (wanted not in claims or "email" not in claims):
            told = dict(await client.userinfo(token=token))
            if told.get("sub") != claims["sub"]:
                raise RefusalError("unauthorized", "the provider answered about somebody else; begin again")
            claims = {**told, **claims}
        return claims

    def _known(self, claims: Mapping[str, Any], goes_to: str) -> SignedIn:
        """Raises RefusalError for who may not come in."""
        domains = {one.lower().lstrip("@") for one in self._settings.oidc_domains}
        email = str(claims.get("email") or "")
        if domains and (claims.get("email_verified") is not True or email.rpartition("@")[2].lower() not in domains):
            raise RefusalError(
                "forbidden", f"a verified mail address in {', '.join(sorted(domains))} is needed to sign in here"
            )
        values = values_of_claim(claims, self._settings.oidc_claim) or set()
        named = (str(claims.get(one) or "").strip() for one in ("preferred_username", "email", "name", "sub"))
        name = next((one for one in named if one and why_no_name(one) is None), str(claims["sub"])[:128])
        return SignedIn(
            issuer=self.issuer, subject=str(claims["sub"])[:256], name=name, roles=roles_given(self._mapping, values),
            goes_to=goes_to,
        )  # fmt: skip

    async def _client(self) -> StarletteOAuth2App:
        """Knows the provider's addresses. Raises RefusalError where they cannot be read."""
        if "_loaded_at" in self._kept.server_metadata:
            return self._kept
        client = self._new_client()
        try:
            metadata = await client.load_server_metadata()
            if str(metadata.get("issuer", "")).rstrip("/") != self.issuer:
                raise ValueError(f"it says that it is {metadata.get('issuer')!r}")
        except (httpx2.HTTPError, RuntimeError, ValueError) as error:
            raise self._out_of_reach(error) from error
        offered = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
        metadata["id_token_signing_alg_values_supported"] = [one for one in offered if one.startswith(_ASYMMETRIC)]
        self._kept = client
        return client

    def _new_client(self) -> StarletteOAuth2App:
        made: StarletteOAuth2App = OAuth().register(
            "oidc", client_id=self._settings.oidc_client_id, client_secret=self._secret,
            server_metadata_url=f"{self.issuer}/.well-known/openid-configuration",
            client_kwargs={
                "scope": self._settings.oidc_scopes, "code_challenge_method": "S256", "timeout": _TIMEOUT_S,
                "follow_redirects": False,
            },
        )  # fmt: skip
        return made

    @staticmethod
    def _issuer_of(client: StarletteOAuth2App) -> str:
        return str(client.server_metadata["issuer"])  # as it writes itself, with or without a slash at the end

    def _out_of_reach(self, error: Exception) -> RefusalError:
        log.warning(
            "the OpenID provider %s does not answer as it should: %s: %s", self.issuer, type(error).__name__, error
        )
        return RefusalError(
            "provider_unreachable",
            f"{self.name} does not answer; try again later, or log in with a name and password. The server's log has the cause.",
        )


def _secret(settings: Settings) -> str | None:
    """Raises ConfigError. None: a public client, which PKCE alone protects."""
    if settings.oidc_client_secret_file is None:
        return settings.oidc_client_secret
    try:
        return settings.oidc_client_secret_file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"oidc_client_secret_file {settings.oidc_client_secret_file} cannot be read: {error}"
        ) from error
