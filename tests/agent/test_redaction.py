from __future__ import annotations

import math
import zlib
from pathlib import Path

import pytest

from perfagent.config import AgentConfig
from perfagent.delivery.segments import records
from perfagent.delivery.sender import Sender
from perfagent.delivery.transport import RecordingTransport
from perfagent.identity import Identity
from perfagent.redaction import HIDDEN, redacted, redacted_arguments, redacted_text, secret_key

# What a value of each kind looks like; none of them was ever valid. Parts are joined here so that no scanner stumbles over them.
CANARIES = {
    "hf": "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "openai": "sk-" + "proj-abcdefghijklmnop0123456789ABCDEFGHIJ",
    "anthropic": "sk-ant-" + "api03-abcdefghijklmnop0123456789",
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "github": "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat": "github_pat_" + "11ABCDEFG0abcdefghij_0123456789abcdef",
    "gitlab": "glpat-" + "abcdefghij0123456789",
    "slack": "xoxb-" + "123456789012-abcdefghijklmnop",
    "google": "AIza" + "SyA0123456789abcdefghijklmnopqrstuv",
    "stripe": "sk_live_" + "0123456789abcdefghij",
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "pem": "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEowIBAAKCAQEA0000\n-----END RSA PRIVATE KEY-----",
    "perfagent": "pfa_ingest_" + "abcd1234_0123456789abcdefghijABCDEFGHIJ0123456789abc",
    "webhook": "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "wandb": "local-" + "0123456789abcdef0123456789abcdef01234567",
    "npm": "npm_" + "abcdefghijklmnopqrstuvwxyz0123456789",
    "slack_hook": "https://hooks.slack.com/services/" + "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "sendgrid": "SG." + "abcdefghijklmnopqrst.abcdefghijklmnopqrstuvwxyz0123456789",
}
BY_KEY = [
    "password",
    "db_password",
    "API_KEY",
    "apiKey",
    "wandb_api_key",
    "HF_TOKEN",
    "access_token",
    "client_secret",
    "AWS_SECRET_ACCESS_KEY",
    "auth",
    "Authorization",
    "cookie",
    "session_id",
    "private_key",
    "credentials",
    "passwd",
    "pwd",
    "token",
    "github_token",
    "webhook_url",
    "dsn",
    "jwt",
]
ORDINARY = [
    "tokenizer",
    "max_tokens",
    "tokens_per_batch",
    "num_tokens",
    "pad_token",
    "eos_token_id",
    "author",
    "keyboard",
    "monkey",
    "token_ids",
    "authors",
    "hidden_size",
    "special_tokens",
    "batch_size",
    "sessions",
    "passes",
    "max_new_tokens",
    "compass",
]


@pytest.mark.fault
@pytest.mark.parametrize("kind", CANARIES)
def test_x10_a_value_that_looks_like_a_secret_is_hidden_wherever_it_stands(kind: str) -> None:
    canary = CANARIES[kind]
    for text in (canary, f"using {canary} now", f"value={canary}", f'{{"x": "{canary}"}}'):
        assert canary not in redacted_text(text), text
        assert HIDDEN in redacted_text(text)
    assert canary not in str(redacted({"nested": [{"deep": (canary,)}]}))
    assert canary not in " ".join(redacted_arguments(["train.py", f"--thing={canary}", canary]))


@pytest.mark.fault
@pytest.mark.parametrize("key", BY_KEY)
def test_x10_what_is_called_a_secret_is_hidden_whatever_it_looks_like(key: str) -> None:
    assert redacted({key: "plainword"}) == {key: HIDDEN}
    assert "plainword" not in redacted_text(f"{key}=plainword")
    assert "plainword" not in redacted_text(f"'{key}': 'plainword'")
    assert "plainword" not in " ".join(redacted_arguments([f"--{key}=plainword", "x"]))
    assert redacted_arguments([f"--{key}", "plainword", "--lr", "1"]) == [f"--{key}", HIDDEN, "--lr", "1"]


@pytest.mark.parametrize("key", ORDINARY)
def test_ordinary_settings_of_a_training_run_stay(key: str) -> None:
    assert not secret_key(key)
    assert redacted({key: 4096}) == {key: 4096}


