"""Measures how different two colors look, to normal and to color-blind vision. The distance is CIEDE2000 (Sharma, Wu and Dalal
2005). Color blindness is simulated at full severity (Machado, Oliveira and Fernandes 2009)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])


def smallest_difference(colors: Sequence[str]) -> float:
    """Between any two of these #rrggbb colours, under any vision."""
    linear = np.array([_linear(color) for color in colors])
    one, other = np.triu_indices(len(colors), 1)
    worst = np.inf
    for vision in VISIONS.values():
        lab = _lab(linear @ vision.T)
        worst = min(worst, float(ciede2000(lab[one], lab[other]).min()))
    return worst


def hue(color: str) -> float:
    """In degrees of CIELAB."""
    _, a, b = _lab(_linear(color))
    return float(np.degrees(np.arctan2(b, a)) % 360)


def _linear(color: str) -> Array:
    parts = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear: Array) -> Array:
    xyz = np.clip(linear, 0, 1) @ _TO_XYZ.T / _WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def ciede2000(one: Array, other: Array) -> Array:
    (l1, a1, b1), (l2, a2, b2) = np.moveaxis(one, -1, 0), np.moveaxis(other, -1, 0)
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1 + 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    a1, a2 = a1 * stretch, a2 * stretch
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2(b1, a1)) % 360, np.degrees(np.arctan2(b2, a2)) % 360
    turned = np.where(c1 * c2 == 0, 0, (h2 - h1 + 180) % 360 - 180)
    d_l, d_c, d_h = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turned) / 2)
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    angle = np.where(c1 * c2 == 0, h1 + h2, (h1 + turned / 2) % 360)
    weight = (
        1 - 0.17 * np.cos(np.radians(angle - 30)) + 0.24 * np.cos(np.radians(2 * angle))
        + 0.32 * np.cos(np.radians(3 * angle + 6)) - 0.20 * np.cos(np.radians(4 * angle - 63))
    )  # fmt: skip
    s_l = 1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    s_c, s_h = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    rotation = (
        -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(np.radians(60 * np.exp(-(((angle - 275) / 25) ** 2))))
    )
    found: Array = np.sqrt((d_l / s_l) ** 2 + (d_c / s_c) ** 2 + (d_h / s_h) ** 2 + rotation * d_c / s_c * d_h / s_h)
    return found
