"""The cost of noise: samples per second on one thread, against NumPy's bare sampler over the same cipher.

    python benchmarks/noise.py [--json] [--quick]

`normals_per_s`: normals of a stated standard deviation in a new vector, by `NoiseStream.gaussian`. `ratio`: that over
the rate of `standard_normal` of one `AESCounter` from block to block of a buffer that stays in cache, with no scale, no
seeking and no vector to write: the limit of the cipher and the ziggurat, `bare_normals_per_s`. `added_per_s` is
`add_gaussian`, into a float32 vector. `skellam_per_s` is Skellam noise of variance 2^30. `clipped_per_s` is `clip` on a
vector that is too long, float32. The figures are medians of runs taken in turns, and a ratio is the median of the
ratios of neighbouring runs; it is more reliable than a rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from cloister.privacy.mechanism.clip import clip
from cloister.privacy.mechanism.noise import NoiseStream, Samples
from cloister.protocol.messages.blocks import BLOCK

SIGMA, VARIANCE = 1.3, 2.0**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="shorter vectors")
    options = parser.parse_args()
    result = measure(1 << 20 if options.quick else 1 << 24)
    if options.json:
        print(json.dumps(result))
        return
    shown = Table("what", "value", box=None)
    for name, value in result.items():
        shown.add_row(name, f"{value:.3g}")
    Console().print(shown)


def measure(length: int, turns: int = 7) -> dict[str, float]:
    stream = NoiseStream.fresh()
    singles, longer = (np.ones(length, np.float32) for _ in range(2))
    few = length // 8  # Skellam samples take about eight times as long

    def bare(buffer: Samples) -> None:
        generator = stream.generator()
        for _ in range(length // BLOCK):
            generator.standard_normal(out=buffer, dtype=buffer.dtype)

    def clipped() -> None:
        longer.fill(1.0)
        clip(longer, 1.0)

    block = np.empty(BLOCK)
    timed: dict[str, tuple[Callable[[], object], int]] = {
        "normals_per_s": (lambda: stream.gaussian(length, SIGMA), length),
        "bare_normals_per_s": (lambda: bare(block), length),
        "added_per_s": (lambda: stream.add_gaussian(singles, SIGMA), length),
        "skellam_per_s": (lambda: stream.skellam(few, VARIANCE), few),
        "clipped_per_s": (clipped, length),
    }
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(turns):
        for name, (what, count) in timed.items():
            start = time.perf_counter()
            what()
            rates[name].append(count / (time.perf_counter() - start))

    def ratio(name: str) -> float:
        return statistics.median(
            own / bare for own, bare in zip(rates[name], rates[f"bare_{name}"], strict=True)
        )

    return {
        **{name: statistics.median(found) for name, found in rates.items()},
        "ratio": ratio("normals_per_s"),
    }


if __name__ == "__main__":
    main()
