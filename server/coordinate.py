"""A run folder and a channel to the sites -> a finished run: what the coordinator of every engine does."""

from __future__ import annotations

import time
from collections.abc import Callable

from cloister.lm.layout import Vector
from cloister.privacy.noise import NoiseStream
from cloister.protocol.roster import Roster
from cloister.server.channel import Channel
from cloister.server.folder import RunFolder
from cloister.server.history import identity
from cloister.server.members import Members
from cloister.server.outcome import Outcome
from cloister.server.progress import Observer, Preparing, SiteFailed
from cloister.server.public import base_of
from cloister.server.run import run


def coordinate(
    folder: RunFolder,
    channel: Channel,
    observe: Observer,
    *,
    roster: Roster | None = None,
    public: Vector | None = None,
    evaluation: str = "",
    noise: Callable[[int], NoiseStream] = lambda _round: NoiseStream.fresh(),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Ask the sites to join, then run the folder's plan to its end, from the last round that is done.

    Args:
        folder: The run folder.
        channel: Carries the messages.
        observe: Receives the run's events.
        roster: The sites' identities, for a plan that sums securely.
        public: What `public_model` returned.
        evaluation: Public records to evaluate on, instead of those that the plan names.
        noise: For each round the stream of the noise that the coordinator adds.
        clock: Seconds, for durations.

    Raises:
        CloisterError: what stopped the run. Finished rounds are on disk, and a later call continues after them.
    """
    observe(Preparing("sites"))
    members = Members(
        channel,
        folder.plan,
        identity(folder, roster),
        lambda failure: observe(SiteFailed(0, failure.site, failure.reason)),
        base=base_of(folder.plan, public),
        roster=roster,
    )
    return run(
        folder,
        members,
        observe,
        roster=roster,
        public=public,
        evaluation=evaluation,
        noise=noise,
        clock=clock,
    )
