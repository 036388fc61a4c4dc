"""Made-up clinical notes with their entities, so that plans on patients' records can be tried without any patient.

Two kinds: `notes` are short, as wards write them, and `letters` are whole sentences, as textbooks print them. A model
that has learned from public letters knows some of what is in the notes. Templates, word lists and syllables of names
are this module's own; no person, and no record of one, is behind them. All is drawn from a seed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

TYPES = ("name", "diagnosis", "drug", "dose", "date")
"""The types of the entities."""
_SLOT = re.compile(r"\{(\w+)\}")

_GIVEN = (
    "Ada", "Bruno", "Clea", "Dario", "Edda", "Falk", "Gita", "Hanno", "Ilse", "Jaro",
    "Kaja", "Lino", "Mira", "Nils", "Orla", "Piet", "Rhea", "Sven", "Tilda", "Urs",
)  # fmt: skip
_FIRST = (
    "bar", "dol", "fen", "gra", "hol", "kes", "lor", "mar", "nev", "orm", "pel", "rin", "sol", "tav", "ul", "ver",
)  # fmt: skip
_LAST = ("ding", "ert", "hoff", "ik", "man", "ov", "sen", "us")
_DIAGNOSES = (
    "pneumonia", "atrial fibrillation", "type 2 diabetes", "hip fracture", "migraine", "hypertension", "asthma",
    "heart failure", "cellulitis", "appendicitis", "anaemia", "gout", "sepsis", "pulmonary embolism", "cystitis",
    "hypothyroidism", "epilepsy", "psoriasis", "angina", "bronchitis", "gastritis", "kidney stones", "delirium",
    "deep vein thrombosis", "otitis media", "pancreatitis", "osteoporosis", "sinusitis", "stroke", "eczema",
)  # fmt: skip
_DRUGS = (
    "amoxicillin", "metformin", "ibuprofen", "bisoprolol", "ramipril", "furosemide", "apixaban", "levothyroxine",
    "paracetamol", "omeprazole", "prednisolone", "salbutamol", "simvastatin", "warfarin", "morphine", "allopurinol",
    "amlodipine", "cefuroxime", "ciprofloxacin", "clopidogrel", "diazepam", "digoxin", "doxycycline", "enoxaparin",
    "gabapentin", "haloperidol", "insulin glargine", "lamotrigine", "lisinopril", "tramadol",
)  # fmt: skip
_KNOWN = 12
"""Diagnoses and drugs of the lists that letters name too."""
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

_WARDS = {
    "surgery": (
        "{date} {name} post op day 2, {drug} {dose}, wound dry.",
        "Listed {name} for theatre {date}, hx {diagnosis}.",
        "Stop {drug} until {date}, restart {drug} {dose} then.",
        "Pain 6/10, given {drug} {dose}, r/v {date}.",
        "Drain out, 40 ml, no {diagnosis} seen on CT {date}.",
    ),
    "medicine": (
        "{name}: {diagnosis}, on {drug} {dose}, bp 130/80.",
        "Pt {name} adm {date} w {diagnosis}, sats 94.",
        "PMH {diagnosis}, {diagnosis}. Cont {drug} {dose}.",
        "{drug} up to {dose} from {date}, u+e ok.",
        "Seen on wr, {name} better, plan home {date}.",
    ),
    "cardiology": (
        "Echo {date} ef 45, start {drug} {dose}.",
        "{name} c/o chest pain, ?{diagnosis}, trop neg.",
        "Tele 2 days, {diagnosis} known since {date}.",
        "Hold {drug}, give {drug} {dose} stat, bed 12.",
        "Fam of {name} informed {date}.",
    ),
    "emergency": (
        "Bay 4 {name} via amb, {diagnosis}, gcs 15.",
        "Allergic to {drug}, so {drug} {dose} iv.",
        "Xr {date} nad, imp {diagnosis}.",
        "D/c w {drug} {dose}, gp to see {name} {date}.",
        "Hr 110, rr 22, {drug} {dose} given at 14:20.",
    ),
}
_LETTERS = (
    "Thank you for referring {name}, who was seen on {date}.",
    "The patient {name} suffers from {diagnosis} and takes {drug}.",
    "We recommend {drug} at a dose of {dose}.",
    "On {date} the diagnosis of {diagnosis} was confirmed.",
    "Please continue {drug}, {dose}, and review the patient on {date}.",
    "There was no sign of {diagnosis}, and {name} felt well.",
    "The next appointment is on {date}; the family has been told.",
    "Medication: {drug} {dose}, {drug} {dose}.",
    "Diagnoses: {diagnosis}, {diagnosis}.",
    "{name}, seen {date}: {diagnosis}.",
)


def notes(count: int = 8000, seed: int = 0) -> list[dict[str, Any]]:
    """Notes of wards: `text`, `spans` (start, end, label), `patient`, of whom each has one note or some, and `ward`.

    Args:
        count: Number of notes.
        seed: Of everything that is drawn.
    """
    draw = random.Random(f"cloister/notes/{seed}")
    made: list[dict[str, Any]] = []
    for patient in itertools.count(1):
        if len(made) == count:
            break
        ward, words = draw.choice(list(_WARDS)), _of_patient(draw)
        for _ in range(min(draw.randint(1, 4), count - len(made))):
            record = _filled(draw.sample(_WARDS[ward], draw.randint(1, 2)), words)
            made.append(record | {"patient": f"p{patient:05d}", "ward": ward})
    return made


def letters(count: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
    """Sentences of letters: `text` and `spans`; arguments as for `notes`."""
    draw = random.Random(f"cloister/letters/{seed}")
    words = {
        "name": lambda: draw.choice(("Mr ", "Mrs ", "")) + _name(draw).split()[1],
        "diagnosis": lambda: draw.choice(_DIAGNOSES[:_KNOWN]),
        "drug": lambda: draw.choice(_DRUGS[:_KNOWN]),
        "dose": lambda: _long_dose(draw),
        "date": lambda: _long_date(draw),
    }
    return [_filled(draw.sample(_LETTERS, draw.randint(1, 2)), words) for _ in range(count)]


def _of_patient(draw: random.Random) -> dict[str, Callable[[], str]]:
    """What fills the slots of the notes on one patient."""
    name = _name(draw)
    last = name.split()[1]
    return {
        "name": lambda: draw.choice((name, last, last.upper())),
        "diagnosis": lambda: draw.choice(_DIAGNOSES),
        "drug": lambda: draw.choice(_DRUGS),
        "dose": lambda: _short_dose(draw),
        "date": lambda: _short_date(draw),
    }


def _filled(templates: list[str], words: dict[str, Callable[[], str]]) -> dict[str, Any]:
    """A text of templates, of which each slot is filled by the word of its type, and where these are."""
    text, spans = "", []
    for part, kind in zip(*[iter([*_SLOT.split(" ".join(templates)), ""])] * 2, strict=True):
        text += part
        if kind:
            word = words[kind]()
            spans.append({"start": len(text), "end": len(text) + len(word), "label": kind})
            text += word
    return {"text": text, "spans": spans}


def _name(draw: random.Random) -> str:
    return f"{draw.choice(_GIVEN)} {draw.choice(_FIRST).title()}{draw.choice(_FIRST)}{draw.choice(_LAST)}"


def _long_dose(draw: random.Random) -> str:
    amount, times = draw.choice((5, 10, 20, 50, 100, 500)), draw.choice(("once", "twice"))
    return draw.choice((f"{amount} milligrams {times} a day", f"{amount} mg"))


def _long_date(draw: random.Random) -> str:
    day, month, year = draw.randint(1, 28), draw.randint(1, 12), draw.randint(2019, 2025)
    return draw.choice((f"{day} {_MONTHS[month - 1]} {year}", f"{day}.{month}.{year}"))


def _short_dose(draw: random.Random) -> str:
    amount, unit = draw.choice((5, 10, 20, 25, 40, 50, 75, 100, 250, 500)), draw.choice(("mg", " mg", "mcg"))
    return f"{amount}{unit}{draw.choice(('', ' od', ' bd', ' tds', ' nocte'))}"


def _short_date(draw: random.Random) -> str:
    day, month, year = draw.randint(1, 28), draw.randint(1, 12), draw.randint(19, 25)
    dotted, iso = f"{day:02d}.{month:02d}.{year}", f"20{year}-{month:02d}-{day:02d}"
    return draw.choice((f"{day}.{month}.", f"{day}/{month}/{year}", dotted, iso))
