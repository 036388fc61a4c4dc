"""A search for attacks by what sites are told and carry: whose vectors a lying coordinator can make constants.

`attack_search.py` knows sets of sites; here their vectors are symbols. What a site sends depends on its own records, on
what it is told in the round, and on what it carries into it. Where one site of a sum was told other instructions than
the others, or carries what was computed by others, the coordinator can choose them so that what the others send is
known before (clipped at its bound, drowned by old residuals, scaled away by old moments): the sum less these
constants is that one site's vector.

The rule: in every sum that can be opened, all honest vectors depend on one (told, carried), or on one told that is
fresh. `Values` plays several rounds. In each, the coordinator chooses for each site whether it takes part, what the
attempt that it is asked to join names, what it is told after that, and which keys of the others it is shown, with the
histories that they advertised or with its own written over them. A round has several attempts: a site makes one update
in it, but in any of them. Rounds may overlap: an update may end when its site has joined a later round, and the site
then carries something else than it has advertised there. What a site does is decided by a real `SecureSite`; what it
advertises follows from the real `carried.extended`. Sites that were shown the same (context, transcript, sharers) may
be in one sum; the real sites then sign and reveal it. Sums of sites with different views are the subject of
`attack_search.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from cloister.aggregation.secure.secure_site import Member, Past, SecureSite
from cloister.clients.state.carried import extended
from cloister.protocol.errors import SecureSumError
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import (
    NOTHING_CARRIED,
    TRAIN,
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Instructions,
    Masked,
    Peers,
    Shares,
    SumId,
    Survivors,
    Unmask,
)
from cloister.protocol.plan.threshold import Tolerance
from cloister.tests.aggregation.secure.attack_search import setting, twin
from cloister.tests.parties.protocol_parties import identity

SITES = 3


class Symbol(NamedTuple):
    """What a site is told in a round."""

    model: str
    state: Literal["fresh", "carried"] = "carried"
    planted: str = ""
    """A field of the request that is not in the instructions."""

    @property
    def fresh(self) -> bool:
        return self.state == "fresh"

    def instructions(self, number: int) -> Instructions:
        """As the site gets them."""
        about = SumId("run", bytes(32), TRAIN, number)
        return Instructions(about, self.model.encode().ljust(32, b"."), state=self.state)


Absorbed: TypeAlias = tuple[tuple[int, Symbol], ...]
"""What was told in rounds."""


class Carries(NamedTuple):
    """What a site carries, as all that it depends on besides the site's records."""

    rounds: Absorbed = ()
    """What was told in the rounds since it carried nothing."""
    history: bytes = NOTHING_CARRIED
    """What it advertises."""
    planted: Absorbed = ()
    """Carried besides that, also through fresh rounds, and in no history."""


class Holds(NamedTuple):
    """What a site carries in a round: other than it has advertised, where an earlier update ends in between."""

    joining: Carries = Carries()
    making: Carries = Carries()


Extend = Callable[[bytes, Instructions], bytes]


@dataclass
class Rules:
    """The sites of a search.

    Args:
        kind: What the sites are.
        extend: How an update extends the history.
        carry_more: Whether sites carry a vector that is in no history.
        compares: Whether a site makes an update only from what it has advertised, as `Carried.make` does.
    """

    kind: type[SecureSite] = SecureSite
    extend: Extend = extended
    carry_more: bool = False
    compares: bool = True

    def may_make(self, holds: Holds, symbol: Symbol) -> bool:
        """Whether a site makes an update of what it carries by then."""
        return symbol.fresh or not self.compares or holds.joining.history == holds.making.history

    def depends(self, carries: Carries, symbol: Symbol) -> tuple[Symbol, Absorbed, Absorbed]:
        """All that a site's vector depends on besides its records."""
        return symbol, () if symbol.fresh else carries.rounds, carries.planted

    def after(self, carries: Carries, number: int, symbol: Symbol) -> Carries:
        """What a site carries after its update of a round."""
        before = Carries(planted=carries.planted) if symbol.fresh else carries
        now = ((number, symbol),)
        history = self.extend(before.history, symbol.instructions(number))
        return Carries(before.rounds + now, history, before.planted + now if self.carry_more else ())

    def following(self, holds: Holds, number: int, told: set[Symbol]) -> set[Holds]:
        """What a site may carry in the round after one in which it may make an update by these."""
        now = holds.making
        made = {self.after(now, number, symbol) for symbol in told}
        ended = {Holds(each, each) for each in (now, *made)}
        return {holds, *ended, *(Holds(now, each) for each in made)}


