"""One sum over a cohort, in clear or under masks, in as many attempts as the plan allows.

The steps have the same numbers as in `round.py`. An evaluation at the sites is the same without training.

1. Ask the plan's features what they tell: once for a round, when its first attempt begins. So the round's
   `Instructions` are made, which all sites get in every attempt. Journal the attempt before anything is asked of a
   site, with what depends on more than the last checkpoint. A process that starts again goes on with the attempt that
   was under way.
2. Advertise: each site returns signed one-time keys, and the history of what it carries (`clients/state/carried.py`).
   Unless the instructions are fresh, sites of another history than most are dropouts of the attempt.
3. Share: each site checks the keys of the others and returns encrypted shares.
4. Update: each site makes its vector and returns it, masked; vectors fold into one accumulator as they arrive.
5. Consistency: the survivors sign the one list of survivors.
6. Unmask: journal that list, then ask for the shares. With too few sites, here or before, the attempt ends with nothing
   opened.
7. Charge the ledger; then open: remove the masks from the accumulator and decode it.

Without the secure sum only 1, 4 and 7 remain, and the decoded sum of the same updates is the same to the last bit.
In an asynchronous round step 4 ends when the buffer is full (`buffered.py`).

What each of the steps 2 to 6 ends with is kept, synced, before a request that depends on it is sent (`attempt.py`).
Each has a deadline of its own, which begins with its requests: the plan's for step 4, a quarter of it for the others.

The cohort is the draw of the round, whoever is there: a site that has not joined, or is left out because it lied, is a
dropout. A site answers only one list of survivors in a round (the reason is in `aggregation/secure/secure_sum.py`).
So after shares were requested, later attempts at the same sum ask only those survivors, and need all of them.

With `aggregation.groups`, and where a site is traced (`trace.py`), a round has a sum for each group, and `sums_over`
makes them at the same time: the requests of
one step go to the sites of all groups together, and then each group goes on for itself. So a round takes as long as one
sum over all its sites. An attempt is a generator of what it asks (`Asking`). Refused: a thread for each group, because
one that fails would leave others with their requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from typing import Any

from cloister.protocol.errors import CloisterError, SecureSumError, UpdateError
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import TRAIN, ByFeature, Instructions, Purpose, Step, SumId
from cloister.protocol.plan.plan import Plan
from cloister.server.record import journal as steps
from cloister.server.record.journal import Entry, Journal
from cloister.server.record.phases import Phase
from cloister.server.record.progress import AttemptFailed, RoundStarted
from cloister.server.sum.buffered import Buffered
from cloister.server.sum.complaints import involved, suspects
from cloister.server.sum.masked import Masked
from cloister.server.sum.party import Party
from cloister.server.sum.plain import Attempt, Course, Plain
from cloister.server.sum.wanted import Asking, Asks, Failed, Total, Wanted


def sum_over(party: Party, wanted: Wanted) -> Total | Failed:
    """Make one sum; as `sums_over`."""
    return sums_over(party, [wanted])[0]


def sums_over(party: Party, wanted: Sequence[Wanted]) -> list[Total | Failed]:
    """Sum over the groups of a round's cohort at the same time, each in as many attempts as the plan allows.

    An attempt that an earlier process began, and did not end, goes on. A sum whose attempt has failed waits with the
    next one until the others have ended theirs, so that all sums together take no longer than one in so many attempts.

    Args:
        party: The run.
        wanted: The sums to make, of one purpose, round and model, of different groups.

    Returns:
        The result of each.
    """
    number, purpose = wanted[0].round, wanted[0].purpose
    model_hash = vector_hash(wanted[0].model)
    asking: dict[int, Asking] = {}
    made: dict[int, Total | Failed] = {}
    with ExitStack() as ends:
        sums = [ends.enter_context(closing(_attempts(party, each, model_hash))) for each in wanted]
        ready: Iterable[int] = range(len(sums))
        while len(made) < len(sums):
            for index in ready:
                try:
                    asking[index] = next(sums[index])
                except StopIteration as end:
                    made[index] = end.value
            turn = min((each.turn for each in asking.values()), default=None)
            ready = [index for index, each in asking.items() if each.turn == turn]
            if turn is not None:
                _ask(party, purpose, number, turn[1], [asking.pop(index) for index in ready])
    return [made[index] for index in range(len(sums))]


def _ask(party: Party, purpose: Purpose, number: int, step: Step, asking: Iterable[Asking]) -> None:
    """Ask the sites of several sums for one step, with the step's own deadline as the timeout."""
    cohort, phase = party.plan.cohort, Phase.TRAIN if purpose == TRAIN else Phase.EVALUATE
    deadline_s = cohort.deadline_s if step is Step.UPDATE else cohort.handshake_s()
    requests = {site: request for each in asking for site, request in each.requests.items()}
    take = {site: each.take for each in asking for site in each.requests}
    with party.phases.during(phase) if step is Step.UPDATE else nullcontext():
        for reply in party.members.ask(requests, deadline_s, group=str(number)):
            take[reply.site](reply)


