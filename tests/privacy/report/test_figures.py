"""Numbers as a reader sees them: rounded to the side that claims less, and not far."""

import re
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from cloister.privacy.report.figures import at_least, at_most, scientific


@given(st.floats(0, 1e6))
def test_losses_are_rounded_up_and_strengths_down_but_not_far(value: float) -> None:
    exact, above, below = Decimal(repr(value)), Decimal(at_most(value)), Decimal(at_least(value))
    near = Decimal("0.01") if exact >= Decimal("0.1") or exact == 0 else exact / 10
    assert exact <= above < exact + near or above == exact
    assert exact - near < below <= exact or below == exact


@given(st.floats(1e-300, 0.999))
def test_delta_is_rounded_up_to_three_digits(value: float) -> None:
    mantissa, exponent = scientific(value).split(" × 10")
    assert re.fullmatch(r"[1-9](\.\d{1,2})?", mantissa)
    back = exponent.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    shown, exact = Decimal(mantissa).scaleb(int(back)), Decimal(repr(value))
    assert exact <= shown <= exact * Decimal("1.01")


def test_numbers_that_are_round_stay_as_they_are() -> None:
    assert [at_most(value) for value in (0.0, 0.1, 1.0, 1.68, 1.6800001)] == [
        "0.00",
        "0.10",
        "1.00",
        "1.68",
        "1.69",
    ]
    assert [at_most(value) for value in (0.0123, 0.099, 0.0999)] == ["0.013", "0.099", "0.100"]
    assert [scientific(value) for value in (1e-5, 2.5e-7, 0.9999)] == ["1 × 10⁻⁵", "2.5 × 10⁻⁷", "1 × 10⁰"]
