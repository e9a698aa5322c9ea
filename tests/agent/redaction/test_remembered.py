"""What the process is known to hold is hidden where nothing tells that it is a secret."""

from __future__ import annotations

import pytest
from canaries import HEX40

from perfagent.redaction import HIDDEN, redacted, redacted_arguments, redacted_text
from perfagent.redaction.remembered import hide_remembered, learn, learn_environment


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_PASSWORD", "swordfish99"),
        ("WANDB_API_KEY", HEX40),
        ("MY_SERVICE_TOKEN", "plainwordplainword"),
        ("SMTP_PASS", "correct horse battery staple"),
        ("FERNET_KEY", "q7Zp2Xv9Lm4Rt8Wk3Ny6Bc1Hd5Gf0Js"),
        ("DATABASE_URL", "swordfish99"),
    ],
)
def test_x10_a_secret_of_the_environment_is_hidden_anywhere(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert value in redacted_text(f"now {value} came")
    monkeypatch.setenv(
        name, f"postgres://me:{value}@db:5432/x" if "URL" in name else value
    )  # as load_dotenv() does, when the run has begun
    assert redacted({"lines": [f"now {value} came"]}) == {"lines": [f"now {HIDDEN} came"]}
    assert redacted_text(f"RuntimeError: {value}") == f"RuntimeError: {HIDDEN}"
    assert redacted_arguments(["train.py", f"x, {value}", value]) == ["train.py", f"x, {HIDDEN}", HIDDEN]


@pytest.mark.fault
def test_x10_what_was_called_a_secret_is_hidden_from_then_on() -> None:
    redacted({"smtp": {"password": "swordfish99"}})
    redacted_arguments(["train.py", "--api-key", "plainwordplainword", "service.token=anotherlongword1"])
    said = redacted({"traceback": "KeyError: 'swordfish99'\nplainwordplainword anotherlongword1"})
    assert said == {"traceback": f"KeyError: '{HIDDEN}'\n{HIDDEN} {HIDDEN}"}


ORDINARY = [
    ("PASSWORD", "postgres"), ("AUTH_MODE", "oauth2-device"), ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/key1.json"),
    ("SECRET_FILE", "key1.json"), ("SECRET_NAME", "training-cluster-2"), ("AWS_SECRET_REGION", "us-east-1"),
    ("API_KEY_ENV", "OPENAI_API_KEY_2"), ("SECRETS_BACKEND", "vault-of-the-team"), ("TOKEN", "<|endoftext|>"),
    ("TOKEN", "short1"), ("PASSWORD_URL", "https://vault.example.org/v1/x"), ("TOKENIZERS_PARALLELISM", "false-but-long-enough"),
    ("SESSION_ID", "1a2b3c4d5e"), ("CHECKPOINT", "step-1000-of-2000"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ORDINARY)
def test_an_ordinary_word_is_not_remembered(name: str, value: str) -> None:
    learn_environment({name: value})
    assert hide_remembered(f"now {value} came") == f"now {value} came"


def test_of_two_secrets_the_longer_one_is_hidden_whole() -> None:
    learn("password", "swordfish99")
    learn("token", "swordfish99-and-more")
    assert hide_remembered("x swordfish99-and-more y") == f"x {HIDDEN} y"
    redacted({"wandb": {"api_key": HEX40}})
    assert redacted_text(f"commit {HEX40}") == f"commit {HEX40}", "it may be one"
