"""Bits per byte with a tokenizer from a vocabulary question beside one of the sites' own text and a public one.

The sites' text is functions of the installed packages torch and transformers, which are dependencies of this package,
and the public text is that of `builtin:python-docs`; or, with `--language`, the sites' text is the paragraphs of the
machine's manual pages in that language, and the public text those in English (Debian's packages manpages-de, manpages
and manpages-dev, for example). A question asks eight sites for frequent words, at epsilon 4 and delta 1e-6 for each
record. A tokenizer learns from its answer and the public text, a second one from the sites' own text, and a third from
the public text alone. With each a small model is trained in the same number of steps on the sites' records, and
evaluated on others.

    python benchmarks/vocabulary.py [--json] [--records N] [--language CODE] [--manuals FOLDER]
        [--words N] [--ngram N] [--vocab N] [--steps N] [--length N] [--seeds N]

Keys of the JSON: for each of `own`, `question` and `public`, `bits_per_byte` (medians over the seeds) and
`bytes_per_token`; of the question `epsilon`, `units`, `words` that were found, `false` ones that no unit has,
`needed`, the units of a word that is found as `plan check` says, the number of `frequent` words that more units have,
and which part of those was found; and `question_over_own` and `public_over_own`, the ratios of bits per byte.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gzip
import importlib.util
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from cloister.cli.main import main as cloister
from cloister.lm.questions.vocabulary import split
from cloister.lm.text.corpus import corpus_records
from cloister.lm.text.tokenizer import train_tokenizer
from cloister.privacy.accounting.terms import terms_of
from cloister.protocol.plan.soundness import Plan
from cloister.protocol.questions.registry import kind_of
from cloister.server.record.folder import RunFiles, RunFolder, read_answer
from cloister.simulations.federation import simulate

PACKAGES = ("torch", "transformers")
HELD_OUT = 1000
QUESTION = """[question]
kind = "vocabulary"
field = "text"
words = {words}
ngram = {ngram}
[privacy]
unit = "record"
target_epsilon = 4.0
delta = 1e-6
[cohort]
sites = 8
[simulation]
source = "{source}"
partition = "iid"
"""
TRAINING = """[run]
rounds = 2
[model]
tokenizer = "{tokenizer}"
[model.config]
hidden_size = 128
intermediate_size = 384
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 4
[data]
sequence_length = {length}
held_out = 0.0
[local]
steps = {steps}
batch_size = {batch}
learning_rate = 0.002
optimizer_state = "keep"
[cohort]
sites = 2
quorum = 1.0
[aggregation]
secure = false
[server]
evaluation = "{held_out}"
evaluate_every = 2
[simulation]
source = "{source}"
partition = "iid"
durable = false
"""


def functions() -> Iterator[str]:
    """The functions of the packages, each once."""
    seen: set[str] = set()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for file in sorted(Path(spec.submodule_search_locations[0]).rglob("*.py")):
            source = file.read_text(encoding="utf-8", errors="replace")
            try:
                tree = ast.parse(source)
            except SyntaxError:
                continue
            lines = source.splitlines(keepends=True)
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    text = "".join(lines[node.lineno - 1 : node.end_lineno])
                    if text not in seen:
                        seen.add(text)
                        yield text


BEGINS = {"PP", "P", "LP", "SH", "SS", "TP", "IP", "HP", "Sh", "Ss", "Pp", "It"}
"""Requests of a manual page that begin a paragraph."""
LAYOUT = re.compile("TH|Dd|Dt|Os|RS|TA|sp|nf|fi|if|ie|el|de|so|ad|TS|ds|nr")
"""Requests whose arguments are no text."""
ESCAPES = re.compile(r"\\(?:[fF*n](?:\[[^]]*\]|\(..|.)|s[+-]?\d|\(..|\[[^]]*\]|.)")
SHORTEST = 40
"""Characters of a paragraph that counts."""


def paragraphs(page: str) -> Iterator[str]:
    """The paragraphs of a manual page, without its layout."""
    part: list[str] = []
    for line in page.splitlines():
        name, _, words = line[1:].partition(" ") if line[:1] in {".", "'"} else ("", "", line)
        if name in BEGINS:
            yield " ".join(part)
            part = []
        if not name.startswith('\\"') and not LAYOUT.fullmatch(name):
            part += ESCAPES.sub(
                lambda found: "-" if found[0] == "\\-" else "", words.replace('"', "")
            ).split()
    yield " ".join(part)


def manuals(folder: Path) -> list[str]:
    """The paragraphs of manual pages, each once."""
    pages = (
        gzip.decompress(file.read_bytes()).decode(errors="replace")
        for file in sorted(folder.glob("man*/*.gz"))
    )
    found = dict.fromkeys(text for page in pages for text in paragraphs(page) if len(text) >= SHORTEST)
    return list(found)


def texts_of(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The sites' texts and the public ones."""
    if arguments.language is None:
        return list(functions()), [record["text"] for record in corpus_records("builtin:python-docs").records]
    texts, public = (
        manuals(folder) for folder in (arguments.manuals / arguments.language, arguments.manuals)
    )
    if not texts or not public:
        sys.exit(f"no manual pages in {arguments.language} and in English below {arguments.manuals}")
    return texts, public