def _attempts(party: Party, wanted: Wanted, model_hash: bytes) -> Asks[Total | Failed]:
    """The attempts at one sum."""
    plan, journal, number = party.plan, party.journal, wanted.round
    groups = party.groups(wanted.purpose, number)
    cohort, shown_group = groups[wanted.group], wanted.group + 1 if len(groups) > 1 else 0
    told = _instructions(party, wanted, model_hash, cohort)
    cohort = party.features.cohort(told.features, cohort)
    trainings: dict[str, tuple[ByFeature, float]] = {}
    noted: Mapping[str, Any] = {}
    earlier = failures = journal.count(wanted.step(steps.FAILED), number)  # by earlier processes
    last = failures + plan.cohort.attempts
    out = barred = _barred(party, wanted, cohort)  # not any more if too few are left
    doubted, turns = set[str](), 0  # that sites in complaints have had in this sum
    apart, dropped = False, ""
    begun = _begun(journal, wanted)
    while True:
        unmasking = journal.newest(wanted.step(steps.UNMASKING), number)
        if (spoiled := journal.newest(wanted.step(steps.SPOILED), number)) is not None:
            return Failed(failures, bound=True, spoiled=spoiled.detail["reason"])
        if failures >= last or (begun is None and _sketched(party, wanted)):
            bound = bool(unmasking) or _sketched(party, wanted)
            return Failed(failures, bound or apart, dropped=dropped, apart=apart and not bound)
        if begun is None:
            able = [site for site in party.present(cohort) if site not in out | doubted]
            begun = _begin(party, wanted, told, unmasking, able)
        sites, needed = begun.detail["cohort"], begun.detail["needed"]
        attempt = Attempt(party, wanted, told, begun.attempt, sites, failures + 1, failures - earlier, noted)
        begun = None
        updates = needed if plan.cohort.mode == "async" else None
        party.observe(
            RoundStarted(number, attempt.number, wanted.purpose, tuple(sites), updates, shown_group)
        )
        started = party.clock()
        under_way = _kind(plan)(attempt)
        course = under_way.course
        try:
            opened = yield from under_way.run(needed)
        except (SecureSumError, UpdateError) as error:
            failures += 1
            apart, dropped = course.apart, _without(doubted) or course.dropped
            trainings |= course.trainings
            turns, noted = turns + bool(doubted), course.noted
            before, doubted = doubted, _doubted(party, wanted, cohort, out, turns)
            if course.too_long or (course.unopened and (course.complained or (doubted and not before))):
                # It tells of a liar, or of a pair with one, that was not known: this ends before there are no more. Or
                # it is the first of the round: the next one leaves out a site of each known pair, perhaps another one.
                last += 1
            else:
                out = out | course.unopened if course.unopened else out - barred
            _note_failed(
                attempt, course, f"group {shown_group}: {error}" if shown_group else str(error), error
            )
            if course.too_long and unmasking:  # which needs the site that is out
                return Failed(failures, bound=True)
            continue
        if timed := party.features.timed(trainings | course.trainings):
            journal.record(number, attempt.number, steps.MEASURED, timed)
            party.features.recall(timed)
        drawn = len(course.answered) if plan.cohort.mode == "async" else len(cohort)
        took, names = party.clock() - started, tuple(sorted(course.folded))
        return Total(opened, names, drawn, attempt.number, took, told.features, course.behind, course.noted)


