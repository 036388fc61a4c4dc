"""What correlated noise is worth: a plan trained at one epsilon with independent and with correlated noise.

The plan is the shipped `correlated-sites`: 240 sites hold parts of Python's standard library. Cohorts of 12 take turns
for 60 rounds, so that each site takes part three times, 20 rounds apart, and a trusted coordinator adds the noise. The
plans differ in `privacy.correlated.buffers` alone: with 0 buffers the noise of the rounds is independent, accounted for
the same pattern. Both start from the model that was trained on public text, and the held-out records are public.

* loss: held-out nats per token of the final model; `before` is the public model's.
* noise: standard deviation of the noise on the sum of all rounds, in clipping norms times the noise multiplier.

The noise has declared seeds, so that the figures can be repeated: nothing here is private.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cloister.lm.model.model import count_parameters
from cloister.privacy.accounting.terms import participation, terms_of
from cloister.privacy.mechanism.correlated import loss
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import load
from cloister.server.record.folder import RunFolder
from cloister.simulations.federation import simulate

KINDS = {"independent": 0, "correlated": 6}
"""Most buffers of each kind of noise."""


@dataclass(frozen=True)
class Result:
    kind: str
    buffers: int
    """Buffers that are used."""
    epsilon: float
    noise_multiplier: float
    noise: float
    before: float
    losses: tuple[float, ...]
    """For each seed."""
    seconds: float


def plan_of(kind: str, seed: int, changes: list[str]) -> Plan:
    shipped = Path(str(files("cloister.protocol.plan.shipped").joinpath("correlated-sites.toml")))
    return load(
        shipped, [f"privacy.correlated.buffers={KINDS[kind]}", f"simulation.noise_seed={seed}", *changes]
    )


def measure(kind: str, seeds: int, changes: list[str]) -> Result:
    begun, losses, before = time.perf_counter(), [], 0.0
    plan = plan_of(kind, 0, changes)
    for seed in range(seeds):
        with (
            tempfile.TemporaryDirectory() as out,
            RunFolder.create(Path(out) / "run", plan_of(kind, seed, changes)) as folder,
        ):
            found = simulate(folder, lambda _: None)
        assert found.initial_loss is not None
        assert found.final_loss is not None
        before = found.initial_loss
        losses.append(found.final_loss)
    terms, pattern = terms_of(plan, count_parameters(plan)[1]), participation(plan)
    assert terms is not None
    assert terms.mechanism is not None
    assert terms.mechanism.correlation is not None
    assert pattern is not None
    return Result(
        kind=kind,
        buffers=len(terms.mechanism.correlation.decay),
        epsilon=terms.epsilon(pattern.most),
        noise_multiplier=terms.noise_multiplier,
        noise=loss(terms.mechanism.correlation, pattern),
        before=before,
        losses=tuple(losses),
        seconds=time.perf_counter() - begun,
    )


def show(console: Console, results: list[Result]) -> None:
    table = Table(title=f"held-out loss before: {results[0].before:.4f} nats per token")
    for column in ("noise", "buffers", "epsilon", "z", "on the sum", "loss after", "gain", "s"):
        table.add_column(column, justify="left" if column == "noise" else "right")
    for each in results:
        mean = statistics.fmean(each.losses)
        table.add_row(
            each.kind,
            str(each.buffers),
            f"{each.epsilon:.3f}",
            f"{each.noise_multiplier:.4f}",
            f"{each.noise:.2f}",
            " ".join(f"{loss:.4f}" for loss in each.losses),
            f"{each.before - mean:+.4f}",
            f"{each.seconds:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each kind (default: 1)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the plan")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    results = [measure(kind, arguments.seeds, arguments.set) for kind in KINDS]
    if arguments.json:
        print(json.dumps([asdict(each) for each in results]))
    else:
        show(Console(), results)


if __name__ == "__main__":
    main()
