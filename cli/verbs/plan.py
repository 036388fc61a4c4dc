"""`cloister plan`: make a plan, and check it before a run.

Work with plans: what the parties agree on before a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from cloister.aggregation.features.feature import Basis
from cloister.aggregation.features.norm_bound import bound_of, longest_signal
from cloister.aggregation.features.registry import norm_of_update
from cloister.aggregation.vector.sketch import REACH, ROWS
from cloister.cli.options.shared_options import Parser, add_action, chosen_plan
from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.accounting.claims import relation, tells, thing, unit
from cloister.privacy.accounting.signal import Signal, advice, signal_of
from cloister.privacy.accounting.terms import Terms, participation, terms_of
from cloister.privacy.mechanism.correlated import Blt, loss
from cloister.privacy.mechanism.unit_sum import UnitSum
from cloister.privacy.report.answer import SIZES
from cloister.privacy.report.figures import at_most
from cloister.protocol.errors import RunFolderError
from cloister.protocol.machine.packages import installed
from cloister.protocol.machine.prerequisites import size
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.plan import soundness
from cloister.protocol.plan.pin import packages_in, pinned, read_text, weighted
from cloister.protocol.plan.plan import Plan, PrivacySection, SimulationSection
from cloister.protocol.plan.template import to_toml
from cloister.protocol.questions.estimate import CLEAR
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.within import question_within
from cloister.simulations.planning import against_all, evaluations

if TYPE_CHECKING:
    from cloister.lm.model.model import Counts
    from cloister.server.federation.cost import Cost, SecureCost


def options(parser: Parser) -> None:
    """The actions `new`, `check`, `pin` and `weights`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    new = add_action(actions, _new)
    new.add_plan(default="the defaults of all fields")
    check = add_action(actions, _check)
    check.add_plan()
    check.add_json()
    pin = add_action(actions, _pin)
    pin.value("plan PLAN", "a TOML file")
    weights = add_action(actions, _weights)
    weights.value("plan PLAN", "a TOML file")
    weights.value("--from-question RUN", "run folder of a histogram of the labels", required=True)


def _pin(arguments: argparse.Namespace) -> int:
    """Write the versions and the files' hashes of packages into a plan.

    Write the version and the hash of the installed files of each package that the plan names, such as in
    data.task = "PACKAGE:NAME", so that every party compares them with what it has installed. The rest of the file
    stays as it is.
    """
    path = Path(arguments.plan)
    text = read_text(path)
    packages = packages_in(text, str(path))
    found = {package: installed(package) for package in packages.values()}
    pins = {section: found[package][:2] for section, package in packages.items()}
    write_bytes(path, pinned(text, pins).encode())
    for package, has in found.items():
        print(f"{package} {has.version}, files {has.sha256}")
        if has.editable:
            print("it is installed in place: a deployment refuses it until its wheel is installed")
    return 0


def _weights(arguments: argparse.Namespace) -> int:
    """Write weights of the classes into a plan, from the answer to a question.

    Write data.class_weights, in proportion to the inverse of each class's count, and the digest of the answer that the
    counts are from. The answer was charged when it was asked for; its weights cost nothing more. The rest of the file
    stays as it is.
    """
    from cloister.server.record.folder import RunFiles, read_answer
    from cloister.server.record.outcome import private_plan

    path, files = Path(arguments.plan), RunFiles(Path(arguments.from_question))
    text = read_text(path)
    private_plan(files)
    answer, classes = read_answer(files), soundness.Plan.parse(weighted(text, {}, "")).data.classes
    if answer.kind != "histogram" or not classes or not {*classes} <= answer.cells.keys():
        expected = (
            f"the run of a histogram whose question.values have the plan's classes, {', '.join(classes)}"
        )
        raise RunFolderError(arguments.from_question, expected=expected)
    digest = hashlib.sha256(files.answer.read_bytes()).hexdigest()
    # A class that is not told apart from none counts as the smallest that would be.
    least = CLEAR * answer.deviation
    counts = {name: max(answer.cells[name], least) for name in classes}
    mean = sum(counts.values()) / len(counts)
    weights = {name: min(max(mean / count, 0.001), 1000.0) for name, count in counts.items()}
    write_bytes(path, weighted(text, weights, digest).encode())
    for name, weight in weights.items():
        hidden = "" if answer.cells[name] >= least else ", of a count that the noise hides"
        print(f"{name} {weight:g}{hidden}")
    return 0


