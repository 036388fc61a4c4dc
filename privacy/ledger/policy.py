"""A site's policy: what it demands of a plan before it takes part, checked by the site on its own machine.

The policy is a TOML file that only the site's own people write; only the reason of a refusal leaves the site. A demand
that is left out takes the default that its field states: a policy without any line on privacy still demands a guarantee
and the secure sum. Every comparison is written so that NaN is refused.

Refused: demands in the plan (the coordinator writes it), and a rule language (a data officer must be able to read what
is demanded, and to see that a demand is present).
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

from pydantic import Field, model_validator

from cloister.protocol.errors import PolicyError
from cloister.protocol.plan.plan import SMALLEST_COHORT, ModelSection, Plan
from cloister.protocol.plan.settings import InWords, Section, Settings
from cloister.protocol.questions.registry import of_sequences

_MAIN = ModelSection().revision
Unit = Literal["none", "record", "window", "owner", "site"]
Scheme = Literal["full", "ffa-lora", "rolora", "lora"]
QuestionKind = Literal["compare", "evaluate", "histogram", "mean", "vocabulary"]


class Policy(Section):
    """What a site demands before it takes part. The site itself checks it, and sends a signed refusal to any plan that
    asks for more."""

    units: Annotated[tuple[Unit, ...], Field(min_length=1)] = ("record", "owner", "site")
    """Units of privacy that are accepted: `record` (a whole record of this site), `window` (a piece of a text: a text
    of twenty pieces is twenty units, and is not protected as a whole), `owner` (all records of one person, whom a field
    of the records names), `site` (everything that the site holds); `none` accepts a plan without any guarantee."""
    least_window: Annotated[int, Field(ge=1)] = 1
    """Fewest tokens of a window, where that is the unit."""
    owner_fields: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the field that says who a record belongs to that are accepted, where an owner is the unit; empty: any.
    A field that differs between the records of one person makes each of them an owner."""
    least_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Smallest noise multiplier."""
    greatest_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest epsilon of the site's dataset at `greatest_delta`, over all runs in its ledger, with all rounds of this
    one; over runs whose mechanisms differ the limit holds at twice `greatest_delta`. Left out: no limit."""
    greatest_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest delta; left out: no limit."""
    trusted_coordinator: bool = False
    """Accept a plan whose guarantee depends on the coordinator. With `privacy.trusted_coordinator` the coordinator adds
    the noise: it sees the sum without noise, and no site can check that it adds any. With `privacy.method = "opacus"`
    it must not send weights that were crafted to amplify rounding."""
    least_cohort: Annotated[int, Field(ge=1)] = SMALLEST_COHORT
    """Fewest sites in a sum that is opened; a large cohort may split into smaller sums."""
    secure_required: bool = True
    """Accept only sums under masks."""
    sketches: Annotated[int, Field(ge=0, strict=True)] = 0
    """Most sketches of one update that the site sends (`aggregation.norm_bound` under masks): 128 numbers in each
    attempt at a round, of which a plan has `cohort.attempts`. 0: a plan with sketches is refused. The unit of privacy,
    a record or an owner, covers them, because the update has its noise. They show the coordinator something of the site
    as a whole, which the unit does not cover, and which otherwise the other sites' updates hide. The limit holds in
    each round. Fewer numbers than values can tell an update; a plan has at most a quarter as many. A site without a
    policy refuses such a plan."""
    roster_hash: Annotated[
        str, Field(pattern=r"^([0-9a-fA-F]{64})?$"), InWords("64 hexadecimal digits, or nothing")
    ] = ""
    """Hash of the one roster that is accepted, in hex; empty: any."""
    models: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the models that are accepted, or patterns with `*`, `?` and `[...]`; empty: any. `NAME@REVISION` accepts
    that revision of a hub name (`model.revision`), NAME its branch `main` alone, whatever that has on the day. A commit
    as the revision, or a folder of the site's own, is what was read."""
    tokenizers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the tokenizers that are accepted, with their revisions, as in `models`; empty: any.
    `model.tokenizer = "auto"` offers the model's own, by the model's name, and `bytes` for a `builtin:` model. A
    tokenizer brings its chat template, a program that sees every record."""
    packages: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the installed packages whose tasks may run here (`data.task = "PACKAGE:NAME"`); empty: none. Such a
    package is a program that sees every record, and so is what it imports. The plan's version and hash of its files are
    compared before it is imported."""
    adapters: tuple[Scheme, ...] = ()
    """Adapter schemes that are accepted; empty: any."""
    most_rounds: Annotated[int, Field(ge=1)] | None = None
    """Most rounds of a run; left out: no limit."""
    questions: tuple[QuestionKind, ...] = ()
    """Kinds of questions to which this site may answer (`[question]` in a plan); empty: none. An answer is a noised sum
    over the sites, and is charged as a run is. `evaluate` also accepts runs with `server.evaluation_epsilon`."""
    greatest_question_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest epsilon of one question, at most at `greatest_delta`, with the answers that the plan lets a site make
    again after a crash; also of all evaluations of a run together (`server.evaluation_epsilon`). Left out: no limit but
    `greatest_epsilon`."""
    families: tuple[
        Annotated[
            str,
            Field(pattern=r"^[0-9a-f]{64}$"),
            InWords("64 hexadecimal digits, such as cloister plan check prints"),
        ],
        ...,
    ] = ()
    """Families of plans to which this policy consents: to one run of each plan, without `cloister site accept`. A
    family has one model, data, public training, aggregation, privacy and question, and noise that the sites add. It
    needs `greatest_epsilon`, which limits all runs together."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        limited = self.least_noise > 0 or self.greatest_epsilon is not None or self.greatest_delta is not None
        if "none" in self.units and limited:
            raise PolicyError(
                "units",
                self.units,
                expected='no "none" together with least_noise, greatest_epsilon or greatest_delta: a plan without a '
                "guarantee does not meet them",
                fix='remove "none" from units, or remove those demands',
            )
        if self.families and self.greatest_epsilon is None:
            raise PolicyError(
                "families",
                len(self.families),
                expected="greatest_epsilon as well: without it a family of plans may spend any",
                fix="set greatest_epsilon and greatest_delta, or consent to each plan: cloister site accept",
            )
        for name in ("greatest_epsilon", "greatest_question_epsilon"):
            limit = getattr(self, name)
            if limit is not None and self.greatest_delta is None:
                raise PolicyError(
                    name,
                    limit,
                    expected="greatest_delta as well: at a larger delta the same releases have a smaller epsilon",
                    fix="set greatest_delta, such as 1e-5",
                )
        return self

    def check_listed(self, plan: Plan) -> None:
        """Refuse what a site accepts only if its policy says so: sketches, and something of a package that is not
        listed; nothing is imported before.

        Raises:
            PolicyError: the policy does not say so.
        """
        self._check_sketches(plan)
        for _, name, _ in plan.registered():
            package = name.partition(":")[0]
            if package not in self.packages:
                _refuse("packages", "package", package, _one_of(self.packages) if self.packages else "none")

    def check(
        self,
        plan: Plan,
        *,
        noise: float,
        epsilon: float,
        cohort: int,
        roster_hash: str,
        asked: float = math.inf,
    ) -> None:
        """Accept a plan that meets every demand; refuse any other.

        Args:
            plan: The plan.
            noise: Standard deviation of its noise on a sum of clipped terms, in units of the clipping norm, which may
                have been calibrated to a target epsilon; 0 without a privacy unit.
            epsilon: Epsilon of the site's dataset by its own ledger if the run is completed, with everything that
                earlier runs have spent (`clients/consent/spending.py`), at `greatest_delta` if there is one; infinite
                without a privacy unit.
            cohort: Fewest sites in a sum that is opened (`plan.quorum()`).
            roster_hash: Hash of the roster, in hex.
            asked: The largest epsilon that a question, or all evaluations of a run together, may cost the site, at the
                plan's delta.

        Raises:
            PolicyError: the first demand that is not met, what the plan offers, and what would be accepted. The message
                may say what the site has spent in other runs: it is for the site's own people.
        """
        privacy, model, window = plan.privacy, plan.model, plan.data.sequence_length
        tokenizer, scheme = model.tokenizer_name, model.adapter.scheme
        unit = "window" if (privacy.unit, privacy.record) == ("record", "window") else privacy.unit
        if unit not in self.units:
            _refuse("units", "unit of privacy", unit, _one_of(self.units))
        if unit == "window" and not window >= self.least_window:
            _refuse("least_window", "tokens in a window", window, f"at least {self.least_window}")
        if unit == "owner" and self.owner_fields and plan.data.owner not in self.owner_fields:
            _refuse("owner_fields", "data.owner", plan.data.owner, _one_of(self.owner_fields))
        if not noise >= self.least_noise:
            _refuse("least_noise", "noise multiplier", noise, f"at least {self.least_noise}")
        if self.greatest_delta is not None and not privacy.delta <= self.greatest_delta:
            _refuse("greatest_delta", "privacy.delta", privacy.delta, f"at most {self.greatest_delta}")
        if not self.trusted_coordinator and privacy.trusts_coordinator is not False:
            what = 'privacy.trusted_coordinator, or privacy.method = "opacus",'
            _refuse("trusted_coordinator", what, privacy.trusts_coordinator, "false")
        if not cohort >= self.least_cohort:
            what = "fewest sites in a sum"
            _refuse("least_cohort", what, cohort, f"at least {self.least_cohort}")
        if self.secure_required and plan.aggregation.secure is not True:
            _refuse("secure_required", "aggregation.secure", plan.aggregation.secure, "true")
        self._check_sketches(plan)
        if self.roster_hash and roster_hash.lower() != self.roster_hash.lower():
            _refuse("roster_hash", "roster hash", roster_hash, self.roster_hash)
        named = of_sequences(plan)  # a question about fields has neither
        others = plan.question.others if plan.question is not None else ()
        for name in (model.name, *others) if self.models and named else ():
            if not _listed(name, model.revision, self.models):
                _refuse("models", "model.name", _named(name, model.revision), _one_of(self.models))
        of = model.revision if model.tokenizer == "auto" and tokenizer == model.name else _MAIN
        cuts = named or (plan.question is not None and plan.question.measure == "tokens")
        if self.tokenizers and cuts and not _listed(tokenizer, of, self.tokenizers):
            _refuse("tokenizers", "model.tokenizer", _named(tokenizer, of), _one_of(self.tokenizers))
        if self.adapters and scheme not in self.adapters:
            _refuse("adapters", "model.adapter.scheme", scheme, _one_of(self.adapters))
        if self.most_rounds is not None and not plan.run.rounds <= self.most_rounds:
            _refuse("most_rounds", "run.rounds", plan.run.rounds, f"at most {self.most_rounds}")
        self._check_questions(plan, asked)
        # Last: a plan that is refused for another demand must not tell what the site has spent. One that is refused for
        # none is accepted, and the site joins no other.
        if self.greatest_epsilon is not None and not epsilon <= self.greatest_epsilon:
            what = "epsilon of the site's data after the run"
            _refuse("greatest_epsilon", what, epsilon, f"at most {self.greatest_epsilon}")

    def _check_sketches(self, plan: Plan) -> None:
        if plan.sketches and not self.sketches:
            _refuse(
                "sketches",
                "aggregation.norm_bound",
                plan.aggregation.norm_bound,
                "no value, or sketches that the policy allows (sketches = 3)",
            )
        if plan.sketches and plan.cohort.attempts > self.sketches:
            what = "sketches of one update (cohort.attempts)"
            _refuse("sketches", what, plan.cohort.attempts, f"at most {self.sketches}")

    def _check_questions(self, plan: Plan, asked: float) -> None:
        """Refuse a kind of questions that is not listed, and one that costs too much; as for `check`."""
        found = ""
        if plan.question is not None:
            found, field, what = plan.question.kind, "question.kind", "epsilon of the question"
        elif plan.charged_evaluations:
            found, field, what = "evaluate", "evaluations by the sites", "server.evaluation_epsilon"
        if not found:
            return
        if found not in self.questions:
            accepted = _one_of(self.questions) if self.questions else "no question"
            _refuse("questions", field, found, accepted)
        most = self.greatest_question_epsilon
        if most is not None and not asked <= most:
            _refuse("greatest_question_epsilon", what, asked, f"at most {most}")


def load_policy(path: Path) -> Policy:
    """Read a site's policy.

    Raises:
        PolicyError: the file cannot be read, is not TOML or has no demand, a key is unknown, or a demand is wrong.
    """
    policy = Settings(Policy, "policy", PolicyError).load(path)
    if not policy.model_fields_set:  # a truncated file would demand less than its site expects
        raise PolicyError("policy", str(path), expected="at least one demand; this file has none")
    return policy


def _listed(name: str, revision: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern accepts a name at a revision: one without a revision accepts the default branch alone."""
    for pattern in patterns:
        if revision == _MAIN and fnmatchcase(name, pattern):
            return True
        of, at, wanted = pattern.rpartition("@")
        if at and fnmatchcase(name, of) and fnmatchcase(revision, wanted):
            return True
    return False


def _named(name: str, revision: str) -> str:
    return name if revision == _MAIN else f"{name}@{revision}"


def _refuse(demand: str, what: str, offered: object, accepted: str) -> NoReturn:
    raise PolicyError(what, offered, expected=f"{accepted}, by {demand} of the site's policy")


def _one_of(accepted: tuple[str, ...]) -> str:
    return accepted[0] if len(accepted) == 1 else f"one of {', '.join(accepted)}"
