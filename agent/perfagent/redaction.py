"""What must not leave the process: secrets in arguments, configuration, log lines and tracebacks.

Two nets: by key (what is called password, token, api_key ... loses its value) and by value (what looks like a key of a known
service, a JWT, a PEM block, a password in an address). Everything that an event carries goes through `redacted`, in one place
(sender.py), on the sender thread; it also makes the data encodable: no lone surrogates, no integers beyond 64 bits, no objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["HIDDEN", "redacted", "redacted_arguments", "redacted_text", "secret_key"]

HIDDEN = "[redacted]"
MAX_TEXT = 20_000
MAX_ITEMS = 2_000
MAX_DEPTH = 12

# The names are those of Logfire's default scrubbing patterns, with "token" read as a word of its own: tokenizer, max_tokens
# and tokens_per_batch are ordinary settings of a training run.
_KEY = re.compile(
    r"passw(?:or)?d|passphrase|passwd|(?<![a-z])pwd(?![a-z])|mysql_pwd|secret|credential|private[._ -]?key|api[._ -]?key|apikey"
    r"|access[._ -]?key|authoriz|auth(?!or|enticated)|(?<![a-z])cookie|session[._ -]?(?:id|key|token)|(?<![a-z])[cx]srf"
    r"|(?<![a-z])jwt(?![a-z])|(?<![a-z])ssn(?![a-z])|social[._ -]?security|credit[._ -]?card|webhook[._ -]?url"
    r"|(?<![a-z])dsn(?![a-z])"
    r"|(?:^|[^a-z])(?:\w*[._ -])?token$"
    r"|(?:access|refresh|bearer|auth|hf|hub|id|bot|github|gitlab|wandb|api|session|security)[._ -]?tokens?$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(
    r"(?:pad|eos|bos|unk|mask|sep|cls|image|special|stop|start|end|decoder_start)[._-]?token(?:_id)?s?$", re.IGNORECASE
)

_VALUES = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",  # JWT
            r"\bhf_[A-Za-z0-9]{16,}",
            r"\bsk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic
            r"\b(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}",  # Stripe
            r"\b(?:AKIA|ASIA|AIDA|AROA)[A-Z0-9]{16}\b",
            r"\bgh[pousr]_[A-Za-z0-9]{20,}",
            r"\bgithub_pat_[A-Za-z0-9_]{20,}",
            r"\bglpat-[A-Za-z0-9_-]{16,}",
            r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
            r"\bAIza[A-Za-z0-9_-]{30,}",
            r"\bya29\.[A-Za-z0-9_-]{20,}",
            r"\bnpm_[A-Za-z0-9]{30,}",
            r"\bpypi-[A-Za-z0-9_-]{30,}",
            r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
            r"\bdop_v1_[a-f0-9]{32,}",
            r"\bpfa_[a-z]+_[A-Za-z0-9]{6,}_[A-Za-z0-9]{20,}",  # our own
            r"\bwhsec_[A-Za-z0-9+/=_-]{16,}",
            r"\blocal-[a-f0-9]{40}\b|\bwandb_v1_[A-Za-z0-9_]{20,}",
            r"https://hooks\.slack\.com/services/[A-Za-z0-9/_-]+",
            r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_-]+",
        )
    ),
    re.DOTALL,
)
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_USERINFO = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^\s/@:'\"]*):(?P<password>[^\s/@'\"]+)@")
_HEADER = re.compile(
    r"(?P<name>(?:proxy-)?authorization|x-api-key|set-cookie|cookie)(?P<gap>['\"]?\s*[:=]\s*['\"]?)(?P<value>[^\n'\"]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?P<kind>bearer|basic)(?P<gap>\s+)[A-Za-z0-9+/=._~-]{12,}", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_.-]{0,60})(?P<gap>['\"]?\s*(?:=|:)\s*)(?P<value>'[^'\n]*'|\"[^\"\n]*\"|[^\s,;&'\")}\]]+)"
)
_QUERY = re.compile(
    r"(?P<lead>[?&](?:sig|signature|key|token|code|X-Amz-Signature|X-Amz-Credential|X-Goog-Signature)=)[^&\s'\"]+", re.IGNORECASE
)


def secret_key(key: str) -> bool:
    """Whether what stands under this name is a secret by its name."""
    return _KEY.search(key) is not None and _NOT_SECRET.search(key) is None


def redacted_text(text: str) -> str:
    """Text without what looks like a secret, by its value or by the name that it is assigned to."""
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    if "\0" in text:
        text = text.replace("\0", "�")
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n[... {len(text) - MAX_TEXT} characters left out ...]\n{text[-MAX_TEXT // 2 :]}"
    if len(text) < 6:
        return text
    text = _VALUES.sub(HIDDEN, text)
    if "://" in text:
        text = _USERINFO.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
        text = _QUERY.sub(rf"\g<lead>{HIDDEN}", text)
    if ":" in text or "=" in text:
        text = _HEADER.sub(rf"\g<name>\g<gap>{HIDDEN}", text)
        text = _ASSIGNMENT.sub(_hide_assignment, text)
    return _BEARER.sub(rf"\g<kind>\g<gap>{HIDDEN}", text)


def _hide_assignment(match: re.Match[str]) -> str:
    if match["value"].startswith("//") or HIDDEN in match["value"] or not secret_key(match["name"]):
        return match[0]
    return f"{match['name']}{match['gap']}{HIDDEN}"


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without secrets: `--api-key=X` and `--api-key X` by name, long random words by their entropy."""
    result: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next and not _OPTION.fullmatch(argument):
            result.append(HIDDEN)
            hide_next = False
            continue
        hide_next = False
        name, equals, value = argument.partition("=")
        if _OPTION.fullmatch(name) and secret_key(name.lstrip("-")):
            result.append(f"{name}={HIDDEN}" if equals else name)
            hide_next = not equals
        elif equals and (secret_key(name) or _random_looking(value)):
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(HIDDEN if _random_looking(argument) else redacted_text(argument))
    return result