def _new(arguments: argparse.Namespace) -> int:
    """Print a plan to edit, with the meaning of each field.

    Print a plan as a TOML file: each field with its value, after a comment that says what it means. A field without a
    value is a comment alone. Such as: cloister plan new --set simulation.source=notes.txt > my-plan.toml
    """
    plan = chosen_plan(arguments, default="")

    print(to_toml(plan, comments=True), end="")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Print a plan as it will run, and its cost; refuse it if unsound.

    Print a plan with every default filled in, its digest, and its cost for a site and for the coordinator. An unsound
    plan is refused, with the field that is wrong; so is a plan whose simulation.source is missing on this machine, has
    other fields than [data], or has too few records for the sites. The records of simulation.source, public.source and
    server.evaluation are counted where these are on this machine.
    """

    plan = chosen_plan(arguments)
    from cloister.lm.model.model import count_parameters
    from cloister.server.federation.cost import cost, secure_cost

    records, not_used = _records(plan)
    counts = count_parameters(plan)
    estimate, bound = cost(plan, *counts), _bound(plan, counts)
    secure = secure_cost(plan)
    terms = terms_of(plan, estimate.trained_parameters)
    signal = _signal(plan, terms, counts.summed) if terms else None
    wrong = advice(plan, signal, _protected(plan)) if signal else []
    if arguments.json:
        found = {
            "plan": json.loads(plan.to_json()),
            "digest": plan.digest(),
            "family": plan.family(),
            **asdict(estimate),
        }
        found |= {"records": records, "not_used": not_used}
        found["least_steps"], found["most_steps"] = plan.local.step_limits()
        if plan.cohort.mode == "async":
            found["buffer"], found["staleness"] = plan.quorum(), plan.cohort.most_stale()
        found |= asdict(secure) if secure else {}
        found |= bound
        if terms and _asked(plan, terms):
            found["expected_errors"] = expected_errors(plan, terms)
        if signal:
            found["signal"] = asdict(signal) | {"advice": wrong}
        print(json.dumps(found | (_privacy(plan, terms) if terms else {})))
        return 0
    console = PipedConsole()
    _print_plan(console, plan)
    counted = [(f"records: {of}", f"{count:,}") for of, count in records.items()]
    sections: list[Iterable[tuple[str, str]]] = [counted, _of_round(plan, estimate), bound_rows(plan, bound)]
    sections += [_of_secure_sum(plan, secure)] if secure else []
    sections += [privacy_rows(plan, terms)] if terms else []
    sections += [signal_rows(plan, signal)] if terms else []
    _print_cost(console, plan, sections)
    if terms and _asked(plan, terms):
        console.print(_of_answer(plan, terms))
    if not_used:
        console.say(f"records of the sites: {not_used}", "bold yellow")
    for text in wrong:
        console.say(text, "bold yellow")
    return 0


def _signal(plan: Plan, terms: Terms, summed: int) -> Signal | None:
    """The signal of a run, by public figures alone; None where the plan does not say how many units a site has."""
    if plan.privacy.unit == "site":
        return signal_of(plan, terms, summed, [1])
    return None if plan.cohort.units is None else signal_of(plan, terms, summed, [plan.cohort.units])


def _protected(plan: Plan) -> int:
    """About how many units all sites have."""
    return plan.cohort.sites * (plan.cohort.units or 1)


def _bound(plan: Plan, counts: Counts) -> dict[str, float]:
    """The bound on an update's norm, that with the room for its rounding, and what a lying site adds at most, in the
    longest signals of an honest one."""
    if plan.aggregation.norm_bound is None:
        return {}
    from cloister.lm.model.model import outline
    from cloister.lm.model.schedule import Schedule

    sizes = {counts.summed}
    if plan.scheduled:  # of all rounds, and not only of the first ones, which `counts` looks at
        sizes = Schedule.of(plan, outline(plan).layout).sizes(plan.run.rounds)
    rounds = [Basis(plan, size, most=counts.trained) for size in sizes]
    most = [norm_of_update(basis) for basis in rounds]
    times = REACH if plan.aggregation.secure else 1.0
    reach = max(times * norm / longest_signal(basis) for norm, basis in zip(most, rounds, strict=True))
    found = {
        "norm_bound": max(map(bound_of, rounds)),
        "norm_bound_with_rounding": max(most),
        "liar_reach": reach,
        "liar_reach_of_mean": times * max(most) / plan.quorum(),
    }
    return found | (
        {"sketched": plan.cohort.attempts * ROWS, "of_values": min(sizes)} if plan.sketches else {}
    )


def bound_rows(plan: Plan, bound: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The bound on the length of updates, if there is one."""
    if bound:
        yield "bound on an update's L2 norm", f"{bound['norm_bound']:.4g}"
        yield "with room for its rounding, at most", f"{bound['norm_bound_with_rounding']:.4g}"
        times = f"{REACH:g} times the latter" if plan.aggregation.secure else "the latter"
        signals = f"{bound['liar_reach']:.3g} longest signals of an honest one"
        yield "a lying site adds at most", f"{times}: as much as {signals}"
        if plan.sketches:
            missing = max(n - plan.quorum(n) for n in plan.summed())
            more = f"{2 * REACH:g} times that norm; at most {missing} may drop out after the upload"
            yield "more, for each honest site that sends no sketch", more
        least = plan.quorum()  # of a group that traces a site, where all others are lost
        moved = bound["liar_reach_of_mean"]
        yield (
            f"of a mean of {least:,} sites, the fewest, it moves at most",
            f"{moved:.3g}, beside update_norm",
        )
        if plan.sketches:
            shown = (
                f"{bound['sketched']:,.0f} of {bound['of_values']:,.0f}, in {plan.cohort.attempts} attempts"
            )
            yield "numbers that sketches show of an update, at most", shown


