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

_PREFIXED = {
    "[A-Za-z0-9]": "hf_ 30 api_org_ 30 sess- 32 gsk_ 40 xai- 40 r8_ 30 pplx- 32 rpa_ 30 npm_ 30 lin_api_ 30",
    "[A-Za-z0-9_]": "pcsk_ 30 wandb_v1_ 20 github_pat_ 20",
    "[A-Za-z0-9_-]": (
        "nvapi- 40 tgp_v1_ 30 AQ. 40 AKLT 20 AIza 30 ya29. 20 GOCSPX- 20 1//0 30 hvs. 20 hvb. 20 pypi- 30 "
        "figd_ 30 sb_secret_ 20"
    ),
}
"""The characters that follow -> the prefixes of keys, each with the least number of such characters."""
_KINDS: tuple[tuple[str | tuple[str, ...], str], ...] = (
    # private keys, also when the end, or the beginning, was cut off
    (
        "-----BEGIN",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    ),
    (
        "-----END",
        r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]{1,80}(?:\s|\\n)+){0,60}-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----",
    ),
    ("AGE-SECRET-KEY", r"AGE-SECRET-KEY-1[A-Z0-9]{20,}"),
    # signed tokens; a long one without dots is the JSON of a service such as Neptune
    ("eyJ", r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*|\beyJ[A-Za-z0-9_+/-]{60,}={0,2}"),
    # models and data
    ("sk-", r"\bsk-(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic, OpenRouter, DeepSeek
    ("lsv2_", r"\blsv2_(?:pt|sk)_[A-Za-z0-9_]{30,}"),
    ("local-", r"\blocal-[a-f0-9]{40}\b"),
    ("pa-", r"(?<![\w-])pa-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{43}(?![\w-])"),  # Voyage
    ("jina_", r"\bjina_[a-f0-9]{32}[A-Za-z0-9_-]{20,}"),
    ("fw_", r"\bfw_[A-Za-z0-9]{20,}\b"),
    (("ak-", "as-"), r"(?<![\w-])a[ks]-(?=[A-Za-z]*\d)[A-Za-z0-9]{22}(?![\w-])"),  # Modal
    ("ABSK", r"\bABSK[A-Za-z0-9+/]{60,}={0,2}"),  # Bedrock
    ("dapi", r"\bdapi[a-f0-9]{32}(?:-\d)?\b"),
    # clouds
    (("AKIA", "ASIA", "AIDA", "AROA", "ABIA", "ACCA"), r"\b(?:AKIA|ASIA|AIDA|AROA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    ("LTAI", r"\bLTAI[A-Za-z0-9]{12,30}\b"),  # Alibaba
    ("AKID", r"\bAKID[A-Za-z0-9]{30,40}\b"),  # Tencent
    ("bce-v3/", r"\bbce-v3/ALTAK-[A-Za-z0-9]+/[a-f0-9]{32,}"),
    ("Q~", r"\b[A-Za-z0-9_~.-]{3}\dQ~[A-Za-z0-9_~.-]{31,34}"),  # Entra ID client secret
    ("dop_v1_", r"\bdop_v1_[a-f0-9]{32,}"),
    (".atlasv1.", r"\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,}"),
    # forges and registries
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    (
        ("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glft-", "glsoat-", "glagent-", "glimt-", "glffct-"),
        r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|ffct)-[A-Za-z0-9_-]{16,}",
    ),
    ("dckr_", r"\bdckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}"),
    ("ATATT", r"\bATATT3[A-Za-z0-9_=-]{40,}"),
    # messages, payment, monitoring
    ("xox", r"\bxox[a-eoprs](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}"),
    ("xapp-", r"\bxapp-\d-[A-Za-z0-9-]{20,}"),
    ("hooks.slack", r"https://hooks\.slack\.com/[A-Za-z0-9/_-]+"),
    ("discord", r"https://(?:\w+\.)?discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_-]+"),
    ("webhook.office.com", r"https://[A-Za-z0-9.-]+\.webhook\.office\.com/[^\s'\"]+"),
    # Telegram, whose addresses go on with it: /bot123456789:AA...
    (":AA", r"(?<!\d)\d{8,10}:AA[A-Za-z0-9_-]{32,34}(?![\w-])"),
    ("/open-apis/bot/", r"https://[A-Za-z0-9.-]+/open-apis/bot/(?:v2/)?hook/[A-Za-z0-9_-]+"),  # Feishu, Lark
    ("hooks.zapier.com", r"https://hooks\.zapier\.com/hooks/[A-Za-z0-9/_-]+"),
    (("pk.eyJ", "sk.eyJ"), r"\b[ps]k\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,}"),  # Mapbox
    ("SG.", r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    (("k_live_", "k_test_"), r"\b(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}"),
    ("EAA", r"\bEAA[A-Za-z0-9]{30,}\b"),  # Facebook
    (("shpat_", "shpca_", "shppa_", "shpss_"), r"\bshp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}"),
    (("sq0atp-", "sq0csp-"), r"\bsq0(?:atp|csp)-[A-Za-z0-9_-]{20,}"),
    (("ntn_", "secret_"), r"\b(?:ntn|secret)_[A-Za-z0-9]{36,}"),  # Notion
    ("tskey-", r"\btskey-[a-z]+-[A-Za-z0-9-]{20,}"),
    ("dp.", r"\bdp\.(?:pt|st|ct|sa|scim|audit)\.(?:[a-z0-9_-]{2,35}\.)?[A-Za-z0-9]{40,}"),  # Doppler
    (("phc_", "phx_"), r"\bph[cx]_[A-Za-z0-9]{40,}"),
    ("PMAK-", r"\bPMAK-[a-f0-9]{24}-[a-f0-9]{34}"),
    ("sbp_", r"\bsbp_[a-f0-9]{40}"),
    ("pscale_", r"\bpscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{30,}"),
    ("key-", r"(?<![\w-])key-(?=[a-z]*\d)[a-z0-9]{32}(?![\w-])"),  # Mailgun
    ("SK", r"\bSK[a-f0-9]{32}\b"),
    (("glsa_", "glc_"), r"\bgl(?:sa|c)_[A-Za-z0-9+/=_]{30,}"),
    ("sntry", r"\bsntry[su]_[A-Za-z0-9+/=_]{30,}"),
    ("NRAK-", r"\bNRAK-[A-Z0-9]{20,}"),
    ("whsec_", r"\bwhsec_[A-Za-z0-9+/=_-]{16,}"),
    ("pfa_", r"\bpfa_[a-z]+_[A-Za-z0-9]{6,}_[A-Za-z0-9]{20,}"),  # our own
)
_KINDS += tuple(
    (prefix, rf"\b{re.escape(prefix)}{letters}{{{least},}}")
    for letters, keys in _PREFIXED.items()
    for prefix, least in zip(keys.split()[::2], keys.split()[1::2], strict=True)
)


def hide_known(text: str) -> str:
    """The text without what has the form of a known kind of secret."""
    if len(text) < SHORTEST:
        return text
    for markers, pattern in _KINDS:
        if markers in text if isinstance(markers, str) else any(marker in text for marker in markers):
            text = compiled(pattern, re.DOTALL).sub(HIDDEN, text)
    return text
