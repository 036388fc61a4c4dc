"""Admission: a site's own demands on a plan, a run and a cohort, checked on its own machine.

The coordinator may lie, so every message is checked as far as it can be.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from pathlib import Path

from cloister.aggregation.secure.secure_site import Member
from cloister.clients.consent.consents import Consents
from cloister.clients.consent.spending import Spending
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import Membership, SiteConfig
from cloister.lm.model.model import count_parameters
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.privacy.ledger.policy import Policy, load_policy
from cloister.protocol.errors import (
    BudgetError,
    ConsentError,
    PackageError,
    PlanError,
    PolicyError,
    RosterError,
    StaleError,
)
from cloister.protocol.identity.roster import Roster
from cloister.protocol.machine.packages import check
from cloister.protocol.messages.cohort import Draw, draw_of
from cloister.protocol.messages.joining import check_size, sign_joined
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Join, Joined, Purpose, Refused, SumId
from cloister.protocol.messages.refusal import printable, sign_refusal
from cloister.protocol.plan.plan import Plan

_log = logging.getLogger(__name__)


class Admission:
    """The demands of one site.

    Args:
        config: The site's configuration.
        resident: The state that the process has in memory.
        spending: The site's ledger.
    """

    def __init__(self, config: SiteConfig, resident: Resident, spending: Spending) -> None:
        self._config = config
        self._resident = resident
        self._spending = spending

    @property
    def membership(self) -> Membership | None:
        """As whom the site takes part; None where no federation is installed."""
        return self._config.membership

    def check_consent(self, plan: Plan, run: str) -> None:
        """Check the consent to a plan that the site is asked to join. First of all: without it the coordinator learns
        nothing else of the site.

        Raises:
            ConsentError: no consent to the plan is free for the run.
            PinnedError: the site has joined the run with another plan.
            PlanError: the plan sums in clear, which its configuration does not allow.
        """
        self.check_secure(plan)
        try:
            self._consents(plan).check_free(plan.digest(), run)
        except ConsentError:
            self._consents(plan).keep_offer(plan.digest(), plan.to_json())
            raise

    def check_new(self, plan: Plan, run: str) -> None:
        """Check a plan and a run that the site is asked to join, before any work for them.

        Raises:
            PolicyError, BudgetError: its policy does not allow it.
            RosterError: its roster has not as many sites as the plan.
            LedgerError: its ledger is damaged, lost or older.
        """
        if plan.aggregation.secure:
            check_size(self.roster(), plan)
        self._spending.history()  # a site whose ledger is lost or older joins no run
        if self._config.policy:
            self.check_policy(plan, run, terms_of(plan, count_parameters(plan).trained))

    def check_listed(self, plan: Plan) -> None:
        """Refuse what the policy does not list: sketches, and a package; or one that is another than the plan's.

        Raises:
            PolicyError: the site has no policy that lists it.
            PlanError: its policy cannot be read.
            PackageError: it is absent, another one, or installed in place, where its files change unseen.
        """
        named = list(plan.registered())
        if not named and not plan.sketches:
            return
        (self.policy() or Policy()).check_listed(plan)
        for field, name, pinned in named:
            package = name.partition(":")[0]
            if check(field, package, (pinned.version, pinned.sha256)).editable:
                raise PackageError(
                    field,
                    package,
                    expected="a package that is not installed in place, whose files change unseen",
                    fix="install its wheel",
                )

    def has_joined(self, plan: Plan, run: str) -> bool:
        """Whether the run has taken a consent to the plan."""
        return run in self._consents(plan).runs(plan.digest())

    def take_consent(self, plan: Plan, run: str) -> None:
        """Take a consent to the plan for the run, durably: no other run takes it after this.

        Raises:
            ConsentError: no consent is free.
            PinnedError: the site has joined the run with another plan.
            StorageError: it cannot be kept.
        """
        self._consents(plan).take(plan.digest(), run)

    def check(self, plan: Plan, run: str) -> None:
        """Check that a message belongs to a run that the site has joined, and to its plan.

        Raises:
            PinnedError: it does not.
            PlanError: the plan sums in clear, which the configuration does not allow.
        """
        self.check_secure(plan)
        self._consents(plan).check(plan.digest(), run)

    def check_secure(self, plan: Plan) -> None:
        """Refuse a sum in clear that the configuration does not allow, and a masked one without a valid identity.

        Raises:
            PlanError: the configuration does not allow a sum in clear, or the site has no identity key.
            RosterError: the roster has another key for the site, or is not the one that it pinned.
        """
        if plan.aggregation.secure:
            self.member()
        elif self._config.secure:
            raise PlanError(
                "aggregation.secure",
                False,
                expected=f"true: {self._config.name} does not take part in a sum in clear",
                fix="only the site itself can allow it: set secure = false in its TOML",
            )

    def check_round(self, plan: Plan, about: SumId, round_number: int) -> None:
        """Check that the round of an attempt is in the plan, that an evaluation is due at the sites, and that the plan
        divides cohorts so.

        Raises:
            StaleError: the plan has no such round, evaluation or division.
        """
        purpose = about.purpose
        if about.division == "trace" and (purpose == EVALUATE or plan.aggregation.trace_groups == 1):
            raise StaleError(
                f"division of round {round_number}",
                about.division,
                expected="that of the plan, which has no aggregation.trace_groups, or an evaluation's, which has none",
            )
        first = 1 if purpose == TRAIN else 0
        if not first <= round_number <= plan.run.rounds:
            raise StaleError(
                "round", round_number, expected=f"one of {first} to {plan.run.rounds}, as the plan has"
            )
        if purpose == EVALUATE and not (plan.at_sites and plan.evaluates(round_number)):
            raise StaleError(
                f"evaluation of round {round_number}",
                plan.server.evaluation,
                expected="an evaluation at the sites that is due by server.evaluation and server.evaluate_every",
            )

    def cohort(self, plan: Plan, about: SumId) -> tuple[str, ...] | None:
        """The sites of a sum, as this site draws them; None for a sum in clear, of which it knows the size alone."""
        if not plan.aggregation.secure:
            return None
        draw, names = draw_of(plan, about.purpose, about.division), self.roster().names
        return draw.divided(names, about.round)[draw.group_of(self._config.name, names, about.round)]

    def check_unpaid(self, plan: Plan, purpose: Purpose) -> None:
        """Refuse an evaluation under a privacy unit that has no epsilon: it would be a release without a charge.

        Raises:
            PolicyError: the plan has a privacy unit, and charges no evaluations.
        """
        if purpose == EVALUATE and plan.privacy.unit != "none" and not plan.charged_evaluations:
            raise PolicyError(
                "evaluation at a site",
                plan.privacy.unit,
                expected="no privacy unit, or server.evaluation_epsilon: losses on a site's records would be released "
                "without a charge",
            )

    def check_policy(self, plan: Plan, run: str, terms: Terms | None) -> None:
        """Check every demand of the site's policy as it is now.

        Args:
            plan: The plan.
            run: Identity of the run.
            terms: The plan's privacy.

        Raises:
            PolicyError: the policy does not allow the plan.
            PlanError: the policy cannot be read, or the site's ledger is not one that a limit over runs requires.
        """
        policy = self.policy()
        if policy is None:
            return
        if policy.greatest_epsilon is not None:
            self._spending.check_outlives_runs()
        noise, epsilon = 0.0, math.inf
        if terms is not None:
            noise = terms.noise_multiplier
            epsilon = self._spending.after(plan, terms, run, self.rounds(plan), policy.greatest_delta)
        pinned = self.roster().hash.hex() if self._config.roster else ""
        policy.check(
            plan,
            noise=noise,
            epsilon=epsilon,
            cohort=plan.quorum(),
            roster_hash=pinned,
            asked=_asked(plan, terms),
        )

    def rounds(self, plan: Plan) -> int:
        """Rounds of the plan that draw this site; all rounds if the site has no roster."""
        if not self._config.roster or plan.cohort.fraction == 1:
            return plan.run.rounds
        return _rounds_of(draw_of(plan, TRAIN), plan.run.rounds, self.roster().names, self._config.name)

    def policy(self) -> Policy | None:
        """The site's policy, read again each time, so that it can be tightened without stopping the site.

        Raises:
            PlanError: the policy's file cannot be read. The coordinator does not learn the reason.
        """
        if not self._config.policy:
            return None
        try:
            return load_policy(Path(self._config.policy))
        except PolicyError as error:
            _log.error("%s", error)
            raise PlanError("policy of the site", expected="a policy that can be read") from error

    def member(self, needed: int = 0) -> Member:
        """The site's identity, roster and minimum for a secure sum of at least `needed` sites.

        Raises:
            PlanError: the site has no identity key.
            RosterError: the roster has another key for it, or is not the one that it pinned.
        """
        config = self._config
        if not config.identity:
            raise PlanError(
                f"identity of {config.name}",
                expected="a key in the site's TOML, because the plan sums securely",
                fix="make one: cloister site request",
            )
        identity = self._resident.identity(config.identity)
        if identity.public_key() != self.roster().key(config.name):
            raise RosterError(f"identity of {config.name}", expected="the key that the roster has for it")
        return Member(config.name, identity, max(config.minimum_cohort, needed))

    def roster(self) -> Roster:
        """The roster that the site has pinned.

        Raises:
            RosterError: the file has another roster.
        """
        if not self._config.roster:
            raise RosterError(
                f"roster of {self._config.name}",
                expected="an installed federation",
                fix="cloister site install FILE",
            )
        return self._resident.roster(self._config.roster, self._config.roster_hash)

    def joined(self, request: Join, plan: Plan) -> Joined:
        """The site's answer to a join, signed if the site has an identity key.

        Raises:
            RosterError: the key cannot be read.
        """
        name = self._config.name
        speed = self._config.speed if plan.local.balance == "weighted" else 1.0
        if not self._config.identity:
            return Joined(name, speed=speed)
        identity = self._resident.identity(self._config.identity)
        roster, digest = self.roster().hash if self._config.roster else b"", bytes.fromhex(plan.digest())
        return sign_joined(identity, request, site=name, plan=digest, roster=roster, speed=speed)

    def refuse(self, run: str, plan: bytes, error: PolicyError | BudgetError) -> Refused:
        """The site's signed refusal.

        What the site has spent in other runs stays private: a refusal over the budget states no figures.

        Args:
            run: The run that the site was asked to take part in.
            plan: Digest of the plan.
            error: The reason.
        """
        if isinstance(error, BudgetError) or "epsilon" in error.field:
            reason = "the privacy budget of its data does not allow it"
        else:
            reason = str(error)
        name = self._config.name
        if not self._config.identity:
            return Refused(name, run, plan, printable(reason), b"")
        identity = self._resident.identity(self._config.identity)
        return sign_refusal(identity, site=name, run=run, plan=plan, reason=reason)

    def _consents(self, plan: Plan) -> Consents:
        """Those of the site to a plan, and to the other plans of its runs."""
        return consents_to(plan, self._config, self.policy() if plan.digest() != self._config.plan else None)


def _asked(plan: Plan, terms: Terms | None) -> float:
    """The largest epsilon that the plan's question, or all of its evaluations together, may cost a site."""
    if terms is not None and terms.evaluated is not None:
        return terms.allowed_evaluations(plan.cohort.attempts)
    asks = terms is not None and plan.question is not None
    return terms.allowed(1, plan.cohort.attempts) if terms is not None and asks else math.inf


def consents_to(plan: Plan, config: SiteConfig, policy: Policy | None) -> Consents:
    """The consents of a site to a plan, of which its configuration or its policy may give the first."""
    # Only where noise of the site's own is fresh in each run: else two runs of a family could sum the same updates.
    own = plan.privacy.unit != "none" and not plan.privacy.trusted_coordinator
    given = policy is not None and own and plan.family() in policy.families
    return Consents(config.folder, config.name, plan.digest() if given else config.plan)


@lru_cache(maxsize=64)
def _rounds_of(draw: Draw, rounds: int, names: tuple[str, ...], name: str) -> int:
    return sum(name in draw.cohort(names, number) for number in range(1, rounds + 1))
