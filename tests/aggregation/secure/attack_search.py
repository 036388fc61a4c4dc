"""A search for attacks: what a lying coordinator can open when it tells each site whatever it likes.

The coordinator and the colluding sites choose for each honest site the keys that it is shown (one colluding site of
those in U1 has two sets of keys), the sharers, which ciphertexts reach it damaged, the lists of survivors, the
dropouts, and the signatures and statements. What a site does is not modelled: `Decisions` asks a real `SecureSite`,
with real cryptography, and remembers its answer, which depends on the site's own view alone. `Plays` combines the views
of all sites. The model is what the coordinator computes from the answers: `opened_sums`, `smallest_combination`.

What a site sends is no part of this search: `value_search.py` asks on what the vectors of a sum depend.

The rule: no combination of the sums that a round opens has fewer than `Parameters.smallest_part` honest updates, no
site has both its secrets opened in one attempt, and no round opens sums of two models.

Not tried, because it opens nothing more:

- A site is told less than it accepts. A later answer adds to what the coordinator knows; but it leaves a mark, so where
  a second attempt follows, every subset of the answers is tried.
- Fewer valid signatures and statements than there are. Those of other lists and sharers are shown where no valid one
  is, and, where a site refuses the valid ones, signatures that no site made.
- Colluding sites that answer: the coordinator has their secrets and shares. What they send to others is damaged.
- A ciphertext made under other keys than its recipient was shown. It does not open (a test shows it), so it counts as
  damaged. Where a site refuses, those of survivors that masked otherwise are damaged too.
- A list that sites sign and for which no site reveals anything.

Not tried, and tested elsewhere: steps 2 to 4 repeated with another message, an attempt that goes on after a later one
has begun, more than one wrong site among the dropouts.

A set of sites is an integer with the bit 1 << i for site i, which is number i of the roster.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cloister.aggregation.secure import keys as crypto
from cloister.aggregation.secure.secure_site import Member, Past, SecureSite
from cloister.aggregation.secure.secure_sum import (
    Answered,
    Attempt,
    Contract,
    sharers_digest,
    survivors_digest,
    transcript,
)
from cloister.protocol.errors import SecureSumError
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.messages import (
    NOTHING_CARRIED,
    TRAIN,
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Peers,
    Reveal,
    Shares,
    Survivors,
    Unmask,
)
from cloister.protocol.plan.threshold import Tolerance
from cloister.tests.parties.protocol_parties import MODEL, identity, names_of, roster, signed

OTHER_MODEL = hashlib.sha256(b"another model").digest()

T = TypeVar("T")


@functools.cache
def members(sites: int) -> tuple[int, ...]:
    """The numbers of the sites in a set."""
    return tuple(site for site in range(sites.bit_length()) if sites >> site & 1)


def set_of(sites: Iterable[int]) -> int:
    """The set of these sites."""
    return functools.reduce(lambda found, site: found | 1 << site, sites, 0)


@functools.cache
def subsets(sites: int) -> tuple[int, ...]:
    """All subsets of a set, the largest first."""
    found = [0]
    for site in members(sites):
        found += [subset | 1 << site for subset in found]
    return tuple(sorted(found, key=lambda subset: (-subset.bit_count(), subset)))


# What the coordinator computes.


class Upload(NamedTuple):
    """The masks in one honest site's upload."""

    keys: tuple[int, ...]
    """The keys that the site was shown, as in `World.keys`: with other keys a pair has another mask."""
    masked_with: int
    """Its neighbours among the sharers that it was shown."""


def opened_sums(uploads: Mapping[int, Upload], b: int, s: int, colluders: int) -> frozenset[int]:
    """The sets of honest sites whose sums follow from the uploads of one attempt, and whose unions are all that do.

    The upload of i is x_i + PRG(b_i) + sum of +-m_ij over its `masked_with`. The mask m_ij is known if s_i or s_j is,
    or if j colludes. An unknown mask that only i has added hides its upload for good. One that both have added
    disappears only where both uploads are added, so these links divide the sites into classes; the sum of a class is
    opened if all its b are known.

    Args:
        uploads: By honest site.
        b: Sites whose b is known.
        s: Sites whose s is known.
        colluders: Sites that collude.
    """
    classes = {site: 1 << site for site in uploads}
    hidden = 0
    for site, upload in uploads.items():
        if s >> site & 1:
            continue
        for other in members(upload.masked_with & ~s & ~colluders):
            theirs = uploads.get(other)
            if theirs is None or theirs.keys != upload.keys or not theirs.masked_with >> site & 1:
                hidden |= 1 << site
            elif not classes[site] >> other & 1:
                joined = classes[site] | classes[other]
                classes |= dict.fromkeys(members(joined), joined)
    return frozenset(found for found in classes.values() if not found & (hidden | ~b))