def _records(plan: Plan) -> tuple[dict[str, int], str]:
    """Count the records of a plan, by what they are for, and say which of the sites' cannot be used.

    A plan that leaves `simulation.source` may be for a deployment, in which the other sources are on another machine;
    a data set of the hub is read when the run begins.

    Raises:
        DataError: records are missing, have other fields, or are too few for the plan's sites.
    """
    from cloister.lm.text.records import Unusable
    from cloister.lm.text.tokenizer import looks_like_path
    from cloister.simulations.federation import divided, not_used, public_sources, usable

    def local(source: str) -> bool:
        here = Path(source).expanduser().exists() or source.startswith("builtin:")
        return here or (own and (looks_like_path(source) or bool(Path(source).suffix)))

    own = plan.simulation.source != SimulationSection().source
    counts, line = {}, ""
    if own and local(plan.simulation.source):
        unusable = Unusable() if plan.privacy.unit == "none" else None  # else no charge covers what is said
        kept, parts, apart = divided(plan, unusable=unusable)
        counts = {"simulation.source": len(kept) + len(apart), "fewest at a site": min(map(len, parts))}
        line = not_used(unusable.left_out, unusable.places, plan) if unusable else ""
    # Of public records nobody is an owner.
    data = plan.data.model_copy(update={"owner": ""})
    public = plan.model_copy(update={"privacy": PrivacySection(), "data": data})
    for field, source, split in public_sources(plan):
        if source and local(source):
            counts[field] = len(usable(public, field, source, split).records)
    return counts, line


def _privacy(plan: Plan, terms: Terms) -> dict[str, object]:
    rounds = plan.run.rounds
    found: dict[str, object] = {
        "unit": terms.unit,
        "noise_multiplier": terms.noise_multiplier,
        "epsilon": terms.epsilon(rounds),
        "delta": terms.delta,
        "relation": relation(plan),
    }
    if tells(plan):
        found["against_all_epsilon"] = against_all(terms, rounds).epsilon
    if terms.evaluated is not None:
        found["evaluations"] = len(terms.evaluated.due)
        found["evaluations_epsilon"] = evaluations(terms)
    return found


def _correlated(plan: Plan, blt: Blt) -> tuple[str, str]:
    """The row of correlated noise: what it does to the sum of all rounds."""

    pattern = participation(plan)
    assert pattern is not None, "a mechanism with a matrix has a plan with a pattern"
    found = f"{len(blt.decay)}: {loss(blt, pattern):.2f}; independent: {loss(Blt(), pattern):.2f}"
    return "buffers of correlated noise: noise on the sum of all rounds", found


