"""Secrets by name: what is called password, token or api_key loses its value, whatever that looks like."""

from __future__ import annotations

import functools
import math
import re

__all__ = ["HIDDEN", "WORDS", "may_stay", "random_looking", "secret_key", "weak_key"]

HIDDEN = "[redacted]"

# The names are those of Logfire's default scrubbing patterns and of the services that training jobs talk to, with "token" read
# as a word of its own: tokenizer, max_tokens and tokens_per_batch are ordinary settings of a training run.
_KEY = re.compile(
    r"passw(?:or)?d|passphrase|(?<![a-z])pwd(?![a-z])|mysql_pwd|secret|credential|apikey|connection[._ -]?string|conn[._-]?str"
    r"|(?:private|api|access|account|shared|signing|encryption|master|ssh|service|deploy|subscription|storage|consumer|license"
    r"|openai|anthropic|wandb|hf|huggingface|comet|neptune|clearml|swanlab|kaggle|azure|aws|gcp|google|datadog|sentry|slack"
    r"|stripe|twilio|sendgrid|pinecone|cohere|mistral|replicate|telegram)[._ -]?key"
    r"|authoriz|auth(?!or|enticated)|(?<![a-z])cookie|session[._ -]?(?:id|key|token)|(?<![a-z])[cx]srf|(?<![a-z])jwt(?![a-z])"
    r"|(?<![a-z])(?:ssn|dsn|otp)(?![a-z])|social[._ -]?security|credit[._ -]?card|webhook[._ -]?url"
    r"|mnemonic|seed[._ -]?phrase|(?:github|gitlab|azure|devops|databricks)[._-]pat$"
    r"|(?:^|[^a-z])(?:\w*[._ -])?token$"
    r"|(?:access|refresh|bearer|auth|hf|hub|id|bot|github|gitlab|wandb|api|session|security)[._ -]?tokens?$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(
    r"(?:pad|eos|bos|unk|mask|sep|cls|image|special|stop|start|end|decoder_start)[._-]?token(?:_id)?s?$", re.IGNORECASE
)
_WEAK = re.compile(r"(?:^|[._\s-])(?:key|tokens?|pass|pw|creds?|pat|code|sig|signature|salt|nonce|value)$|[a-z]Key$")
_EVEN_NUMBERS = re.compile(r"passw|passphrase|pwd|secret|(?<![a-z])(?:pin|otp|ssn)(?![a-z])|credit", re.IGNORECASE)
_SAYS_NOTHING = frozenset(("none", "null", "true", "false", "yes", "no", "on", "off", ""))
WORDS = (
    "passw", "passphrase", "pwd", "secret", "credential", "key", "auth", "cookie", "session", "srf", "jwt", "ssn", "security",
    "card", "webhook", "dsn", "otp", "mnemonic", "phrase", "token", "conn", "pat", "bearer", "basic", "code", "sig", "salt",
    "nonce",
)  # fmt: skip
"""In lower case; a name that holds none of these is no secret. (A quick look: most lines of output hold none.)"""


@functools.lru_cache(maxsize=4096)
def secret_key(key: str) -> bool:
    """Whether what stands under this name is a secret by its name."""
    return _KEY.search(key) is not None and _NOT_SECRET.search(key) is None


@functools.lru_cache(maxsize=4096)
def weak_key(key: str) -> bool:
    """Whether what stands under this name may be a secret: it is one if it looks like a random word."""
    return _WEAK.search(key) is not None


def may_stay(key: str, value: str) -> bool:
    """Whether a value under a secret name tells nothing: a switch or, except for passwords, a number (`max_token=5`)."""
    if value.lower() in _SAYS_NOTHING:
        return True
    return len(value) <= 12 and _is_number(value) and _EVEN_NUMBERS.search(key) is None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_WORD = re.compile(r"[A-Za-z0-9+/_~.=-]{20,200}")
_CHANGE = re.compile(r"[a-z](?=[A-Z0-9])|[0-9](?=[A-Za-z])|[A-Z](?=[0-9])")


def random_looking(word: str) -> bool:
    """A word that a random generator made: long, of three kinds of characters that change often, with the entropy of base 62.

    Names of models and files (DeepSeek-R1-Distill-Qwen-32B), paths, hexadecimal hashes and UUIDs are not.
    """
    if not _WORD.fullmatch(word) or word.count("/") > 2 or word.count("-") + word.count("_") + word.count(".") > 4:
        return False
    if sum(re.search(kind, word) is not None for kind in ("[a-z]", "[A-Z]", "[0-9]")) < 3:
        return False
    if len(_CHANGE.findall(word)) < 0.2 * len(word):
        return False
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in (word.count(c) for c in set(word)))
    return entropy >= 3.7