@functools.cache
def smallest_combination(sums: frozenset[int], below: int) -> int | None:
    """Fewest sites, fewer than `below`, whose updates alone are in some linear combination of the sums; or None."""
    every = functools.reduce(int.__or__, sums, 0)
    if not sums or below < 1:
        return None
    vectors = np.array([[chosen >> site & 1 for site in members(every)] for chosen in sorted(sums)])
    rank = np.linalg.matrix_rank(vectors)
    for size in range(1, below):
        for sites in itertools.combinations(members(every), size):
            others = [at for at, site in enumerate(members(every)) if site not in sites]
            if (np.linalg.matrix_rank(vectors[:, others]) if others else 0) < rank:
                return set_of(sites)
    return None


# What a site does.


class World(NamedTuple):
    """What a site is told before it masks."""

    keys: tuple[int, ...]
    """For each site of the roster: 0 if it is not in U1, otherwise which of its sets of keys is shown, from 1."""
    sharers: int
    """U2."""


class Question(NamedTuple):
    """What a site is asked in step 6."""

    survivors: int
    dropouts: int


class Conduct(NamedTuple):
    """What a site does after it has masked, if it is shown enough signatures and statements."""

    signed: tuple[int, ...]
    """The lists of survivors that it signs. After the first it is shown all others, in case it signs them too."""
    answers: tuple[Question, ...]
    """What it answers. After the first it is asked everything else, in case it answers that too."""

    @property
    def about(self) -> int:
        """The list that it is asked about first."""
        return self.answers[0].survivors if self.answers else self.signed[0]


class Evidence(NamedTuple):
    """What supports a question."""

    signers: int
    """Sites whose signature of the list, with the same keys and sharers, is shown."""
    statements: int
    """Sites whose statement has the same keys and sharers; the others' are shown as they are."""
    forged: bool = False
    """All of it has the signature of no site."""


class Answers(NamedTuple):
    """What a site has revealed."""

    b: int = 0
    """Sites whose share of b it has revealed."""
    s: int = 0
    """Sites whose share of s it has revealed."""
    mark: Answered | None = None
    """The last mark that it wrote."""


@dataclass(frozen=True)
class Setting:
    """The sites of one search.

    Args:
        kind: What the honest sites are.
        contract: As the sites derive it.
        colluders: The sites that collude.
    """

    kind: type[SecureSite]
    contract: Contract
    colluders: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.contract.roster.names

    @property
    def smallest_part(self) -> int:
        """Fewest honest updates that an opened sum may have."""
        n = len(self.names)
        return self.contract.tolerance.parameters(n, n).smallest_part


def setting(kind: type[SecureSite], n: int, colluders: int, tolerance: Tolerance) -> Setting:
    """n sites, all of which are drawn, of which the last `colluders` collude."""
    contract = Contract("run", roster(names_of(n)), bytes(32), Draw(0, TRAIN, n), tolerance, 32, 2, b"layout")
    return Setting(kind, contract, set_of(range(n - colluders, n)))


def twin(site: SecureSite) -> SecureSite:
    """The same site in the same state: what one is told from now on, the other is not."""
    made = copy.copy(site)
    vars(made).update({name: copy.copy(it) for name, it in vars(site).items() if isinstance(it, dict | list)})
    return made


