"""Colors and type, light and dark: the one source for the style sheet (as custom properties) and for the figures.

The twenty series colors, the accent first, were found by a search that maximises the smallest CIEDE2000 distance under
normal, protanopic and deuteranopic vision (Machado 2009, severity 1): between any two 12.7, and 7.7 for color-blind
readers, with at least 3:1 contrast on the card. A legend brings out the line that is pointed at.
A state is never shown by color alone: badges carry a shape and a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import PHASES

__all__ = ["DARK", "FONT", "LIGHT", "PHASE_COLORS", "THEMES", "Theme", "phase_color"]

FONT = 'Inter, "Noto Sans", "Noto Sans CJK SC", system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Every color is #rrggbb or rgba(). series: of lines, in their order."""

    name: str
    page: str
    card: str
    raised: str
    text: str
    muted: str
    line: str
    accent: str
    accent_fill: str
    accent_soft: str
    band: str
    band_edge: str
    grid: str
    ok: str
    ok_soft: str
    warning: str
    warning_soft: str
    critical: str
    critical_soft: str
    info: str
    info_soft: str
    series: tuple[str, ...]

    def properties(self) -> dict[str, str]:
        """CSS custom properties: --card, --band-edge, ..., --phase-data ... for the parts of a step, and --series-0 ...
        for lines."""
        single = (field for field in self.__slots__ if field not in ("name", "series"))
        named = {f"--{field.replace('_', '-')}": str(getattr(self, field)) for field in single}
        named |= {f"--series-{place}": color for place, color in enumerate(self.series)}
        return named | {f"--phase-{phase}": phase_color(self, phase) for phase in PHASES}


_ON_LIGHT = (
    "#0067b1", "#925622", "#0d411a", "#ab13fc", "#006a77", "#e16c6c", "#928600", "#b57899", "#3d165c", "#73484d",
    "#9f84eb", "#2623ca", "#be1174", "#570332", "#63724c", "#37a477", "#003f4b", "#8b162b", "#6681b8", "#ca3a4d",
)  # fmt: skip
_ON_DARK = (
    "#5cb3ff", "#dd6e1e", "#b7e9ab", "#8b68b4", "#5ab2b8", "#d8938a", "#fdd92f", "#be307b", "#617651", "#eccff5",
    "#cc190a", "#e5a859", "#7682fd", "#fc72b1", "#0a7d86", "#bdf6e9", "#f2145e", "#b56e77", "#f3bfc4", "#7b50fb",
)  # fmt: skip

LIGHT = Theme(
    name="light",
    page="#f5f7f9",
    card="#ffffff",
    raised="#f0f3f6",
    text="#161c23",
    muted="#566270",
    line="#dde3e9",
    accent="#0067b1",
    accent_fill="#0067b1",
    accent_soft="rgba(0,103,177,.10)",
    band="rgba(0,103,177,.16)",
    band_edge="rgba(0,103,177,.62)",
    grid="#e8ecf0",
    ok="#00705a",
    ok_soft="#e9f6f2",
    warning="#8f5400",
    warning_soft="#fff5e2",
    critical="#b3261e",
    critical_soft="#fdeeed",
    info="#0067b1",
    info_soft="#eaf3fb",
    series=_ON_LIGHT,
)

DARK = Theme(
    name="dark",
    page="#0e1217",
    card="#161c23",
    raised="#1f2730",
    text="#e8edf2",
    muted="#9fadbb",
    line="#2a333d",
    accent="#5cb3ff",
    accent_fill="#1c6fb8",
    accent_soft="rgba(92,179,255,.14)",
    band="rgba(92,179,255,.20)",
    band_edge="rgba(92,179,255,.66)",
    grid="#252e37",
    ok="#4fd1b3",
    ok_soft="#11241f",
    warning="#ffb84d",
    warning_soft="#2a2113",
    critical="#ff8a80",
    critical_soft="#2d1a19",
    info="#5cb3ff",
    info_soft="#13212e",
    series=_ON_DARK,
)

THEMES = {theme.name: theme for theme in (LIGHT, DARK)}

PHASE_COLORS = {
    "data": "#b47231", "h2d": "#928430", "forward": "#4e85ca", "backward": "#309494", "optimizer": "#539556", "comm": "#956dc1",
    "checkpoint": "#c1645e", "eval": "#b56494",
}  # fmt: skip
"""Eight hues of one lightness (OKLCH 0.61, chroma 0.09 to 0.13), so that no phase shouts; the same in both themes, with 3.6:1
contrast or more on either card. Parts of a bar touch no other, and each has its name beside it. `other` is the muted text
color."""


def phase_color(theme: Theme, phase: str) -> str:
    return PHASE_COLORS.get(phase, theme.muted)
