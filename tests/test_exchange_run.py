"""Whole runs over the exchange: real sites in processes of their own, TLS, signed sessions."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from cloister.lm.model import count_parameters
from cloister.protocol.messages import TRAIN
from cloister.protocol.roster import load_roster
from cloister.protocol.soundness import load
from cloister.server.exchange import ExchangeChannel, most_bytes_of
from cloister.server.folder import RunFolder
from cloister.server.progress import Event, RoundStarted
from cloister.server.run import run
from cloister.simulations.federation import lay_out
from cloister.simulations.partition import site_name
from cloister.tests.exchange_parties import CERTIFICATE, WAIT_S, SiteProcesses


def test_a_run_over_the_exchange_ends_with_the_weights_of_a_simulation(
    small_plan: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    plan = load(small_plan)
    sites = tmp_path / "sites"
    sites.mkdir()
    lay_out(plan, sites)
    roster = load_roster(sites / "roster.toml")
    names = [site_name(index) for index in range(plan.cohort.sites)]
    with (
        RunFolder.create(tmp_path / "run", plan) as folder,
        ExchangeChannel(
            "run",
            CERTIFICATE,
            tmp_path / "spool",
            sites=plan.cohort.sites,
            most_bytes=most_bytes_of(plan, 10**5),
            bind="127.0.0.1:0",
            cards=roster.cards,
        ) as channel,
    ):
        processes = SiteProcesses(channel, [sites / name / "site.toml" for name in names])
        try:
            assert channel.wait_for(len(names), WAIT_S) == len(names)

            def kill_one(event: Event) -> None:
                """In the second round a site dies, and starts again."""
                if isinstance(event, RoundStarted) and (event.round, event.purpose) == (2, TRAIN):
                    processes.kill(0)
                    processes.start(sites / names[0] / "site.toml")

            done = run(folder, channel, kill_one, roster=roster)
            sent = [site.sent for site in channel.connected()]
        finally:
            channel.close(over=True)
            codes = processes.join()
    assert codes == [-signal.SIGKILL, *[0] * len(names)]
    assert done.params_sha256 == whole["params_sha256"]
    assert not (tmp_path / "spool").exists()
    # Each model is evaluated, all but the last are trained: each site has fetched each of them once, also that which
    # was killed.
    _, parameters = count_parameters(plan)
    assert sent == [(plan.run.rounds + 1) * 4 * parameters] * len(names)