def wrote(path: Path, texts: Iterable[str]) -> Path:
    """A file of records."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


TOKENS = 2048
"""Of a batch."""


def trained(
    folder: Path, tokenizer: Path, files: tuple[Path, Path], seed: int, arguments: argparse.Namespace
) -> float:
    """Bits per byte of a model with a tokenizer.

    Args:
        folder: A run folder.
        tokenizer: The tokenizer's folder.
        files: Records of the sites, and of the evaluation.
        seed: Of the run.
        arguments: Those of the command.
    """
    length, (source, held_out) = arguments.length, files
    text = TRAINING.format(
        tokenizer=tokenizer,
        source=source,
        held_out=held_out,
        steps=arguments.steps,
        length=length,
        batch=TOKENS // length,
    )
    with RunFolder.create(folder, Plan.parse(text, [f"run.seed={seed}"])) as made:
        simulate(made, lambda _event: None)
        return float(made.metrics()[-1]["bits_per_byte"])


def measured(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    texts, public = texts_of(arguments)
    random.Random(0).shuffle(texts)
    held, texts = texts[:HELD_OUT], texts[HELD_OUT : HELD_OUT + arguments.records]
    source, other = wrote(folder / "sites.jsonl", texts), wrote(folder / "held.jsonl", held)
    question = folder / "question.toml"
    question.write_text(QUESTION.format(source=source, words=arguments.words, ngram=arguments.ngram))
    with contextlib.redirect_stdout(sys.stderr):
        if cloister(["ask", str(question), "--out", str(folder / "answer")]):
            sys.exit("the question was not answered")
    words = ["tokenizer", "train", str(wrote(folder / "public.jsonl", public)), "--from-question"]
    settings = ["--vocab", str(arguments.vocab), "--out", str(folder / "question")]
    with contextlib.redirect_stdout(sys.stderr):
        if cloister([*words, str(folder / "answer"), *settings]):
            sys.exit("no tokenizer was trained")
    train_tokenizer(texts, "bpe", arguments.vocab).save_pretrained(folder / "own")
    train_tokenizer(public, "bpe", arguments.vocab).save_pretrained(folder / "public")
    files = RunFiles(folder / "answer")
    told = {each.name: each for each in read_answer(files).figures}
    exact = Counter(word.decode() for text in texts for word in split(text, arguments.ngram))
    plan = Plan.load(question)
    terms = terms_of(plan, 1)
    assert terms is not None
    assert terms.asked is not None
    deviation = terms.asked.deviation(plan.cohort.size())
    _, (_, needed) = kind_of(plan).expected(plan, deviation, len(texts))
    frequent = {word for word, units in exact.items() if units > needed}
    found: dict[str, Any] = {
        "units": len(texts),
        "epsilon": terms.epsilon(1),
        "words": len(told),
        "needed": needed,
        "frequent": len(frequent),
        "frequent_found": len(frequent & told.keys()) / len(frequent),
        "false": len(told.keys() - exact.keys()),
    }
    print(found, file=sys.stderr, flush=True)
    size = sum(len(text.encode()) for text in held)
    for name in ("own", "question", "public"):
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder / name)
        tokens = sum(len(each) for each in tokenizer(held)["input_ids"])
        bits = [
            trained(folder / f"run-{name}-{seed}", folder / name, (source, other), seed, arguments)
            for seed in range(arguments.seeds)
        ]
        found[name] = {"bits_per_byte": median(bits), "all": bits, "bytes_per_token": size / tokens}
        print(name, found[name], file=sys.stderr, flush=True)
    for name in ("question", "public"):
        found[f"{name}_over_own"] = found[name]["bits_per_byte"] / found["own"]["bits_per_byte"]
    return found


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--language", help="of the sites' text, such as de; without it, functions")
    parser.add_argument("--manuals", type=Path, default=Path("/usr/share/man"))
    parser.add_argument("--words", type=int, default=64, help="of a record that count")
    parser.add_argument(
        "--ngram", type=int, default=0, help="characters of a word; 0: as a tokenizer cuts them"
    )
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name in ("own", "question", "public"):
            each = found[name]
            print(
                f"{name:9} {each['bits_per_byte']:.3f} bits per byte, {each['bytes_per_token']:.2f} bytes per token"
            )
        print(
            f"question {found['question_over_own']:.3f}, public {found['public_over_own']:.3f} of the sites' own text"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