def _note_failed(attempt: Attempt, course: Course, reason: str, error: CloisterError) -> None:
    """Journal that an attempt has failed, and show it; an `UpdateError` is of a sum that was opened."""
    party, wanted = attempt.party, attempt.wanted
    if isinstance(error, UpdateError):
        spoiled = {"reason": reason, "sites": sorted(course.folded)}
        party.journal.record(wanted.round, attempt.number, wanted.step(steps.SPOILED), spoiled)
    detail = {"reason": reason, "blamed": sorted(course.blamed), "sketched": course.sketched}
    party.journal.record(wanted.round, attempt.number, wanted.step(steps.FAILED), detail)
    party.observe(AttemptFailed(wanted.round, attempt.number, reason))


def _sketched(party: Party, wanted: Wanted) -> bool:
    """Whether sites have sent as many sketches of their updates as they do: an attempt more would be in vain."""
    step = wanted.step(steps.FAILED)
    failed = (each for each in party.journal.of(step, wanted.round) if each.step == step)
    return sum(bool(each.detail["sketched"]) for each in failed) >= party.plan.cohort.attempts


def _barred(party: Party, wanted: Wanted, cohort: Iterable[str]) -> set[str]:
    """The sites that attempts at a sum leave out because they were to blame for lost ones; none without complaints, and
    none that the last attempt of an earlier process has left out too: it had too few sites.

    With shares that few can open, or as the site that stays in its turn, a liar that does not reveal could lose a round
    as often as it is asked. In a lap each site in complaints has one turn. A site that was to blame in s rounds is
    asked in laps 2^s, 2 x 2^s and so on. So it loses few rounds, and an honest site is not out for good.
    """
    could = [site for site in cohort if site not in party.left_out]
    if not (doubted := involved(party.complaints, could)):
        return set()
    entries = party.journal.entries()
    blamed = {(each.step, each.round, site) for each in entries for site in each.detail.get("blamed", ())}
    rounds = Counter(site for _, _, site in blamed)
    lap = 1 + (1 + _sums_before(party, wanted, doubted)) // len(doubted)
    begun, failed = (
        party.journal.newest(wanted.step(step), wanted.round) for step in (steps.BEGUN, steps.FAILED)
    )
    asked = begun.detail["cohort"] if begun and failed else could
    return {site for site in could if lap % 2 ** rounds[site] and site in asked}


def _doubted(party: Party, wanted: Wanted, cohort: Iterable[str], out: set[str], turns: int) -> set[str]:
    """The sites that the next attempt at a sum leaves out because of complaints, besides those that all attempts do.

    Args:
        party: The run.
        wanted: The sum.
        cohort: Its sites.
        out: Those that all attempts leave out from now on.
        turns: That sites in complaints have had in this sum.
    """
    could = [site for site in cohort if site not in party.left_out]
    least = party.quorum(wanted.purpose, wanted.round, wanted.group)
    turn = 1 + turns + _sums_before(party, wanted, involved(party.complaints, could))
    present = [site for site in party.present(could) if site not in out]
    return suspects(party.complaints, could, present, turn=turn, least=least)


def _without(doubted: Collection[str]) -> str:
    """Which sites an attempt left out because of complaints, for the error that ends a run; empty: none."""
    names = ", ".join(sorted(doubted))
    return f" (without {names}: see above which site could not open the shares of which)" if names else ""


