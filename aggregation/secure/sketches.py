"""The sketches of one attempt at the coordinator: none is too long, and together they are that of the sum."""

from __future__ import annotations

from cloister.aggregation.vector import masks
from cloister.aggregation.vector.sketch import ROWS, SLACK, Integers, Lengths, estimate, from_bytes
from cloister.protocol.errors import LengthError, UpdateError


class Sketches:
    """The sketches of the survivors of an attempt. Each check is a method, as in `secure_coordinator.py`.

    Args:
        lengths: What of a vector is sketched, and how long an honest one is.
    """

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._taken: dict[str, Integers] = {}
        self.too_long: dict[str, str] = {}
        """Sites whose vectors are longer than any honest one, each with what its signed sketch says."""

    def take(self, site: str, sent: bytes) -> None:
        """Step 5: take the sketch that a site has signed.

        Raises:
            LengthError: its vector is too long, or it has sent no sketch.
        """
        try:
            sketch = from_bytes(sent)
        except ValueError as error:
            raise LengthError(f"sketch of {site}", expected=f"{ROWS} numbers ({error})") from error
        self.check_length(site, sketch)
        self._taken[site] = sketch

    def check_length(self, site: str, sketch: Integers) -> None:
        """A sum with a vector that is too long is not opened."""
        length = estimate(sketch)
        if length > self._lengths.most:
            times = f"{length / self._lengths.longest:.3g} times the longest honest one"
            self.too_long[site] = f"its update is about {times}"
            raise LengthError(f"update of {site}", times, expected=f"at most {SLACK} times, by its sketch")

    def check_all(self) -> None:
        """Step 5, end: nothing is revealed where one is too long.

        Raises:
            LengthError: one is; a later attempt may be without its site.
        """
        if self.too_long:
            named, fix = ", ".join(sorted(self.too_long)), "try the round again without them"
            raise LengthError(f"updates of {named}", expected="none that is too long", fix=fix)

    def check_sum(self, total: masks.Ring, seed: bytes, survivors: int) -> None:
        """Step 7: what the sum has that the sketches do not is nothing, or what survivors without one may have sent.

        Args:
            total: The opened sum.
            seed: Of the attempt's sketches.
            survivors: The number of vectors in it.

        Raises:
            UpdateError: it has more. A site lied in its vector or its sketch, and nothing says which.
        """
        missing = survivors - len(self._taken)
        rest = self._lengths.sketch([(0, total)], seed)
        for sketch in self._taken.values():
            rest = rest - sketch
        if (length := estimate(rest)) > missing * self._lengths.most:
            raise UpdateError(
                "sum of the updates",
                f"{length / self._lengths.longest:.3g} times the longest honest update away from its sketches",
                expected=f"at most {missing * SLACK:g} times, with {missing} sketches missing: a site has sent another "
                "vector than it has sketched",
            )
