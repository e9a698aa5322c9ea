"""Secrets by name: what is called password, token or api_key loses its value, whatever that looks like."""

from __future__ import annotations

import functools
import math
import re

__all__ = ["HIDDEN", "WORDS", "compiled", "may_stay", "random_looking", "secret_key", "weak_key"]

HIDDEN = "[redacted]"

# The names are those of Logfire's default scrubbing patterns and of the services that training jobs talk to, with "token" read
# as a word of its own: tokenizer, max_tokens and tokens_per_batch are ordinary settings of a training run. Each kind has a piece
# that is in every such name, in lower case: together they take 4 ms to compile, and most runs meet few of them.
_KINDS = (
    ("passw", r"passw(?:or)?d"),
    ("passphrase", r"passphrase"),
    ("pwd", r"(?<![a-z])pwd(?![a-z])|mysql_pwd"),
    ("secret", r"secret"),
    ("credential", r"credential"),
    ("conn", r"connection[._ -]?string|conn[._-]?str"),
    (
        "key",
        r"apikey|(?:private|api|access|account|shared|signing|encryption|master|ssh|service|deploy|subscription|storage|consumer"
        r"|license|openai|anthropic|wandb|hf|huggingface|comet|neptune|clearml|swanlab|kaggle|azure|aws|gcp|google|datadog"
        r"|sentry|slack|stripe|twilio|sendgrid|pinecone|cohere|mistral|replicate|telegram)[._ -]?key",
    ),
    ("auth", r"authoriz|auth(?!or|enticated)"),
    ("cookie", r"(?<![a-z])cookie"),
    ("session", r"session[._ -]?(?:id|key|token)"),
    ("srf", r"(?<![a-z])[cx]srf"),
    ("jwt", r"(?<![a-z])jwt(?![a-z])"),
    ("ssn", r"(?<![a-z])ssn(?![a-z])"),
    ("dsn", r"(?<![a-z])dsn(?![a-z])"),
    ("otp", r"(?<![a-z])otp(?![a-z])"),
    ("security", r"social[._ -]?security"),
    ("card", r"credit[._ -]?card"),
    ("webhook", r"webhook[._ -]?url"),
    ("mnemonic", r"mnemonic"),
    ("phrase", r"seed[._ -]?phrase"),
    ("pat", r"(?:github|gitlab|azure|devops|databricks)[._-]pat$"),
    (
        "token",
        r"(?:^|[^a-z])(?:\w*[._ -])?token$"
        r"|(?:access|refresh|bearer|auth|hf|hub|id|bot|github|gitlab|wandb|api|session|security)[._ -]?tokens?$",
    ),
)
_ORDINARY = r"(?:pad|eos|bos|unk|mask|sep|cls|image|special|stop|start|end|decoder_start)[._-]?token(?:_id)?s?$"
_WEAK = r"(?:^|[._\s-])(?:key|tokens?|pass|pw|creds?|pat|code|sig|signature|salt|nonce|value)$|[a-z]Key$"
_WEAK_ENDS = (
    "key", "token", "tokens", "pass", "pw", "cred", "creds", "pat", "code", "sig", "signature", "salt", "nonce", "value", "Key",
)  # fmt: skip
_EVEN_NUMBERS = r"passw|passphrase|pwd|secret|(?<![a-z])(?:pin|otp|ssn)(?![a-z])|credit"
_SAYS_NOTHING = frozenset(("none", "null", "true", "false", "yes", "no", "on", "off", ""))
WORDS = (
    "passw", "passphrase", "pwd", "secret", "credential", "key", "auth", "cookie", "session", "srf", "jwt", "ssn", "security",
    "card", "webhook", "dsn", "otp", "mnemonic", "phrase", "token", "conn", "pat", "bearer", "basic", "code", "sig", "salt",
    "nonce",
)  # fmt: skip
"""In lower case; a name that holds none of these is no secret. (A quick look: most lines of output hold none.)"""


@functools.cache
def compiled(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Compiled when it is first needed: all patterns together take as long as the sender's other imports."""
    return re.compile(pattern, flags)


@functools.lru_cache(maxsize=4096)
def secret_key(key: str) -> bool:
    """Whether what stands under this name is a secret by its name."""
    lower = key.lower()
    plain = key.isascii()  # of other letters some are read as these: the Kelvin sign, the long s
    found = any(compiled(kind, re.IGNORECASE).search(key) for piece, kind in _KINDS if piece in lower or not plain)
    return found and compiled(_ORDINARY, re.IGNORECASE).search(key) is None


@functools.lru_cache(maxsize=4096)
def weak_key(key: str) -> bool:
    """Whether what stands under this name may be a secret: it is one if it looks like a random word."""
    return key.removesuffix("\n").endswith(_WEAK_ENDS) and compiled(_WEAK).search(key) is not None


def may_stay(key: str, value: str) -> bool:
    """Whether a value under a secret name tells nothing: a switch or, except for passwords, a number (`max_token=5`)."""
    if value.lower() in _SAYS_NOTHING:
        return True
    return len(value) <= 12 and _is_number(value) and compiled(_EVEN_NUMBERS, re.IGNORECASE).search(key) is None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_WORD = r"[A-Za-z0-9+/_~.=-]{20,200}"
_CHANGE = r"[a-z](?=[A-Z0-9])|[0-9](?=[A-Za-z])|[A-Z](?=[0-9])"


def random_looking(word: str) -> bool:
    """A word that a random generator made: long, of three kinds of characters that change often, with the entropy of base 62.

    Names of models and files (DeepSeek-R1-Distill-Qwen-32B), paths, hexadecimal hashes and UUIDs are not.
    """
    if not 20 <= len(word) <= 200 or word.count("/") > 2 or word.count("-") + word.count("_") + word.count(".") > 4:
        return False
    if not compiled(_WORD).fullmatch(word):
        return False
    if sum(re.search(kind, word) is not None for kind in ("[a-z]", "[A-Z]", "[0-9]")) < 3:
        return False
    if len(compiled(_CHANGE).findall(word)) < 0.2 * len(word):
        return False
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in (word.count(c) for c in set(word)))
    return entropy >= 3.7
