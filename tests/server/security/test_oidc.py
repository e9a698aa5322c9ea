"""Signing in at an OpenID provider that runs beside the tests, and everything about it that must be refused."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from api_builders import ADMIN, api
from builders import free_port
from clocks import Clock
from fastapi.testclient import TestClient
from openid_provider import Provider, openid_provider

from perfagent.errors import ConfigError
from perfagent_server.security.role_mapping import parse_mapping, roles_given, values_of_claim

pytestmark = pytest.mark.real
ADA: dict[str, Any] = {
    "preferred_username": "ada", "email": "ada@example.org", "email_verified": True, "groups": ["ml-admins", "others"],
}  # fmt: skip
BOB: dict[str, Any] = {"email": "bob@example.org", "email_verified": True, "groups": ["team-a"]}
EVE: dict[str, Any] = {"email": "eve@example.org", "email_verified": False, "groups": ["others"]}
ROLES = ("ml-admins=admin", "team-a=operator:project-a", "team-a=viewer:project-b")


@contextlib.contextmanager
def signing_in(folder: Path, provider: Provider | None, **changes: Any) -> Iterator[TestClient]:
    issuer = provider.issuer if provider else f"http://127.0.0.1:{free_port()}"
    settings = {
        "oidc_issuer": issuer, "oidc_client_id": "perfagent", "oidc_client_secret": "of-the-tests", "oidc_roles": ROLES,
        "oidc_name": "Example SSO", "auth": "required",
    }  # fmt: skip
    with api(folder, **{**settings, **changes}) as client:
        yield client


@pytest.fixture
def provider() -> Iterator[Provider]:
    with openid_provider(ada=ADA, bob=BOB, eve=EVE) as running:
        yield running


def begin(client: TestClient, goes_to: str = "/") -> str:
    """The address at the provider to which the browser is led."""
    answer = client.get("/login/oidc", params={"next": goes_to})
    assert answer.status_code == 302, answer.text
    return str(answer.headers["location"])


def come_back(client: TestClient, address: str) -> Any:
    return client.get(address.removeprefix("http://127.0.0.1:8420"))


def sign_in(client: TestClient, provider: Provider, subject: str) -> Any:
    return come_back(client, provider.approve(begin(client), subject))


def users(client: TestClient) -> dict[str, list[tuple[str | None, str]]]:
    held = dict(client.cookies)
    client.cookies.clear()
    known = client.get("/api/v1/users", headers=ADMIN).json()["users"]
    client.cookies.update(held)
    return {one["name"]: [(role["project"], role["role"]) for role in one["roles"]] for one in known}


def test_a_first_sign_in_makes_a_user_with_the_roles_of_groups(tmp_path: Path, provider: Provider) -> None:
    clock = Clock(time.time())
    with signing_in(tmp_path, provider, clocks={"clock": clock}) as client:
        page = client.get("/login", params={"next": "/runs?x=1"}).text
        assert 'href="/login/oidc?next=/runs%3Fx%3D1"' in page and "Sign in with Example SSO" in page
        answer = sign_in(client, provider, "eve")
        assert answer.status_code == 403 and "none of their groups has a role here" in answer.text
        assert client.get("/api/v1/runs").status_code == 401
        assert users(client) == {}
        answer = come_back(client, provider.approve(begin(client, "/runs?x=1"), "ada"))
        assert (answer.status_code, answer.headers["location"]) == (303, "/runs?x=1")
        who = client.get("/api/v1/session").json()
        assert (who["name"], who["everywhere"]) == ("ada", ["admin", "ingest", "operate", "read"])
        client.cookies.clear()
        assert sign_in(client, provider, "bob").status_code == 303
        projects = client.get("/api/v1/session").json()["projects"]
        assert projects == {"project-a": ["operate", "read"], "project-b": ["read"]}
        bob = [("project-a", "operator"), ("project-b", "viewer")]
        assert users(client) == {"ada": [(None, "admin")], "bob@example.org": bob}
        clock.at += 11.9 * 3600
        assert client.get("/api/v1/runs").status_code == 200
        clock.at += 0.2 * 3600
        assert client.get("/api/v1/runs").status_code == 401, "a session of a provider ends after twelve hours"


def test_the_code_is_bound_to_the_browser(tmp_path: Path, provider: Provider) -> None:
    with signing_in(tmp_path, provider) as client:
        address = begin(client)
        asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert asked["response_type"] == "code" and asked["code_challenge_method"] == "S256"
        assert len(asked["state"]) >= 20 and len(asked["nonce"]) >= 20
        assert asked["redirect_uri"] == "http://127.0.0.1:8420/login/oidc/callback"
        assert come_back(client, provider.approve(address, "ada")).status_code == 303
        (form,) = provider.asked
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == asked["code_challenge"]


def test_roles_follow_the_groups_at_each_sign_in(tmp_path: Path, provider: Provider) -> None:
    with signing_in(tmp_path, provider) as client:
        assert sign_in(client, provider, "bob").status_code == 303
        old = dict(client.cookies)
    for roles, status in ((("team-a=admin",), 303), (("nobody=admin",), 403)):
        with signing_in(tmp_path, provider, oidc_roles=roles) as client:
            assert sign_in(client, provider, "bob").status_code == status
            assert users(client) == {"bob@example.org": [(None, "admin")] if status == 303 else []}
            client.cookies.clear()
            client.cookies.update(old)
            assert client.get("/api/v1/runs").status_code == (200 if status == 303 else 403), (
                "sessions from before, too"
            )


def test_a_disabled_user_stays_out_a_local_one_is_not_taken_over(tmp_path: Path, provider: Provider) -> None:
    with signing_in(tmp_path, provider) as client:
        body = {"name": "Ada", "password": "correct horse battery", "roles": [{"role": "viewer"}]}
        assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
        answer = sign_in(client, provider, "ada")
        assert answer.status_code == 403 and "another user" in answer.text
        assert sign_in(client, provider, "bob").status_code == 303
        client.cookies.clear()
        off = client.patch("/api/v1/users/bob@example.org", json={"disabled": True}, headers=ADMIN)
        assert off.status_code == 200
        assert sign_in(client, provider, "bob").status_code == 403
        given = client.patch("/api/v1/users/bob@example.org", json={"roles": [{"role": "admin"}]}, headers=ADMIN)
        assert (given.status_code, given.json()["error"]["code"]) == (409, "not_possible")
        assert client.post("/login", data={"name": "bob@example.org", "password": ""}).status_code == 401


def test_only_verified_addresses_of_the_allowed_domains_come_in(tmp_path: Path, provider: Provider) -> None:
    with signing_in(tmp_path / "a", provider, oidc_domains=("example.com",)) as client:
        assert sign_in(client, provider, "ada").status_code == 403
    with signing_in(tmp_path / "b", provider, oidc_domains=("Example.org",), oidc_roles=("*=viewer",)) as client:
        assert sign_in(client, provider, "ada").status_code == 303
        client.cookies.clear()
        answer = sign_in(client, provider, "eve")
        assert answer.status_code == 403 and "verified mail address" in answer.text


TAMPERED = ["state", "no state", "cookie", "other browser", "nonce", "code", "used code", "audience", "denied"]


def test_what_is_not_the_answer_to_our_question_is_refused(tmp_path: Path, provider: Provider) -> None:
    with signing_in(tmp_path, provider) as client:
        for tamper in TAMPERED:
            client.cookies.clear()
            question, audience = begin(client), provider.audience
            if tamper == "audience":
                provider.audience = "another-client"
            changed = {"nonce": {"nonce": "of somebody else"}, "audience": {"client_id": provider.audience}}
            back = provider.approve(question, "ada", **changed.get(tamper, {}))
            held = dict(client.cookies)
            if tamper == "state":
                back += "x"
            elif tamper == "no state":
                back = back.partition("&state")[0]
            elif tamper == "cookie":
                client.cookies.clear()
                client.cookies.set("perfagent_oidc", held["perfagent_oidc"][:-2])
            elif tamper == "other browser":
                client.cookies.clear()
                begin(client)
            elif tamper == "code":
                back = back.replace("code=", "code=x")
            elif tamper == "used code":
                assert come_back(client, back).status_code == 303
                client.cookies.clear()
                client.cookies.update(held)
            elif tamper == "denied":
                state = parse_qs(urlsplit(back).query)["state"][0]
                back = f"{back.partition('?')[0]}?error=access_denied&state={state}"
            answer = come_back(client, back)
            assert answer.status_code == 401, (tamper, answer.text)
            assert ("not valid for this server" in answer.text) >= (tamper in ("nonce", "audience")), tamper
            assert "begin again" in answer.text and "Sign in with Example SSO" in answer.text
            assert "perfagent_session" not in answer.headers.get("set-cookie", "")
            assert client.get("/api/v1/runs").status_code == 401, tamper
            provider.audience = audience


def test_a_provider_that_is_down_keeps_nobody_out_otherwise(tmp_path: Path, provider: Provider) -> None:
    with signing_in(tmp_path / "a", None) as client:
        assert client.get("/readyz").status_code == 200
        answer = client.get("/login/oidc")
        assert answer.status_code == 503 and "Example SSO does not answer" in answer.text
        assert "Log in with a key" in answer.text
        assert client.post("/login", data={"token": ADMIN["Authorization"].split()[1]}).status_code == 303
    with signing_in(tmp_path / "b", provider) as client:
        back = provider.approve(begin(client), "ada")
        provider.is_down = True  # on the way
        answer = come_back(client, back)
        assert answer.status_code == 503 and "does not answer" in answer.text
        provider.is_down = False
        assert sign_in(client, provider, "ada").status_code == 303


def test_an_issuer_that_is_another_than_it_says_is_refused(tmp_path: Path, provider: Provider) -> None:
    """A slash at the end makes no other issuer. The secret may lie in a file."""
    file = tmp_path / "secret"
    file.write_text("from-the-file\n")
    changed = {"oidc_client_secret": None, "oidc_client_secret_file": file}
    with signing_in(tmp_path, provider, oidc_issuer=f"{provider.issuer}/", **changed) as client:
        assert sign_in(client, provider, "ada").status_code == 303
    with signing_in(tmp_path / "c", provider, public_url="https://monitor.example.org") as client:
        assert "Secure" in client.get("/login/oidc").headers["set-cookie"], "as the public address is"
    provider.issuer = f"{provider.issuer.replace('127.0.0.1', 'localhost')}/realm"
    with signing_in(tmp_path / "b", provider) as client:
        assert client.get("/login/oidc").status_code == 503


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"oidc_client_id": None}, "oidc_client_id"), ({"oidc_roles": ()}, "oidc_roles"),
        ({"oidc_roles": ("team=owner",)}, "VALUE=ROLE"), ({"oidc_issuer": "example.org"}, "https://"),
        ({"oidc_client_secret_file": Path("/nowhere/secret")}, "cannot be read"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_at_the_start(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said), signing_in(tmp_path, None, **changed):
        pass


def test_values_of_a_claim_give_the_highest_role_of_each_project() -> None:
    mapping = parse_mapping(["a=viewer:p", "b=admin:p", "*=viewer", "x=y=operator:q"])
    assert roles_given(mapping, {"a", "b"}) == [("p", "admin"), (None, "viewer")]
    assert roles_given(mapping, {"x=y"}) == [(None, "viewer"), ("q", "operator")]
    assert values_of_claim({"groups": ["a", 1]}, "groups") == {"a"}
    assert values_of_claim({"hd": "example.org"}, "hd") == {"example.org"}
    assert values_of_claim({"realm_access": {"roles": ["a"]}}, "realm_access.roles") == {"a"}
    assert values_of_claim({}, "groups") is None
