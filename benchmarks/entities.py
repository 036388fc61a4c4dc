"""F1 of entities in clinical-like notes: a federation at epsilon 4 for each patient beside the public model before it.

The shipped `clinical-notes`, with a tokenizer that is trained on public text, on notes of other seeds than its own.
Four wards have 8,000 made-up notes of 3,200 patients. The public model has learned from 2,000 made-up letters. Both are
evaluated on 500 notes that no ward has. With shuffled labels each entity of a ward's notes has the label of a random
one, and nothing should be gained.

    python benchmarks/entities.py [--json] [--seeds N]

Keys of the JSON: `gain`, the median over seeds of the F1 after the last round minus that of the public model;
`shuffled`, the same with shuffled labels; and `runs`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cloister.lm.text.notes import letters, notes
from cloister.lm.text.tokenizer import train_tokenizer
from cloister.protocol.plan.soundness import parse, shipped_plans
from cloister.server.record.folder import RunFolder
from cloister.simulations.federation import simulate

TESTED, PUBLIC = 500, 10_000
"""Notes of the evaluation, and what separates its seed and that of public text from the seed of the wards' notes."""


def wrote(path: Path, records: list[dict[str, Any]]) -> Path:
    """A file of records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def shuffled(records: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The records with the labels of their entities in a random order."""
    labels = [span["label"] for record in records for span in record["spans"]]
    random.Random(seed).shuffle(labels)
    each = iter(labels)
    return [
        record | {"spans": [span | {"label": next(each)} for span in record["spans"]]} for record in records
    ]


def vocabulary(folder: Path, seed: int) -> Path:
    """A tokenizer of 1,200 tokens, trained on public letters and some public notes, without their entities."""
    text = letters(3000, PUBLIC + seed) + notes(300, PUBLIC + seed)
    train_tokenizer([record["text"] for record in text], "bpe", 1200).save_pretrained(folder)
    return folder


def run(folder: Path, seed: int, *, shuffle: bool, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    """The F1 of the public model and of the last one, and the run's epsilon."""
    own = notes(seed=seed + 1)
    plan = parse(
        shipped_plans()["clinical-notes"],
        [
            f"run.seed={seed}",
            f"model.tokenizer={vocabulary(folder / 'tokenizer', seed)}",
            "data.sequence_length=48",
            f"public.source={wrote(folder / 'letters.jsonl', letters(seed=seed + 1))}",
            f"server.evaluation={wrote(folder / 'test.jsonl', notes(TESTED, 2 * PUBLIC + seed))}",
            "server.evaluation_sequences=500",
            f"simulation.source={wrote(folder / 'notes.jsonl', shuffled(own, seed) if shuffle else own)}",
            "simulation.field=ward",
            "simulation.public=0.0",
            "simulation.durable=false",
            *settings,
        ],
    )
    with RunFolder.create(folder / "run", plan) as made:
        done = simulate(made, lambda _event: None)
        rows = made.metrics()
        return {
            "seed": seed,
            "shuffled": shuffle,
            "public": rows[0]["entity_f1"],
            "federated": done.figures["entity_f1"],
            "epsilon": done.epsilon,
        }


def main() -> int:
    """Run all seeds, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    runs = []
    for shuffle in (False, True):
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(Path(folder), seed, shuffle=shuffle))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    gains = [
        [each["federated"] - each["public"] for each in runs if each["shuffled"] is which]
        for which in (False, True)
    ]
    found = {"gain": median(gains[0]), "shuffled": median(gains[1]), "runs": runs}
    print(
        json.dumps(found)
        if arguments.json
        else f"gain {found['gain']:.3f}, with shuffled labels {found['shuffled']:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