def _print_plan(console: PipedConsole, plan: Plan) -> None:

    for line in to_toml(plan, comments=False).splitlines():
        console.say(line, "bold" if line.startswith("[") else "")
    console.print()


def _print_cost(console: PipedConsole, plan: Plan, sections: Iterable[Iterable[tuple[str, str]]]) -> None:

    table = columns("", "", title="Cost")
    for section in sections:
        for row in section:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    for warning in warnings(plan):
        console.say(warning, "bold yellow")
    console.say(f"digest {plan.digest()}", "dim")
    console.say(f"family {plan.family()}", "dim")


def warnings(plan: Plan) -> list[str]:
    """What a site's people must know before they consent to a plan."""
    found = []
    if plan.privacy.unit == "none":
        found.append("no privacy unit: the model may repeat its training data")
    if plan.sketches:
        attempts = plan.cohort.attempts
        found.append(
            f"aggregation.norm_bound: the coordinator sees up to {attempts * ROWS:,} numbers of each site's own noised "
            f"update, {ROWS} in each of {attempts} attempts; they tell of the site as a whole"
        )
    if plan.aggregation.trace_groups > 1:
        found.append(
            f"aggregation.trace_groups: at any time the coordinator may sum a round in {plan.aggregation.trace_groups} "
            f"groups; its sums may then be of {plan.quorum()} sites, and of {plan.honest()} honest updates"
        )
    if not plan.aggregation.secure:
        found.append("the sum is in clear: the coordinator sees every site's update")
    elif plan.privacy.unit == "none" and plan.local.balance != "fixed":
        found.append(
            "local.balance without a privacy unit: a crafted model can single out a site by its steps"
        )
    return found + divided_owners(plan)


def divided_owners(plan: Plan) -> list[str]:
    """What a simulation may do to owners, whose records a site has whole where nobody divides them."""
    own = plan.simulation.source != SimulationSection().source and not plan.simulation.sites
    if not (plan.owners_divided and own) or (plan.question and plan.question.sites_of_owner > 1):
        return []
    what = (
        "an owner's records may be at several simulated sites, and then the owner is a unit at each of them"
    )
    return [f"{what}: set simulation.field to data.owner"]


def _of_round(plan: Plan, estimate: Cost) -> Iterator[tuple[str, str]]:
    """What a round costs without privacy and secure sum."""
    if plan.question is None:
        yield "parameters", f"{estimate.parameters:,}"
    yield "cells" if plan.question else "trained and summed", f"{estimate.trained_parameters:,}"
    cohort = plan.cohort
    if cohort.mode == "async":
        yield "sites that train at the same time", f"{estimate.cohort:,}"
        yield "updates in a round, asynchronous (FedBuff)", f"{plan.quorum():,}"
        yield "rounds after which an update is dropped", f"{cohort.most_stale():,}"
    else:
        yield "sites in a round", f"{estimate.cohort:,}"
    if plan.question is not None:
        yield "to a site, and from it", f"{size(estimate.bytes_down)}, {size(estimate.bytes_up)}"
        return
    least, most = plan.local.step_limits()
    by = {"fixed": "", "weighted": ", by declared speed", "dynamic": ", by measured speed"}
    steps = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    yield "local steps of a site in a round", f"{steps}{by[plan.local.balance]}"
    yield "to a site, each round", size(estimate.bytes_down)
    yield "from a site, each round", size(estimate.bytes_up)
    yield "models and updates, all rounds", size(estimate.bytes_of_run)
    yield "memory at the coordinator, besides the program", size(estimate.coordinator_bytes)
    yield "tokens trained on in a round, at most", f"{estimate.tokens_per_round:,}"
    if plan.aggregation.groups > 1:
        of = " or ".join(f"{n:,}" for n in plan.in_groups(plan.aggregation.groups))
        yield "groups, of whose means the median is taken", f"{plan.aggregation.groups:,} of {of} sites"


