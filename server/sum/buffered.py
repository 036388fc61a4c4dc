"""One attempt at an asynchronous round."""

from __future__ import annotations

from functools import partial

from cloister.aggregation.features.asynchronous import STALENESS, TOO_STALE
from cloister.aggregation.vector.average import BufferedSum, OfModel, Opened
from cloister.protocol.errors import StaleError, TooFewSitesError
from cloister.protocol.messages.messages import TRAIN, Contribute, Contribution, Instructions
from cloister.server.record.journal import OPENING
from cloister.server.record.phases import Phase
from cloister.server.sum.plain import Plain, pieces_of
from cloister.server.sum.wanted import Asks


class Buffered(Plain):
    """One attempt at an asynchronous round (FedBuff): the sum of the next updates that arrive, of whatever model.

    Each site trains at most one update of each model, and a request outlives the round in which it was sent:

    - At the start of the round each site that is not asked is asked for an update of its model.
    - An update of an earlier round counts by its staleness. It has the layout, the part of the model and the bounds of
      that round.
    - A site whose update is in the buffer is asked again at the start of the next round. So a buffer has at most one
      update of each site: otherwise a fast site, or one that chooses when it answers, could fill the buffer alone.
    - A site whose request of an earlier round brought no update, or one that is too stale, is asked for one of this
      round. If that fails too, it is asked again at the start of the next round.

    So the round does not wait for a slow, failed or silent site while there are enough others. Where no request is
    left and too few updates have arrived, the attempt has failed; the next one asks all sites again, which have kept
    their updates.
    """

    def run(self, needed: int) -> Asks[Opened]:
        """Run the attempt; its requests are those of `Outstanding`.

        Raises:
            TooFewSitesError: too few updates have arrived, and no site is left that could send one.
        """
        yield from ()
        party, number, outstanding = self.party, self.wanted.round, self.party.outstanding
        assert outstanding is not None, "a plan with asynchronous rounds has requests that outlive them"
        total, most = BufferedSum(number), party.plan.cohort.most_stale()
        staleness: dict[str, list[int]] = {}
        self.course.noted = {STALENESS: staleness, TOO_STALE: self.attempt.noted.get(TOO_STALE, 0)}

        def fold(told: Instructions, contribution: Contribution) -> None:
            age = number - told.sum.round
            if age > most:
                self.course.noted[TOO_STALE] += 1
                raise StaleError(
                    "staleness", age, expected=f"at most {most} rounds, as cohort.staleness says"
                )
            of = self._model(told)
            total.add(pieces_of(contribution, of.layout), of)
            staleness.setdefault(contribution.site, []).append(age)

        # The server's step changes the model in place, and requests with this one may outlive it.
        model = self.wanted.model.copy()
        request = Contribute(self.told, self.attempt.tries, None, model)
        outstanding.ask(party.present(self.attempt.sites), request)
        with party.phases.during(Phase.TRAIN):
            while total.terms < needed and (answer := outstanding.next()) is not None:
                site, asked, reply = answer
                self.take(reply, asked.told, partial(fold, asked.told))
                if asked.sum.round < number and site not in staleness:
                    outstanding.ask([site], request)
        if total.terms < needed:
            raise TooFewSitesError(
                "updates", total.terms, expected=f"{needed} of them, as cohort.buffer says"
            )
        self.note_survivors(OPENING, sorted(self.course.folded))
        self.pay()
        return total.open()

    def _model(self, told: Instructions) -> OfModel:
        """What the updates have in common that sites make by some instructions, of this round or an earlier one."""
        party, number = self.party, told.sum.round
        layout = party.sums.of_round(TRAIN, number).training
        return OfModel(number, layout, party.sums.part((number,)), party.features.bounds(told.features))