def _random_looking(word: str) -> bool:
    """A word that a random generator made: long, of three kinds of characters, with the entropy of base-62."""
    if not 24 <= len(word) <= 200 or not re.fullmatch(r"[A-Za-z0-9+/_=-]+", word) or ("/" in word[1:-1] and "." in word):
        return False
    kinds = sum(re.search(kind, word) is not None for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    if kinds < 3 or word.count("/") > 2 or word.count("-") + word.count("_") > 4:
        return False
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in (word.count(c) for c in set(word)))
    return entropy >= 4.0


def redacted(value: Any, *, depth: int = 0) -> Any:
    """The same structure without secrets and without anything that MessagePack cannot carry; large ones are shortened."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else str(value)[:100]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return redacted_text(value)
    if depth >= MAX_DEPTH:
        return f"[{type(value).__name__}]"
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in value.items():
            if len(result) >= MAX_ITEMS:
                result["..."] = f"{len(value) - MAX_ITEMS} more"
                break
            name = redacted_text(key if isinstance(key, str) else str(key))[:256]
            if isinstance(key, str) and secret_key(key) and item is not None and not isinstance(item, bool):
                result[name] = HIDDEN
            elif name in ("command", "argv") and isinstance(item, (list, tuple)):
                result[name] = redacted_arguments(str(word) for word in item)
            else:
                result[name] = redacted(item, depth=depth + 1)
        return result
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [redacted(item, depth=depth + 1) for item, _ in zip(value, range(MAX_ITEMS), strict=False)]
        return [*items, f"{len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else items
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"[{len(value)} bytes]"
    try:
        return redacted_text(str(value)[:2000])
    except Exception:  # noqa: BLE001 - somebody else's __str__
        return f"[{type(value).__name__}]"
