"""Seeds of the rounding for tests: one for each number."""

from __future__ import annotations


def seed_of(number: int) -> bytes:
    """32 bytes that stand for a site's secret seed."""
    return number.to_bytes(32, "little")