@pytest.mark.parametrize(
    "text",
    [
        "step 10: loss=0.5, lr=1e-3",
        "tokens: 4096",
        "Epoch 1/3:  50%|###  | 5/10 [00:01<00:01, 4.2it/s]",
        "https://example.org/a?b=c",
        "checkpoint saved to /data/runs/2024-01-01_gpt2-medium/step_1000.pt",
        "eos_token=</s>",
        "tokenizer: gpt2",
    ],
)
def test_ordinary_output_stays(text: str) -> None:
    assert redacted_text(text) == text


@pytest.mark.parametrize(
    "word",
    [
        "train.py",
        "/data/checkpoints/llama-7b-hf/model-00001-of-00002.safetensors",
        "--learning-rate=0.0003",
        "bert-base-uncased-finetuned-mrpc-2024",
        "configs/experiment_baseline_large_v2.yaml",
        "meta-llama/Llama-2-7b-chat-hf",
    ],
)
def test_ordinary_arguments_stay(word: str) -> None:
    assert redacted_arguments([word]) == [word]


@pytest.mark.fault
def test_x10_passwords_in_addresses_and_headers_are_hidden() -> None:
    assert redacted_text("postgresql://me:hunter2@db:5432/x") == f"postgresql://me:{HIDDEN}@db:5432/x"
    assert "abcdef" not in redacted_text("Authorization: Basic abcdef1234567890")
    assert "c2lnbmF0dXJl" not in redacted_text("https://bucket.s3.example/x?X-Amz-Signature=c2lnbmF0dXJl&y=1")
    assert "aGVsbG8gd29ybGQhISE" not in redacted_text("curl -H 'bearer aGVsbG8gd29ybGQhISE'")


@pytest.mark.fault
def test_x10_a_long_random_argument_is_hidden_by_its_entropy() -> None:
    word = "q7Zp2Xv9Lm4Rt8Wk3Ny6Bc1Hd5Gf0Js"
    assert redacted_arguments(["train.py", word, f"--thing={word}"]) == ["train.py", HIDDEN, f"--thing={HIDDEN}"]


def test_anything_becomes_encodable() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError

    given = {
        "big": 2**70,
        "nan": math.nan,
        "bytes": b"123",
        "set": {1},
        5: "five",
        "lone": "\ud800x",
        "odd": Odd(),
        "nul": "a\0b",
    }
    found = redacted(given)
    assert found["big"] == str(2**70)
    assert math.isnan(found["nan"])
    assert (found["bytes"], found["set"], found["5"], found["lone"], found["odd"]) == ("[3 bytes]", [1], "five", "?x", "[Odd]")
    assert "\0" not in found["nul"]
    deep: dict[str, object] = {}
    inner = deep
    for _ in range(100):
        inner["x"] = {}
        inner = inner["x"]  # type: ignore[assignment]
    assert len(str(redacted(deep))) < 200
    assert len(redacted("x" * 100_000)) < 21_000
    assert len(redacted(list(range(100_000)))) == 2001


@pytest.mark.fault
def test_x10_no_planted_secret_reaches_the_spool_or_the_wire(tmp_path: Path) -> None:
    transport = RecordingTransport()
    settings = AgentConfig(state_dir=tmp_path, record=tmp_path / "record")
    recorded = Sender(settings, Identity(project="p", run="r", attempt=1))
    sent = Sender(AgentConfig(state_dir=tmp_path), Identity(project="p", run="r", attempt=1), transport=transport)
    planted = list(CANARIES.values())
    for sender in (recorded, sent):
        sender.start()
        sender.event("state", {"state": "starting", "config": dict(CANARIES), "command": ["train.py", *planted]})
        sender.event("log", {"lines": [f"loaded {word}" for word in planted], "stream": "stdout"})
        sender.event("alert", {"title": "x", "text": "\n".join(planted)})
        sender.close("failed", f"ValueError: {planted[0]}", traceback="\n".join(planted))
    written = b"".join(path.read_bytes() for path in (tmp_path / "record").rglob("*") if path.is_file())
    for path in (tmp_path / "record").rglob("*.frames"):
        written += b"".join(zlib.decompress(payload) for _, kind, payload in records(path.read_bytes()) if kind == b"F")
    everything = written.decode("utf-8", "replace") + repr(transport.frames)
    assert HIDDEN in everything
    for word in planted:
        assert word not in everything
        assert word.replace("\n", "\\n") not in everything