class Decisions:
    """The real sites of one attempt, each of which is asked about every view once.

    Args:
        sites: The sites of the search.
        attempt: The attempt, at round 1.
        model: Hash of the model.
        contract: What the coordinator follows, if it is not the sites' own.
    """

    def __init__(
        self, sites: Setting, attempt: int = 1, model: bytes = MODEL, contract: Contract | None = None
    ) -> None:
        self.setting = sites if contract is None else dataclasses.replace(sites, contract=contract)
        self.smallest_part = sites.smallest_part
        self.names, self.attempt, self.begin = sites.names, attempt, Begin(1, attempt, model)
        agreed = Attempt(self.setting.contract, self.begin)
        self.context, self.parameters = agreed.context, agreed.parameters
        self.cohort = self._set(agreed.cohort)
        self.colluders = sites.colluders & self.cohort
        self.honest = members(self.cohort & ~self.colluders)
        self.neighbours = {i: self._set(agreed.graph.neighbours(self.names[i])) for i in members(self.cohort)}
        self.holders = {i: self._set(agreed.graph.holders(self.names[i])) for i in members(self.cohort)}
        self._known: dict[Any, Any] = {}

    def _set(self, names: Iterable[str]) -> int:
        return set_of(self.names.index(name) for name in names)

    def _listed(self, sites: int) -> tuple[str, ...]:
        return tuple(self.names[site] for site in members(sites))

    def _once(self, key: Any, find: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    # Before the lists.

    def _advertised(self, i: int, version: int) -> Advertise:
        def find() -> Advertise:
            if not self.colluders >> i & 1:
                return self._new(i, None).advertise(self.begin)
            key = crypto.public_key(hashlib.sha256(f"{i} {version}".encode()).digest())
            return signed(Advertise(self.context, self.names[i], key, key, NOTHING_CARRIED))

        return self._once(("keys", i, version), find)

    def _new(self, i: int, mark: Answered | None) -> SecureSite:
        return self.setting.kind(
            self.setting.contract,
            Member(self.names[i], identity(self.names[i]), 2),
            random=random.Random(f"{self.attempt} {i}").randbytes,
            answered=lambda mark: None,
            past=Past(mark, (1, self.attempt - 1)),
        )

    def _shared(
        self, i: int, keys: tuple[int, ...], mark: Answered | None
    ) -> tuple[SecureSite, Shares] | None:
        def find() -> tuple[SecureSite, Shares] | None:
            site = self._new(i, mark)
            site.advertise(self.begin)
            shown = tuple(self._advertised(j, version) for j, version in enumerate(keys) if version)
            try:
                return site, site.share(Peers(self.context, shown))
            except SecureSumError:
                return None

        return self._once(("shared", i, keys, mark), find)

    def masked(
        self, i: int, world: World, openable: int, mark: Answered | None = None
    ) -> tuple[SecureSite, Masked] | None:
        """Site i after step 4, if it opens the shares of these sites; None if it refuses."""
        return self._once(("masked", i, world, openable, mark), lambda: self._mask(i, world, openable, mark))

    def _mask(
        self, i: int, world: World, openable: int, mark: Answered | None
    ) -> tuple[SecureSite, Masked] | None:
        sealed, hashes = [], []
        for j in members(self.neighbours[i] & world.sharers):
            sent = None if self.colluders >> j & 1 else self._shared(j, world.keys, None)
            name, own = self.names[j], self.names[i]
            ciphertexts = dict(sent[1].sealed) if sent is not None and openable >> j & 1 else {}
            sealed.append((name, ciphertexts.get(own, b"")))
            of_own = [it[1:] for it in sent[1].hashes if it[0] == own] if sent is not None else []
            hashes.append((name, *(of_own or [(bytes(32), bytes(32))])[0]))
        told = Inbox(self.context, self._listed(world.sharers), tuple(sealed), tuple(hashes))
        shared = self._shared(i, world.keys, mark)
        assert shared is not None, "a site shares before it masks"
        site = twin(shared[0])
        try:
            site.receive(told)
        except SecureSumError:
            return None
        vector = np.zeros(self.setting.contract.length, np.uint32)
        site.mask([(0, vector)], instructions=self.begin.instructions)
        return site, site.masked(bytes(32))

    def worlds(self, i: int) -> tuple[World, ...]:
        """All that site i can be told before it masks, and does not refuse."""
        return self._once(("worlds", i), lambda: tuple(self._worlds(i)))

    def _worlds(self, i: int) -> Iterator[World]:
        for advertised in subsets(self.cohort):
            twofold = members(advertised & self.colluders)[-1:]
            versions = [(1, 2) if j in twofold else (advertised >> j & 1,) for j in range(len(self.names))]
            for keys in itertools.product(*versions):
                offered = (World(keys, sharers) for sharers in subsets(self.cohort))
                yield from (world for world in offered if self.masks(i, world))

    # Lists and questions.

    def conducts(self, i: int, world: World, mark: Answered | None) -> tuple[Conduct, ...]:
        """All that site i does after it has masked, if it is shown as much as can be."""
        return self._once(("conducts", i, world, mark), lambda: tuple(self._conducts(i, world, mark)))

    def _conducts(self, i: int, world: World, mark: Answered | None) -> Iterator[Conduct]:
        masked = self.masked(i, world, self.cohort, mark)
        assert masked is not None, "a site masks before it is shown survivors"
        lists, known = subsets(self.cohort), set[tuple[int, ...]]()
        for first in lists:
            site = twin(masked[0])
            if not self._confirms(site, first):
                continue
            others = [listed for listed in lists if listed != first and self._confirms(site, listed)]
            signs = tuple(sorted([first, *others]))
            if signs in known:
                continue
            known.add(signs)
            answered, asked = False, twin(site)
            for question in self._questions(world, signs):
                if self._asks(asked, i, world, question) is None:
                    continue
                more = [
                    other
                    for other in self._questions(world, signs)
                    if other != question and self._asks(asked, i, world, other)
                ]
                yield Conduct(signs, (question, *more))
                answered, asked = True, twin(site)
            if not answered:
                yield Conduct(signs, ())

    def masks(self, i: int, world: World) -> bool:
        """Site i masks in this world."""
        return self._shared(i, world.keys, None) is not None and (
            self.masked(i, world, self.cohort) is not None
        )

    def signs(self, i: int, world: World, mark: Answered | None, survivors: int) -> bool:
        """Site i signs this list, if it is the first that it is shown in this world."""
        masked = self.masked(i, world, self.cohort, mark)
        return masked is not None and self._confirms(twin(masked[0]), survivors) is not None

    def _questions(self, world: World, listed: Iterable[int]) -> Iterator[Question]:
        """About each list: with the right dropouts; about a signed one also with one more or less, and all sharers."""
        for survivors in subsets(self.cohort):
            rest = world.sharers & ~survivors
            yield Question(survivors, rest)
            if survivors in listed:
                wrong = {world.sharers, *(rest ^ 1 << j for j in members(self.cohort))}
                yield from (Question(survivors, dropouts) for dropouts in sorted(wrong - {rest}))

    def _confirms(self, site: SecureSite, survivors: int) -> Confirm | None:
        try:
            return site.confirm(Survivors(self.context, self._listed(survivors)))
        except SecureSumError:
            return None

    def _agreed(self, world: World) -> bytes:
        shown = [self._advertised(j, version) for j, version in enumerate(world.keys) if version]
        digest = transcript(self.context, tuple(shown))
        return sharers_digest(self.context, digest, self._listed(world.sharers))

    def _signature(self, j: int, world: World, survivors: int) -> bytes:
        """Site j's signature of a list: the real one; a colluding site signs anything."""

        def find() -> bytes:
            real = not self.colluders >> j & 1 and self.masks(j, world)
            masked = self.masked(j, world, self.cohort) if real else None
            reply = self._confirms(twin(masked[0]), survivors) if masked is not None else None
            if reply is None:  # of a colluding site, or when a site is shown more than there can be
                digest = survivors_digest(self._agreed(world), self._listed(survivors))
                reply = signed(Confirm(self.context, self.names[j], digest))
            return reply.signature

        return self._once(("signature", j, world, survivors), find)

    def _statement(self, j: int, world: World, *, alike: bool) -> tuple[str, bytes, tuple[str, ...], bytes]:
        """Site j's statement that it has masked in this world, or in another one."""

        def find() -> Masked:
            masked = None
            if alike and not self.colluders >> j & 1 and self.masks(j, world):
                masked = self.masked(j, world, self.cohort)
            digest = self._agreed(world) if alike else bytes(32)
            return masked[1] if masked else signed(Masked(self.context, self.names[j], bytes(32), digest, ()))

        made = self._once(("statement", j, world, alike), find)
        return made.site, made.digest, made.complaints, made.signature

    def _asks(self, site: SecureSite, i: int, world: World, question: Question) -> Reveal | None:
        """Step 6, where the site holds all shares that it can, and is shown as much as can be."""
        return self._unmask(site, i, world, question, Evidence(self.cohort, self.cohort), self.cohort)

    def _unmask(
        self, site: SecureSite, i: int, world: World, question: Question, evidence: Evidence, openable: int
    ) -> Reveal | None:
        survivors = question.survivors
        honest = self.cohort & ~self.colluders
        held = world.sharers & self.neighbours[i] & honest & openable | self.holders[i] & 1 << i
        signatures = tuple(
            (self.names[j], bytes(64) if evidence.forged else self._signature(j, world, survivors))
            for j in members(survivors if evidence.forged else evidence.signers & survivors)
        )
        statements = tuple(
            (self.names[j], bytes(32), (), bytes(64))
            if evidence.forged
            else self._statement(j, world, alike=bool(evidence.statements >> j & 1))
            for j in members(held & survivors)
        )
        request = Unmask(
            self.context, self._listed(survivors), self._listed(question.dropouts), signatures, statements
        )
        try:
            return site.unmask(request)
        except SecureSumError:
            return None

    def answers(
        self,
        i: int,
        world: World,
        mark: Answered | None,
        openable: int,
        conduct: Conduct,
        evidence: tuple[Evidence, ...],
    ) -> Answers:
        """What site i reveals with this evidence for each of its questions."""
        key = ("answers", i, world, mark, openable, conduct, evidence)
        return self._once(key, lambda: self._answer(i, world, mark, openable, conduct, evidence))

    def _answer(
        self,
        i: int,
        world: World,
        mark: Answered | None,
        openable: int,
        conduct: Conduct,
        evidence: tuple[Evidence, ...],
    ) -> Answers:
        masked = self.masked(i, world, openable, mark)
        assert masked is not None
        site, marks = twin(masked[0]), list[Answered]()
        site.answered = marks.append
        for survivors in conduct.signed:
            self._confirms(site, survivors)
        b = s = 0
        for question, shown in zip(conduct.answers, evidence, strict=True):
            reply = self._unmask(site, i, world, question, shown, openable)
            if reply is not None:
                b |= self._set(name for name, _ in reply.self_shares)
                s |= self._set(name for name, _ in reply.mask_shares)
        return Answers(b, s, marks[-1] if marks else None)


# All that the coordinator can tell.

Marks = Mapping[int, Answered]


class Play(NamedTuple):
    """What each honest site was told in one attempt, and what followed."""

    worlds: Mapping[int, World]
    conducts: Mapping[int, Conduct | None]
    answers: Mapping[int, Answers]


class Plays:
    """All plays of one attempt in which some site answers.

    Args:
        decisions: The sites.
        marks: Those that sites wrote in an earlier attempt.
    """

    def __init__(self, decisions: Decisions, marks: Marks) -> None:
        self.decisions, self.marks = decisions, marks
        self._known: dict[Any, Any] = {}
        self._may_sign: dict[World, dict[int, int]] = {}

    @functools.cached_property
    def worlds(self) -> dict[int, tuple[World, ...]]:
        """What each honest site can be told before it masks."""
        return {i: self.decisions.worlds(i) for i in self.decisions.honest}

    @functools.cached_property
    def _in(self) -> dict[World, int]:
        found: dict[World, int] = {}
        for i, worlds in self.worlds.items():
            for world in worlds:
                found[world] = found.get(world, 0) | 1 << i
        return found

    def conducts(self, i: int, world: World) -> tuple[Conduct, ...]:
        """What site i may do after it has masked in this world."""
        return self.decisions.conducts(i, world, self.marks.get(i))

    @property
    def covered(self) -> int:
        """How many combinations of the views that the sites accept there are."""
        total = 1
        for i, worlds in self.worlds.items():
            total *= sum(1 + len(self.conducts(i, world)) for world in worlds) or 1
        return total

    def one(self, told: Mapping[int, World], lists: Mapping[int, int]) -> Play:
        """One play: sites that refuse what they are told before they mask are left out; so are refused lists."""
        decisions = self.decisions
        does: dict[int, Conduct | None] = {}
        for i, world in told.items():
            if decisions.masks(i, world):
                listed = lists[i]
                question = Question(listed, world.sharers & ~listed)
                signs = decisions.signs(i, world, self.marks.get(i), listed)
                does[i] = Conduct((listed,), (question,)) if signs else None
        accepted = {i: told[i] for i in does}
        return self._play(accepted, by_world(accepted), does)

    def __iter__(self) -> Iterator[Play]:
        honest = [i for i in self.decisions.honest if self.worlds[i]]
        yield from self._assign(honest, 0, {})

    def _assign(self, honest: Sequence[int], at: int, told: dict[int, World]) -> Iterator[Play]:
        """Tell the sites from number `at` on something, if then a site can still answer."""
        rest = set_of(honest[at:])
        alike = by_world(told)
        if not any(
            self._viable(world, sites | rest & self._in[world]) for world, sites in alike.items()
        ) and not (any(self._viable(world, rest & sites) for world, sites in self._in.items())):
            return
        if at == len(honest):
            useful = set_of(
                i for world, sites in alike.items() if self._viable(world, sites) for i in members(sites)
            )
            yield from self._behave(honest, 0, told, alike, useful, {})
            return
        for world in self.worlds[honest[at]]:
            yield from self._assign(honest, at + 1, {**told, honest[at]: world})

    def _viable(self, world: World, sites: int) -> bool:
        """Some of these sites answer, if no others are in this world."""
        key = (world, sites)
        if key not in self._known:
            self._known[key] = any(
                self._accepts(i, world, conduct, sites & self._signers(world, conduct.about), sites)
                for i in members(sites)
                for conduct in self.conducts(i, world)
            )
        viable: bool = self._known[key]
        return viable

    def _signers(self, world: World, listed: int) -> int:
        """The sites that may sign this list in this world."""
        if world not in self._may_sign:
            found = self._may_sign[world] = {}
            for j in members(self._in[world]):
                for survivors in {survivors for it in self.conducts(j, world) for survivors in it.signed}:
                    found[survivors] = found.get(survivors, 0) | 1 << j
        return self._may_sign[world].get(listed, 0)

    def _accepts(self, i: int, world: World, conduct: Conduct, signers: int, alike: int) -> bool:
        """Site i answers a question, if these sites sign all lists and those in its world are all."""
        if not conduct.answers:
            return False
        key = (i, world, conduct, signers, alike)
        if key not in self._known:
            every = (signers,) * len(conduct.answers)
            self._known[key] = self._answered(i, world, conduct, every, alike, alike) != Answers()
        accepts: bool = self._known[key]
        return accepts

    def _behave(
        self,
        honest: Sequence[int],
        at: int,
        told: dict[int, World],
        alike: Mapping[World, int],
        useful: int,
        does: dict[int, Conduct | None],
    ) -> Iterator[Play]:
        """Show lists to the sites from number `at` on, if they are in a world in which a site can answer."""
        rest = set_of(honest[at:])
        for (world, listed), asked in self._asked(told, does).items():
            signers = rest & alike[world] & self._signers(world, listed) | signing(does, alike[world], listed)
            if not any(self._accepts(i, world, conduct, signers, alike[world]) for i, conduct in asked):
                return  # nobody answers for a list that was signed
        if at == len(honest):
            play = self._play(told, alike, does)
            if any(answers != Answers() for answers in play.answers.values()):
                yield play
            return
        i = honest[at]
        for conduct in (*(self.conducts(i, told[i]) if useful >> i & 1 else ()), None):
            yield from self._behave(honest, at + 1, told, alike, useful, {**does, i: conduct})

    def _asked(
        self, told: Mapping[int, World], does: Mapping[int, Conduct | None]
    ) -> dict[tuple[World, int], list[tuple[int, Conduct]]]:
        """By world and by the list of the first question: the sites and what they do."""
        asked: dict[tuple[World, int], list[tuple[int, Conduct]]] = {}
        for i, conduct in does.items():
            if conduct is not None:
                asked.setdefault((told[i], conduct.about), []).append((i, conduct))
        return asked

    def _play(
        self, told: dict[int, World], alike: Mapping[World, int], does: dict[int, Conduct | None]
    ) -> Play:
        answers = {}
        for i, conduct in does.items():
            answers[i] = Answers()
            if conduct is None or not conduct.answers:
                continue
            signers = [signing(does, alike[told[i]], question.survivors) for question in conduct.answers]
            same_keys = set_of(j for j in told if told[j].keys == told[i].keys)
            answers[i] = self._answered(i, told[i], conduct, signers, alike[told[i]], same_keys)
        return Play(told, does, answers)

    def _answered(
        self, i: int, world: World, conduct: Conduct, signers: Sequence[int], alike: int, same_keys: int
    ) -> Answers:
        """What site i reveals in the best case for the coordinator.

        Args:
            i: The site.
            world: What it was told before it masked.
            conduct: What it is asked.
            signers: For each question the honest sites that have signed its list in the same world.
            alike: The honest sites in the same world.
            same_keys: The honest sites that were shown the same keys.
        """
        decisions, mark = self.decisions, self.marks.get(i)
        colluders = decisions.colluders
        shown = tuple(Evidence(who | colluders, alike | colluders) for who in signers)
        best = decisions.answers(i, world, mark, same_keys, conduct, shown)
        if damaged := conduct.answers[0].survivors & same_keys & ~alike:
            found = decisions.answers(i, world, mark, same_keys & ~damaged, conduct, shown)
            best = max(best, found, key=lambda it: (it.b | it.s).bit_count())
        if best == Answers():
            forged = (Evidence(0, 0, forged=True),) * len(signers)
            best = decisions.answers(i, world, mark, same_keys, conduct, forged)
        return best


def by_world(told: Mapping[int, World]) -> dict[World, int]:
    """The sites that were told the same."""
    alike: dict[World, int] = {}
    for i, world in told.items():
        alike[world] = alike.get(world, 0) | 1 << i
    return alike


def signing(does: Mapping[int, Conduct | None], sites: int, listed: int) -> int:
    """Those of the sites that sign this list."""
    return set_of(
        j for j in members(sites) if (conduct := does.get(j)) is not None and listed in conduct.signed
    )


def opened(decisions: Decisions, play: Play, asked: int) -> tuple[frozenset[int], int]:
    """The sums that follow from a play if only some sites are asked in step 6, and the sites with both secrets open."""
    known = []
    for secret in ("b", "s"):
        holders = dict.fromkeys(play.worlds, 0)
        for i in members(asked):
            for owner in members(getattr(play.answers[i], secret)):
                if owner in holders:
                    holders[owner] |= 1 << i
        for owner, world in play.worlds.items():
            advertised = set_of(j for j, version in enumerate(world.keys) if version)
            holders[owner] |= decisions.colluders & decisions.holders[owner] & advertised
        enough = decisions.parameters.threshold
        known.append(set_of(owner for owner, who in holders.items() if who.bit_count() >= enough))
    uploads = {
        i: Upload(world.keys, world.sharers & decisions.neighbours[i]) for i, world in play.worlds.items()
    }
    return opened_sums(uploads, known[0], known[1], decisions.colluders), known[0] & known[1]


@dataclass
class Outcome:
    """What a search found."""

    covered: int = 0
    """Combinations of the views that the sites accept."""
    played: int = 0
    """Combinations in which some site reveals a share: each was computed."""
    opening: int = 0
    """Those of them that open a sum."""
    attack: str = ""
    """The first attack, to be read; empty if there is none."""


@dataclass
class Effect:
    """What a first attempt leaves behind: the sums that it opened, and the marks."""

    sums: frozenset[int]
    marks: dict[int, Answered]
    told: str = field(compare=False)


def search_attempt(decisions: Decisions) -> Outcome:
    """All plays of one attempt."""
    plays, outcome, least = Plays(decisions, {}), Outcome(), decisions.smallest_part
    for play in plays:
        sums, both = opened(decisions, play, set_of(play.answers))
        outcome.played += 1
        outcome.opening += bool(sums)
        if both or smallest_combination(sums, least) is not None:
            outcome.attack = told(decisions, play, sums) + verdict(decisions, both, sums, least)
            return outcome
    outcome.covered = plays.covered
    return outcome


@functools.cache
def first_effects(decisions: Decisions) -> tuple[list[Effect], Outcome]:
    """What attempts leave behind that open something, with as few marks as possible."""
    plays, outcome, effects = Plays(decisions, {}), Outcome(), list[Effect]()
    for play in plays:
        outcome.played += 1
        answering = set_of(i for i, answers in play.answers.items() if answers.mark is not None)
        for asked in reversed(subsets(answering)):
            sums, _ = opened(decisions, play, asked)
            if not sums:
                continue
            outcome.opening += 1
            marks = {i: mark for i in members(asked) if (mark := play.answers[i].mark) is not None}
            if not any(known.sums == sums and known.marks.items() <= marks.items() for known in effects):
                effects = [
                    known
                    for known in effects
                    if not (known.sums == sums and marks.items() <= known.marks.items())
                ]
                effects.append(Effect(sums, marks, told(decisions, play, sums, asked)))
    outcome.covered = plays.covered
    return effects, outcome


def search_two_attempts(first: Decisions, second: Decisions) -> Outcome:
    """All plays of a second attempt after each of what a first one can leave behind."""
    effects, known = first_effects(first)
    outcome = dataclasses.replace(known)
    least = first.smallest_part
    for effect in effects:
        plays = Plays(second, effect.marks)
        for play in plays:
            sums, both = opened(second, play, set_of(play.answers))
            outcome.played += 1
            outcome.opening += bool(sums)
            two_models = bool(sums) and first.begin.instructions != second.begin.instructions
            together = effect.sums | sums
            if both or two_models or smallest_combination(together, least) is not None:
                outcome.attack = effect.told + told(second, play, sums)
                if two_models:
                    outcome.attack += "so one round opens sums of two models\n"
                else:
                    outcome.attack += verdict(second, both, together, least)
                return outcome
        outcome.covered += plays.covered
    return outcome


def told(decisions: Decisions, play: Play, sums: Iterable[int], asked: int = -1) -> str:
    """A play, to be read: what each site was told, and what followed."""

    def text(sites: int) -> str:
        return "{" + " ".join(str(site) for site in members(sites)) + "}"

    model = decisions.begin.instructions.hex()[:6]
    cohort, colluders = text(decisions.cohort), text(decisions.colluders)
    threshold = decisions.parameters.threshold
    lines = [
        f"attempt {decisions.attempt}: cohort {cohort}, {colluders} collude, t = {threshold}, model {model}"
    ]
    for i, world in play.worlds.items():
        shown = text(set_of(j for j, version in enumerate(world.keys) if version))
        second = set_of(j for j, version in enumerate(world.keys) if version == 2)
        shown += f" (second keys of {text(second)})" if second else ""
        line = f"  site {i}: U1 = {shown}, U2 = {text(world.sharers)}"
        conduct, answers = play.conducts[i], play.answers[i]
        if conduct is not None:
            line += ", signs U3 = " + ", ".join(text(listed) for listed in conduct.signed)
            if answers != Answers() and asked >> i & 1:
                questions = " and ".join(f"{text(it[0])} without {text(it[1])}" for it in conduct.answers)
                line += f"; asked for {questions}, reveals b of {text(answers.b)}, s of {text(answers.s)}"
        lines.append(line)
    lines.append(
        "  opened: " + (", ".join(f"the sum over {text(chosen)}" for chosen in sorted(sums)) or "no sum")
    )
    return "\n".join(lines) + "\n"


def verdict(decisions: Decisions, both: int, sums: frozenset[int], least: int) -> str:
    """Which rule the sums break."""
    if both:
        return f"so both secrets of the sites {members(both)} are open\n"
    chosen = smallest_combination(sums, least)
    assert chosen is not None
    return f"so a combination of the updates of the sites {members(chosen)} alone is open; at least {least} expected\n"


class Story(NamedTuple):
    """What a coordinator tells some sites in one attempt."""

    advertised: int
    sharers: int
    survivors: int


def tell(
    decisions: Decisions, stories: Mapping[int, Story], asked: int, before: Effect | None = None
) -> tuple[Effect, str]:
    """Tell each site its story and ask some of them for shares; what follows, and the attack if it is one."""
    sites = range(len(decisions.names))
    worlds = {
        i: World(tuple(story.advertised >> j & 1 for j in sites), story.sharers)
        for i, story in stories.items()
    }
    lists = {i: story.survivors for i, story in stories.items()}
    play = Plays(decisions, before.marks if before else {}).one(worlds, lists)
    asked &= set_of(play.answers)
    sums, both = opened(decisions, play, asked)
    marks = {i: mark for i in members(asked) if (mark := play.answers[i].mark) is not None}
    effect = Effect(sums, marks, told(decisions, play, sums, asked))
    together = sums | (before.sums if before else frozenset())
    least = decisions.smallest_part
    if both or smallest_combination(together, least) is not None:
        earlier = before.told if before else ""
        return effect, earlier + effect.told + verdict(decisions, both, together, least)
    return effect, ""
