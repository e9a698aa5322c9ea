"""How figures are written in the sentences of rules."""

from __future__ import annotations

import pytest

from perfagent_server.rules.evidence import spell_bytes, spell_s


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 µs"), (0.0009994, "999 µs"), (0.0009996, "1 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (1.25, "1.25 s"),
        (99.94, "99.9 s"), (99.96, "100 s"), (1234.5, "1234 s"), (-0.5, "-500 ms"),
    ],
)  # fmt: skip
def test_a_duration_is_rounded_before_its_unit_is_chosen(seconds: float, shown: str) -> None:
    assert spell_s(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (999, "999 B"), (1000, "1000 B"), (1023, "1023 B"), (1023.6, "1 KiB"), (1024, "1 KiB"),
        (1010 * 2**20, "1010 MiB"), (1023.7 * 2**20, "1 GiB"), (1.5 * 2**30, "1.5 GiB"), (-1010 * 2**20, "-1010 MiB"),
        (2000 * 2**40, "2000 TiB"),
    ],
)  # fmt: skip
def test_a_size_is_rounded_before_its_unit_is_chosen(size: float, shown: str) -> None:
    assert spell_bytes(size) == shown
