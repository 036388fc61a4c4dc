"""Faults that a plan injects into a simulation: dropouts at any step, and slower hardware.

They wrap a site, whose code does not know of them, and are drawn from the run's seed, so that a run can be repeated.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace

from cloister.clients.network.guard import Guard
from cloister.clients.network.serve import Guarded
from cloister.protocol.errors import BudgetError, FaultError, PolicyError
from cloister.protocol.messages.messages import (
    TRAIN,
    Agree,
    Contribute,
    Contribution,
    Join,
    Refused,
    Reply,
    Request,
    Step,
)
from cloister.protocol.plan.plan import Plan


class Faulty:
    """A site that drops out by `[faults]`, and whose hardware may be slower than this machine.

    Args:
        site: The site.
        plan: The plan, with `[faults]`.
        speed: Speed of its hardware relative to this machine, from above 0 to 1.
    """

    def __init__(self, site: Guarded, plan: Plan, speed: float) -> None:
        self._site = site
        self._plan = plan
        self._speed = speed

    @property
    def name(self) -> str:
        """The site's name."""
        return self._site.name

    @property
    def guard(self) -> Guard:
        """The site's own."""
        return self._site.guard

    def answer(self, request: Request) -> Reply:
        """Answer as the site does, or drop out before; delay training as slower hardware would.

        Raises:
            FaultError: the site drops out.
            CloisterError: what the site raises.
        """
        if isinstance(request, Join):
            return self._site.answer(request)
        step: Step = Step.UPDATE if isinstance(request, Contribute) else request.told.STEP
        self._maybe_drop_out(step, request)
        started = time.monotonic()
        reply = self._site.answer(request)
        if step is Step.UPDATE and request.sum.purpose == TRAIN:
            spent = time.monotonic() - started
            threading.Event().wait(spent * (1 / self._speed - 1))
            if isinstance(reply, Contribution):
                return replace(reply, seconds=reply.seconds / self._speed)
        return reply

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        """The site's own refusal."""
        return self._site.refuse(request, error)

    def _maybe_drop_out(self, step: Step, request: Agree | Contribute) -> None:
        chance = getattr(self._plan.faults, step.label)
        sum_id = request.sum
        found = drawn(self._plan.run.seed, self.name, step.label, sum_id.purpose, sum_id.round, request.tries)
        if chance and found < chance:
            raise FaultError(
                "site", self.name, expected=f"it to answer, but [faults] {step.label} made it drop out"
            )


def drawn(*parts: str | int) -> float:
    """A number in [0, 1) that depends only on the parts."""
    digest = hashlib.sha256("/".join(map(str, ("faults", *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
