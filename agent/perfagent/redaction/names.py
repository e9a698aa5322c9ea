"""Removes secrets by name: what is called password, token or api_key loses its value, whatever that looks like."""

from __future__ import annotations

import contextlib
import functools
import math
import re

__all__ = [
    "HEX", "HIDDEN", "WORDS", "compiled", "may_stay", "noted", "random_looking", "secret_key", "stands_for", "weak_key",
]  # fmt: skip

HIDDEN = "[redacted]"

# The names are those of Logfire's default scrubbing patterns and of the services that training jobs talk to, with
# "token" read as a word of its own: tokenizer, max_tokens and tokens_per_batch are ordinary settings of a training run.
# Each kind has a piece that is in every such name, in lower case: together they take 4 ms to compile, and most runs
# meet few of them.
_KINDS = {
    "passw": r"passw(?:or)?d|passwort",
    "passe": r"mot[._ -]?de[._ -]?passe",
    "contrase": r"contrase[nñ]a",
    "pass": r"(?:^|[._ -])pass$|(?-i:[a-z]Pass)$"
    r"|(?:^|[._-])(?:db|my|user|ftp|smtp|imap|mail|root|admin|sudo|mysql|pg|http|proxy|ssh|vpn|ldap|redis|mongo)pass$",
    "pw": r"(?:^|[._ -])(?:db|root|user|admin|my|sudo)?pw$",
    "licen": r"licen[sc]e[._ -]?(?:key|code)",
    "conn": r"connection[._ -]?string|conn[._-]?str",
    "key": r"apikey|(?:private|api|access|admin|account|shared|signing|encryption|master|ssh|service|deploy|subscription"
    r"|storage|consumer|openai|anthropic|wandb|hf|huggingface|comet|neptune|clearml|swanlab|kaggle|azure|aws|gcp|google|datadog"
    r"|sentry|slack|stripe|twilio|sendgrid|pinecone|cohere|mistral|replicate|telegram|pagerduty|integration)[._ -]?key",
    "x-": r"^x-[a-z-]{0,60}(?:key|token)$",
    "auth": r"authoriz|auth(?!or|enticated)",
    "cookie": r"(?<![a-z])cookie",
    "session": r"session[._ -]?(?:id|key|token)",
    "security": r"social[._ -]?security",
    "card": r"credit[._ -]?card",
    "webhook": r"webhook[._ -]?url",
    "phrase": r"seed[._ -]?phrase",
    "pat": r"(?:github|gitlab|azure|devops|databricks|(?<![a-z])ext)[._-]pat$",
    **{word: word for word in ("passphrase", "passcode", "secret", "credential", "mnemonic")},
    **{word: word for word in ("密码", "口令", "密钥", "令牌", "パスワード", "비밀번호", "парол")},
    **{word: rf"(?<![a-z]){word}(?![a-z])" for word in ("bearer", "csrf", "xsrf", "jwt", "ssn", "dsn", "otp", "pwd")},
    "token": r"(?:^|[^a-z])(?:\w*[._ -])?token$"
    r"|(?:access|refresh|bearer|auth|hf|hub|id|bot|github|gitlab|wandb|api|session|security)[._ -]?tokens?$",
}
# What is a pass of a training run and not a password: a sweep over data or over a graph, a filter; pw is a pointwise
# convolution.
_PASSES = (
    r"forward|backward|fwd|bwd|first|second|third|last|final|next|prev|previous|one|two|three|single|double|multi|max|min|num|n|per"
    r"|each|every|this|the|a|train|training|eval|evaluation|val|validation|warmup|pre|post|joint|custom|fusion|aten|grad|graph|fx"
    r"|compile|compiler|optimization|inductor|quant|sample|decode|prefill|inner|outer|full|low|high|band|all|by|whole|entire"
    r"|\d+|\d*(?:1st|2nd|3rd|\dth)"
)
# Those of a tokenizer or a model: what a loop that generates text prints, and learned vectors.
_TOKENS = (
    r"pad|eos|bos|unk|mask|sep|cls|image|special|stop|start|end|decoder_start|next|first|last|prev|previous|current|predicted|pred"
    r"|generated|sampled|target|class|dist|register|prompt|query|latent|visual|vision|reg|learnable|padding"
)
_ORDINARY = (
    rf"(?:^|[^a-z])(?:{_TOKENS})[._ -]?token(?:_id)?s?$|(?:error|exception|warning|loss|dataset|ratio|length)s?$"
    rf"|(?:^|[^a-z0-9]|(?-i:(?<=[a-z])(?=[A-Z])))(?:{_PASSES})[._ -]?pass$|(?:conv|bn|dw)\d*[._-]pw$"
)
_WEAK = r"(?i:(?:^|[._\s-])(?:key|tokens?|creds?|pat|code|sig|signature|salt|nonce|value)$)|[a-z]Key$"
_SAID_OF_A_SWEEP = (
    r"(?i)[\d.,:/]+(?:%|x|[mnu]?s|min|h)?|ok|done|pass(?:ed)?|fail(?:ed)?|skip(?:ped)?|started|finished|completed?"
)
_EVEN_NUMBERS = r"passw|passphrase|passcode|pwd|secret|(?<![a-z])(?:pin|otp|ssn)(?![a-z])|credit"
_PLACEHOLDER = r"<[^<>\s]{1,60}>|\[[A-Z]{3,8}\d*\]"
"""`<|endoftext|>`, `[CLS]`; and `<HUB_TOKEN>`, which stands in the place of one."""
_SAYS_NOTHING = frozenset((
    "none", "null", "true", "false", "yes", "no", "on", "off", "", "disabled", "enabled", "required", "optional", "missing",
    "invalid", "unset",
))  # fmt: skip
HEX = r"[0-9a-fA-F]{32,}"
"""A classic key of W&B, or a commit, or a checksum: its surroundings tell which."""
_KNOWN_LICENCES = (
    r"apache|mit\b|mit-|bsd|[al]?gpl|cc\d?-|mpl|epl|isc|zlib|openrail|bigscience|creativeml|llama|gemma|odc|afl|artistic|boost|bsl"
    r"|ecl|eupl|ms-?pl|ncsa|ofl|osl|postgresql|psf|python|unlicense|wtfpl|deepseek|qwen|nvidia|intel|etalab|c-uda|cdla|gfdl|lppl"
    r"|version|v?\d{1,2}\."
)
_BY_FORM = {
    r"(?:^|[._\s-])(?:wandb|weights[._-]and[._-]biases)$": HEX,
    # of eight characters and more with a digit among them, and no name of a licence (`Apache-2.0`), path or server
    r"(?:^|[._\s-])licen[sc]e$": rf"(?!(?i:{_KNOWN_LICENCES}))(?=\D*\d)[\w+=.-]{{8,}}",
    # not the names of a user in a cloud or in Kubernetes, not a group of this machine (`--user root:root`), not an
    # address or a path
    r"(?:^|[._\s-])(?:user(?:[._-]?(?:name|pwd))?|login)$": r"(?P<kept>(?!(?:arn|urn|system|file|https?):)[A-Za-z][\w.+@-]*:)"
    r"(?!\d+$|[\\/]|(?:root|nogroup|users|staff|wheel|docker)$)\S{3,}",
    r"(?:^|[._\s-])(?:https?|all|ftp)?prox(?:y|ies)(?:[._-](?:url|server|address|host))?$": r"(?P<kept>[^\s:/@]*:)(?!//)[^\s]+"
    r"(?P<behind>@[\w.\[\]:-]+/?)",
}
"""Name -> the form of a secret under it; what such a name holds else may stay."""
_NOTED = "|".join(_BY_FORM)
WORDS = (
    *_KINDS, "basic", "code", "sig", "salt", "nonce", "user", "login", "prox", "wandb", "biases",
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
    found = any(
        compiled(kind, re.IGNORECASE).search(key) for piece, kind in _KINDS.items() if piece in lower or not plain
    )
    return found and compiled(_ORDINARY, re.IGNORECASE).search(key) is None


@functools.lru_cache(maxsize=4096)
def weak_key(key: str) -> bool:
    """Whether what stands under this name may be a secret: it is one if it looks like a random word."""
    return compiled(_WEAK).search(key) is not None


@functools.lru_cache(maxsize=4096)
def noted(key: str) -> bool:
    """Whether what stands under this name may have to be hidden, or a part of it."""
    return secret_key(key) or weak_key(key) or compiled(_NOTED, re.IGNORECASE).search(key) is not None


def stands_for(key: str, value: str) -> str | None:
    """Replacement for a value under this name; None where it may stay."""
    if secret_key(key):
        return None if may_stay(key, value) else HIDDEN
    if weak_key(key) and random_looking(value):
        return HIDDEN
    for names, form in _BY_FORM.items():
        if compiled(names, re.IGNORECASE).search(key):
            match = compiled(form).fullmatch(value) if HIDDEN not in value else None
            return (
                f"{match.groupdict().get('kept', '')}{HIDDEN}{match.groupdict().get('behind', '')}" if match else None
            )
    return None


def may_stay(key: str, value: str) -> bool:
    """Whether a value under a secret name gives nothing away: a switch or, except for passwords, a number
    (`max_token=5`)."""
    if value.lower() in _SAYS_NOTHING:
        return True
    if value.startswith(("/", "~")) and key.lower() in ("pwd", "oldpwd"):  # of a shell
        return True
    if _is_number(value) or (value[0] in "<[" and compiled(_PLACEHOLDER).fullmatch(value)):
        return compiled(_EVEN_NUMBERS, re.IGNORECASE).search(key) is None
    if len(value) > 12:
        return False
    return key.lower().endswith("pass") and compiled(_SAID_OF_A_SWEEP).fullmatch(value) is not None


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return len(text) <= 12 and float(text.rstrip("% ")) is not None
    return False


_WORD = r"[A-Za-z0-9+/_~.=-]{20,200}"
_CHANGE = r"[a-z](?=[A-Z0-9])|[0-9](?=[A-Za-z])|[A-Z](?=[0-9])"


def random_looking(word: str) -> bool:
    """A word that a random generator made: long, of three kinds of characters that change often, with the entropy of
    base 62.

    Names of models and files (DeepSeek-R1-Distill-Qwen-32B), paths, hexadecimal hashes and UUIDs are not.
    """
    if not compiled(_WORD).fullmatch(word) or word.count("/") > 2 or sum(map(word.count, "-_.")) > 4:
        return False
    if sum(re.search(kind, word) is not None for kind in ("[a-z]", "[A-Z]", "[0-9]")) < 3:
        return False
    if len(compiled(_CHANGE).findall(word)) < 0.2 * len(word):
        return False
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in (word.count(c) for c in set(word)))
    return entropy >= 3.7
