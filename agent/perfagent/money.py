"""Amounts of money as people read them."""

__all__ = ["spell_money"]

_LEAST = 1e-4


def spell_money(amount: float, currency: str) -> str:
    """3.10 EUR; of a small amount the two digits that say something: 0.0042 EUR."""
    if amount >= 0.1 or not amount:
        return f"{amount:,.2f} {currency}"
    return f"{amount:.2g} {currency}" if amount >= _LEAST else f"under {_LEAST:.4f} {currency}"
