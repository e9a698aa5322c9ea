"""Removes secrets by value: the formats of keys that services give out so that scanners can find them, and private
keys.

Sources: the services' own documentation and the public rule sets of secret scanners (GitHub's partner patterns,
gitleaks). Each kind has a marker, a piece of text that is in every such secret: most lines of output hold none, and no
pattern is tried.
"""

from __future__ import annotations

import re

from perfagent.redaction.names import HIDDEN, compiled

__all__ = ["hide_known"]

SHORTEST = 15
"""Characters of the shortest secret that any of the patterns knows."""
_PRIVATE_KEY = r"[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
_KINDS = {
    # private keys, also when the end, or the beginning, was cut off
    "-----BEGIN": rf"-----BEGIN {_PRIVATE_KEY}.*?(?:-----END {_PRIVATE_KEY}|\Z)",
    "-----END": rf"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]{{1,80}}(?:\s|\\n)+){{0,60}}-----END {_PRIVATE_KEY}",
    # signed tokens; a long one without dots is the JSON of a service such as Neptune
    "eyJ": r"(?:\b[ps]k\.)?\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?|\beyJ[A-Za-z0-9_+/-]{60,}={0,2}",
    "sk-": r"\bsk-(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, OpenRouter, DeepSeek
    "pa-": r"(?<![\w-])pa-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{43}(?![\w-])",  # Voyage
    "ak-": r"(?<![\w-])ak-(?=[A-Za-z]*\d)[A-Za-z0-9]{22}(?![\w-])",  # Modal
    "as-": r"(?<![\w-])as-(?=[A-Za-z]*\d)[A-Za-z0-9]{22}(?![\w-])",
    "key-": r"(?<![\w-])key-(?=[a-z]*\d)[a-z0-9]{32}(?![\w-])",  # Mailgun
    "bce-v3/": r"\bbce-v3/ALTAK-[A-Za-z0-9]+/[a-f0-9]{32,}",
    "Q~": r"\b[A-Za-z0-9_~.-]{3}\dQ~[A-Za-z0-9_~.-]{31,34}",  # Entra ID client secret
    ".atlasv1.": r"\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,}",
    "xox": r"\bxox[a-eoprs](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}",
    "SG.": r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "dp.": r"\bdp\.(?:pt|st|ct|sa|scim|audit)\.(?:[a-z0-9_-]{2,35}\.)?[A-Za-z0-9]{40,}",  # Doppler
    "pfa_": r"\bpfa_[a-z]+_[A-Za-z0-9]{6,}_[A-Za-z0-9]{20,}",  # our own
    # Telegram, whose addresses go on with it: /bot123456789:AA...
    ":AA": r"(?<!\d)\d{8,10}:AA[A-Za-z0-9_-]{32,34}(?![\w-])",
    # addresses that let whoever knows them write into a chat: Slack, Discord, Teams, Feishu and Lark, Zapier
    "hook": r"https://(?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com"
    r"|[\w.-]+/open-apis/bot/(?:v2/)?hook|hooks\.zapier\.com/hooks)/[\w/@%=.-]+",
}
_PREFIXED = {
    "[a-f0-9]": "local- 40 dapi 32 dop_v1_ 32 sbp_ 40 shpat_ 32 shpca_ 32 shppa_ 32 shpss_ 32 SK 32",
    "[A-Z0-9]": "AKIA 16 ASIA 16 AIDA 16 AROA 16 ABIA 16 ACCA 16 NRAK- 20 AGE-SECRET-KEY-1 20",
    "[A-Za-z0-9]": (
        "hf_ 30 api_org_ 30 sess- 32 gsk_ 40 xai- 40 r8_ 30 pplx- 32 rpa_ 30 npm_ 30 lin_api_ 30 fw_ 20 LTAI 12 AKID 30 "
        "ghp_ 20 gho_ 20 ghu_ 20 ghs_ 20 ghr_ 20 EAA 30 ntn_ 36 secret_ 36 phc_ 40 phx_ 40 "
        "sk_live_ 10 rk_live_ 10 pk_live_ 10 sk_test_ 10 rk_test_ 10 pk_test_ 10"
    ),
    "[A-Za-z0-9_-]": (
        "pcsk_ 30 wandb_v1_ 20 github_pat_ 20 lsv2_pt_ 30 lsv2_sk_ 30 jina_ 52 nvapi- 40 tgp_v1_ 30 AQ. 40 AKLT 20 AIza 30 "
        "ya29. 20 GOCSPX- 20 1//0 30 hvs. 20 hvb. 20 pypi- 30 figd_ 30 sb_secret_ 20 dckr_pat_ 20 dckr_oat_ 20 xapp- 20 "
        "tskey- 25 sq0atp- 20 sq0csp- 20 PMAK- 58 glpat- 16 gldt- 16 glrt- 16 glcbt- 16 glptt- 16 glft- 16 glsoat- 16 "
        "glagent- 16 glimt- 16 glffct- 16"
    ),
    "[A-Za-z0-9+/=_.-]": (
        "ABSK 60 ATATT3 40 pscale_tkn_ 30 pscale_pw_ 30 pscale_oauth_ 30 glsa_ 30 glc_ 30 sntrys_ 30 sntryu_ 30 whsec_ 16"
    ),
}
"""The characters that follow -> the prefixes of keys, each with the least number of such characters."""
_KINDS |= {
    prefix: rf"\b{re.escape(prefix)}{letters}{{{least},}}"
    for letters, keys in _PREFIXED.items()
    for prefix, least in zip(keys.split()[::2], keys.split()[1::2], strict=True)
}


def hide_known(text: str) -> str:
    """The text without what has the form of a known kind of secret."""
    if len(text) < SHORTEST:
        return text
    for marker, pattern in _KINDS.items():
        if marker in text:
            text = compiled(pattern, re.DOTALL).sub(HIDDEN, text)
    return text