def signal_rows(plan: Plan, signal: Signal | None) -> Iterator[tuple[str, str]]:
    """How long the noise is beside what records add to a step and to a round."""
    if signal is None:
        if plan.question is None:
            yield "noise beside the signal", "not known: set cohort.units, about how many a site has"
        return
    if plan.privacy.unit != "site":
        yield "expected units of a batch", f"{signal.batch:,.3g} of about {signal.most:,} at a site"
    each = f"{signal.coordinate:.2g} C, beside {signal.typical:.2g} C of a clipped gradient"
    yield "noise of a coordinate of a mean", each
    if plan.privacy.unit != "site":
        yield "noise of a step, over its longest signal", f"{signal.step:.2g}"
    yield "noise of a round, over its longest signal", f"{signal.round:.2g}"


def _of_answer(plan: Plan, terms: Terms) -> Table:
    """How far the figures of an answer will be off, by the noise alone, if all sites answer."""
    found = expected_errors(plan, terms)
    title = "Answer" if plan.question else "Each evaluation by the sites, of so many held-out units in all"
    table = columns("standard deviation by the noise", *(f"{units:,} units" for units in found), title=title)
    for name in next(iter(found.values())):
        errors = (found[units][name] for units in found)
        table.add_row(Text(name), *("not told" if error is None else f"{error:.2g}" for error in errors))
    return table


def expected_errors(plan: Plan, terms: Terms) -> dict[int, dict[str, float | None]]:
    """By the number of units of all sites together, the expected standard deviation of each figure by the noise."""
    question, mechanism = _asked(plan, terms) or (plan, None)
    assert mechanism is not None, "only a question, or an evaluation by the sites, has an answer"
    sites = plan.cohort.size()
    deviation = mechanism.deviation(sites)
    return {
        units: {
            name: error if math.isfinite(error) else None
            for name, error in kind_of(question).expected(question, deviation, units)
        }
        for units in ((sites,) if plan.privacy.unit == "site" else SIZES)
    }


def _asked(plan: Plan, terms: Terms) -> tuple[Plan, UnitSum] | None:
    """The plan's question, or that of each of its evaluations by the sites, and its mechanism."""
    if terms.asked is not None:
        return plan, terms.asked
    return None if terms.evaluated is None else (question_within(plan), terms.evaluated.mechanism)


def _of_secure_sum(plan: Plan, secure: SecureCost) -> Iterator[tuple[str, str]]:
    """What the secure sum tolerates and costs."""
    of_group = " of a group" if plan.aggregation.groups > 1 else ""
    yield f"secure sum{of_group}: sites n, neighbours k, threshold t", f"{secure.n}, {secure.k}, {secure.t}"
    yield "dropouts that each sum tolerates", f"{plan.spare()}"
    yield "dropouts and colluders assumed", f"{secure.dropouts} and {secure.colluders}"
    yield "sites that must finish", f"{secure.quorum}"
    if plan.aggregation.trace_groups > 1:
        of = " or ".join(f"{n:,}" for n in plan.in_groups(plan.aggregation.trace_groups))
        yield "groups that trace a site", f"{plan.aggregation.trace_groups:,} of {of} sites"
    yield "sites in an opened sum, at least (least_cohort)", f"{plan.quorum()}"
    yield "honest updates in an opened sum, at least", f"{plan.honest()}"
    yield "more from a site, each round", size(secure.overhead_bytes_up)
    yield "more to a site, each round", size(secure.overhead_bytes_down)


def privacy_rows(plan: Plan, terms: Terms) -> Iterator[tuple[str, str]]:
    """What is protected, and what it costs."""

    yield "privacy: what is protected", unit(plan)
    yield "noise multiplier", f"{terms.noise_multiplier:g}"
    if terms.mechanism is not None and terms.mechanism.correlation is not None:
        yield _correlated(plan, terms.mechanism.correlation)
    spent = f"{at_most(terms.epsilon(plan.run.rounds))} at delta {terms.delta:g}"
    evaluated = "" if terms.evaluated is None else " and evaluations"
    yield f"epsilon of one {thing(plan)} after all {plan.run.rounds} rounds{evaluated}", spent
    if terms.evaluated is not None:
        many = f"{at_most(evaluations(terms))} at delta {terms.delta:g}"
        yield f"  {len(terms.evaluated.due)} evaluations by the sites alone", many
    if tells(plan):
        most = f"{at_most(against_all(terms, plan.run.rounds).epsilon)} at delta {terms.delta:g}"
        yield "  against the coordinator and all other sites together", most