def _sums_before(party: Party, wanted: Wanted, sites: set[str]) -> int:
    """The earlier sums of the same purpose for which the same sites in complaints were drawn together, by the plan.

    The number of the round would not do: where cohorts take turns, or evaluations are due every second round, it gives
    the turn to the same site each time.
    """
    purpose, number = wanted.purpose, wanted.round
    if not sites:
        return 0
    due = range(1, number) if purpose == TRAIN else filter(party.plan.evaluates, range(number))

    def same(group: Iterable[str]) -> bool:
        could = [site for site in group if site not in party.left_out]
        return involved(party.complaints, could) == sites

    return sum(any(map(same, party.groups(purpose, each))) for each in due)


def _kind(plan: Plan) -> type[Plain]:
    """The attempts of a plan."""
    return Masked if plan.aggregation.secure else Buffered if plan.cohort.mode == "async" else Plain


def _begin(
    party: Party, wanted: Wanted, told: Instructions, unmasking: Entry | None, able: list[str]
) -> Entry:
    """1. Journal a new attempt, and return its entry.

    Args:
        party: The run.
        wanted: The sum.
        told: What its sites are told.
        unmasking: The attempt in which shares were requested: only its survivors answer, and all are needed.
        able: The sites that can be asked otherwise.
    """
    sites = unmasking.detail["survivors"] if unmasking else able
    needed = len(sites) if unmasking else party.quorum(wanted.purpose, wanted.round, wanted.group)
    step = wanted.step(steps.BEGUN)
    detail: dict[str, Any] = {"cohort": sites, "needed": needed, "fresh": told.fresh}
    if kept := party.features.kept(told.features):
        detail["told"] = kept
    attempt = party.journal.count(step, wanted.round) + 1
    party.journal.record(wanted.round, attempt, step, detail)
    return Entry(wanted.round, attempt, step, detail)


def _begun(journal: Journal, wanted: Wanted) -> Entry | None:
    """The attempt at a sum that an earlier process began and did not end."""
    begun = journal.newest(wanted.step(steps.BEGUN), wanted.round)
    failed = journal.newest(wanted.step(steps.FAILED), wanted.round)
    if begun is None or (failed is not None and failed.attempt >= begun.attempt):
        return None
    return begun


def _instructions(party: Party, wanted: Wanted, model_hash: bytes, cohort: tuple[str, ...]) -> Instructions:
    """What all sites of a sum are told, in each of its attempts: sites keep the updates that they made by it."""
    number = wanted.round
    division = party.division(wanted.purpose, number)
    about = SumId(party.run, bytes.fromhex(party.plan.digest()), wanted.purpose, number, division)
    told: ByFeature = ()
    if wanted.purpose == TRAIN:
        begun = party.journal.newest(wanted.step(steps.BEGUN), number)
        told = party.features.tell(number, cohort, begun.detail.get("told", {}) if begun else {})
    return Instructions(about, model_hash, told, "fresh" if _fresh(party, wanted) else "carried")


def _fresh(party: Party, wanted: Wanted) -> bool:
    """Whether no site uses what it carries: by the journal if the sum has begun.

    In clear each site uses what it has. Under masks all of a sum must have one history, so a round is fresh where
    cohorts are drawn, and after a round of its cohort in which some site took part and is not in the sum.
    """
    plan, journal = party.plan, party.journal
    if wanted.purpose != TRAIN or not plan.carries:
        return True
    if not plan.aggregation.secure:
        return False
    if plan.drawn:
        return True
    begun = journal.newest(wanted.step(steps.BEGUN), wanted.round)
    if begun is not None:
        return bool(begun.detail["fresh"])
    done = journal.newest(steps.DONE, wanted.round - plan.turns)
    return done is None or bool(done.detail.get("behind", True))
