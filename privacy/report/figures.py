"""Numbers as a reader sees them, rounded to the side that claims less: losses and delta up, strengths down.

Each is the decimal with the fewest digits that reads back as the float, rounded once, so that 0.1 stays 0.1.
"""

from __future__ import annotations

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def at_most(value: float) -> str:
    """A privacy loss, rounded up: to two decimals, or to two digits below 0.1."""
    return _two_decimals(value, ROUND_CEILING)


def at_least(value: float) -> str:
    """A strength, rounded down: to two decimals, or to two digits below 0.1."""
    return _two_decimals(value, ROUND_FLOOR)


def _two_decimals(value: float, rounding: str) -> str:
    exact = Decimal(repr(value))
    if exact == 0 or exact >= Decimal("0.1"):
        return str(rounded(value, 2, rounding))
    return f"{rounded(value, 1 - exact.adjusted(), rounding):f}"


def scientific(value: float) -> str:
    """A positive number as `1 × 10⁻⁵`, rounded up to three digits."""
    exact = Decimal(repr(value))
    exponent = exact.adjusted()
    mantissa = exact.scaleb(-exponent).quantize(Decimal("0.01"), ROUND_CEILING)
    if mantissa >= 10:
        mantissa, exponent = mantissa / 10, exponent + 1
    shown = f"{mantissa:f}".rstrip("0").rstrip(".")
    return f"{shown} × 10{str(exponent).translate(_SUPERSCRIPT)}"


def rounded(value: float, decimals: int, rounding: str) -> Decimal:
    """The shortest decimal that reads back as `value`, rounded to `decimals` by a rounding mode of `decimal`."""
    return Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), rounding)


def with_error(value: float, error: float = math.nan) -> str:
    """A figure with the digits that its error leaves: two that count of the error, or of itself without one."""
    size = error if math.isfinite(error) and error > 0 else abs(value)
    digits = 1 - math.floor(math.log10(size)) if size > 0 else 0
    return f"{value:,.{min(max(digits, 0), 6)}f}"


def visible(name: str) -> str:
    """A name, such as a word, with its spaces and line ends to be seen."""
    return name if name.isprintable() and name.strip() == name else json.dumps(name, ensure_ascii=False)