class View(NamedTuple):
    """What a site is shown of another one's keys."""

    site: int
    named: Symbol
    """By the attempt that the other one was asked to join."""
    rewritten: bool
    """Whether its history is replaced by that of the site that is shown it."""


World: TypeAlias = tuple[bytes, bytes, tuple[int, ...]]
"""Context, transcript of the keys of U1, and U1."""
Shown: TypeAlias = dict[int, tuple[SecureSite, Shares, set[Symbol]]]
"""The sites that share in a world, each with what it can be told so that it makes an update."""


@dataclass
class Found:
    """What a search has found."""

    states: int = 0
    """Combinations of what the sites carry into a round."""
    sums: int = 0
    """Worlds in which a sum was opened."""
    attack: str = ""


@dataclass
class Values:
    """All rounds of some sites, none of which colludes.

    Args:
        rules: The sites.
        symbols: What sites may be told.
        rounds: Rounds.
    """

    rules: Rules
    symbols: tuple[Symbol, ...]
    rounds: int
    found: Found = field(default_factory=Found)

    def search(self) -> Found:
        """Play all rounds, up to the first attack."""
        self._setting = setting(self.rules.kind, SITES, 0, Tolerance(0.0, 0.0))
        states: set[tuple[Holds, ...]] = {(Holds(),) * SITES}
        for number in range(1, self.rounds + 1):
            following: set[tuple[Holds, ...]] = set()
            for state in sorted(states):
                self.found.states += 1
                told = self._play(number, state)
                if self.found.attack:
                    return self.found
                if number < self.rounds:
                    choices = [self.rules.following(state[i], number, told[i]) for i in range(SITES)]
                    following |= {tuple(sorted(chosen)) for chosen in itertools.product(*choices)}
            states = following
        return self.found

    def _play(self, number: int, state: tuple[Holds, ...]) -> list[set[Symbol]]:
        """One round: what each site can be told so that it makes an update; the rule is checked for all sums."""
        self._joined: dict[tuple[int, Symbol], tuple[SecureSite, Advertise]] = {
            (i, named): self._join(i, named, number, state[i].joining)
            for i in range(SITES)
            for named in self.symbols
        }
        worlds: dict[World, Shown] = {}
        accepted: list[set[Symbol]] = [set() for _ in range(SITES)]
        for i, named in itertools.product(range(SITES), self.symbols):
            for views in self._views(i, named):
                shared = self._share(i, named, views)
                if shared is None:
                    continue
                may = (it for it in self.symbols if self.rules.may_make(state[i], it))
                told = {it for it in may if self._makes(shared[0], it, number)}
                u1 = tuple(sorted({i, *(view.site for view in views)}))
                world = shared[0].attempt.context, shared[0]._shared.transcript, u1
                worlds.setdefault(world, {}).setdefault(i, (*shared, set()))[2].update(told)
                accepted[i] |= told
        for world, sites in worlds.items():
            self._check(world, sites, number, state)
        return accepted

    def _join(self, i: int, named: Symbol, number: int, carries: Carries) -> tuple[SecureSite, Advertise]:
        names = self._setting.names
        site = self._setting.kind(
            self._setting.contract,
            Member(names[i], identity(names[i]), 2),
            random=random.Random(f"{number} {i}").randbytes,
            answered=lambda _mark: None,
            past=Past(history=carries.history),
        )
        return site, site.advertise(Begin(number, 1, instructions_digest(named.instructions(number))))

    def _views(self, i: int, named: Symbol) -> Iterator[tuple[View, ...]]:
        """The keys of others that a site may be shown: of the same attempt, rewritten or not, or of another one."""
        options: list[list[View | None]] = []
        for j in range(SITES):
            if j != i:
                same = [View(j, named, False), View(j, named, True)]
                others = [View(j, other, False) for other in self.symbols if other != named]
                options.append([None, *same, *others])
        for chosen in itertools.product(*options):
            views = tuple(view for view in chosen if view is not None)
            if views:
                yield views

    def _share(self, i: int, named: Symbol, views: tuple[View, ...]) -> tuple[SecureSite, Shares] | None:
        joined, own = self._joined[i, named]
        shown = [own]
        for view in views:
            message = self._joined[view.site, view.named][1]
            shown.append(replace(message, history=own.history) if view.rewritten else message)
        site = twin(joined)
        try:
            shares = site.share(Peers(own.context, tuple(sorted(shown, key=lambda it: it.site))))
        except SecureSumError:
            return None
        return site, shares

    def _makes(self, site: SecureSite, symbol: Symbol, number: int) -> bool:
        """Whether a site makes an update when it is told this."""
        try:
            site.check_told(instructions_digest(symbol.instructions(number)), fresh=symbol.fresh)
        except SecureSumError:
            return False
        return True

    def _check(self, world: World, sites: Shown, number: int, state: tuple[Holds, ...]) -> None:
        """The rule, for all that sites of one view can have been told and carry, if their sum is opened."""
        summed = [i for i in sorted(sites) if sites[i][2]]
        if not summed or not self._opens(world, sites, summed):
            return
        self.found.sums += 1
        depends = {i: {self.rules.depends(state[i].making, it) for it in sites[i][2]} for i in summed}
        if len(set().union(*depends.values())) > 1:
            lines = [f"round {number}: the sum over the sites {summed} is opened"]
            for i in summed:
                for symbol, carried, planted in sorted(depends[i]):
                    more = f" and {read(planted)}" if planted else ""
                    lines.append(f"  site {i} is told {name(symbol)}, and carries {read(carried)}{more}")
            self.found.attack = "\n".join(lines)

    def _opens(self, world: World, sites: Shown, summed: Sequence[int]) -> bool:
        """Whether the real sites mask, sign and reveal the sum over these; others that have shared are dropouts."""
        context, _, sharers = world
        names = self._setting.names
        if not set(sharers) <= set(sites):
            return False
        u2, u3 = (tuple(names[i] for i in some) for some in (sharers, summed))
        lost = tuple(name for name in u2 if name not in u3)
        said: list[tuple[SecureSite, Masked, Confirm]] = []
        try:
            for i in summed:
                site, others = sites[i][0], [j for j in sharers if j != i]
                sealed = tuple((names[j], dict(sites[j][1].sealed)[names[i]]) for j in others)
                hashes = tuple((names[j], *hashes_for(sites[j][1], names[i])) for j in others)
                site.receive(Inbox(context, u2, sealed, hashes))
                vector = np.zeros(self._setting.contract.length, np.uint32)
                site.mask([(0, vector)], instructions=site.attempt.instructions)
                masked = site.masked(bytes(32))
                said.append((site, masked, site.confirm(Survivors(context, u3))))
            signatures = tuple((it.site, it.signature) for _, _, it in said)
            stated = tuple((it.site, it.digest, it.complaints, it.signature) for _, it, _ in said)
            for site, _, _ in said:
                site.unmask(Unmask(context, u3, lost, signatures, stated))
        except SecureSumError:
            return False
        return True


def hashes_for(shares: Shares, holder: str) -> tuple[bytes, bytes]:
    """The hashes of the shares that a site made for a holder."""
    return next((of_b, of_s) for site, of_b, of_s in shares.hashes if site == holder)


def name(symbol: Symbol) -> str:
    """A symbol, to be read."""
    return " ".join(filter(None, symbol))


def read(rounds: Absorbed) -> str:
    """What a site carries, to be read."""
    return ", ".join(f"{name(symbol)} of round {number}" for number, symbol in rounds) or "nothing"
