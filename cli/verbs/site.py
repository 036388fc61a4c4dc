"""`cloister site`: set up a site, check its data and devices, and run it.

Set up a site: join a federation over the network, or by files; replace its key; check its data; and run it. The key
never leaves the site's machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister.cli.options.shared_options import Actions, Parser, add_action, chosen_plan, tell
from cloister.cli.show.agreement import FIX, asked, check, fingerprint_line, version_facts, version_lines
from cloister.cli.show.console import PipedConsole
from cloister.cli.verbs.logs import log_to_stderr
from cloister.cli.verbs.plan import privacy_rows, warnings
from cloister.clients.embedded import Site, close_folder
from cloister.clients.setup.config import SiteConfig, read_config
from cloister.clients.setup.enrolment import (
    Offer,
    consider,
    identities,
    install,
    make_request,
    make_rotation,
    read_installed,
)
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.policy import Policy, load_policy
from cloister.protocol.errors import CloisterError, DataError, MemberError, PlanError, RosterError, one_line
from cloister.protocol.identity import fingerprint
from cloister.protocol.identity.address import host_of
from cloister.protocol.identity.document import read_document
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import check_private, load_identity
from cloister.protocol.machine.storage import own_files
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json
from cloister.protocol.plan.template import toml_value
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import of_sequences

if TYPE_CHECKING:
    from cloister.cli.verbs.devices import Devices
    from cloister.lm.data.prepare import Prepared


def options(parser: Parser) -> None:
    """The actions `join`, `request`, `install`, `rotate`, `check`, `plans`, `accept` and `start`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_setup(actions)
    _add_work(actions)


def _add_setup(actions: Actions) -> None:
    """The actions `join`, `request`, `install` and `rotate`: the site's own files."""
    join, request = add_action(actions, _join), add_action(actions, _request)
    join.value("address HOST:PORT", "the coordinator's address")
    join.flag("--start", "when the site has joined, go on as cloister site start")
    join.add_log_format()
    for action in (join, request):
        action.value("--name", "the site's name: letters, digits, dots, dashes, underscores", required=True)
        action.value(
            "--contact TEXT",
            "who answers for the site, and how to reach them; every site sees it",
            required=True,
        )
    install = add_action(actions, _install)
    install.value(
        "file FILE",
        "the file of the federation (default: the next version, which the coordinator sends)",
        nargs="?",
    )
    rotate = add_action(actions, _rotate)
    for action in (join, install):
        action.value("--fingerprint HEX", "the fingerprint that you were told")
    for action in (join, request, install, rotate):
        action.value("--folder DIR", "the site's own folder (default: the current one)", ".")
    for action in (request, install, rotate):
        action.add_json()


def _add_work(actions: Actions) -> None:
    """The actions `check`, `plans`, `accept` and `start`: the site before a run, and in it."""
    check_, plans, accept, start = (add_action(actions, act) for act in (_check, _plans, _accept, _start))
    for action in (check_, plans, accept, start):
        action.value("site SITE", "the site's TOML file")
    for action in (check_, plans, accept):
        action.add_json()
    check_.add_plan()
    check_.value(
        "--only", "check only the data, or only the devices (default: both)", choices=("data", "devices")
    )
    check_.value(
        "--device NAME",
        "check for this device instead of the site's own, such as cuda for the GPUs of another machine",
    )
    accept.value("digest DIGEST", "the plan's digest, whole: cloister plan check prints it")
    start.add_log_format()


def _start(arguments: argparse.Namespace) -> int:
    """Run the site: connect to the coordinator, and take part in its runs.

    Run the site until Ctrl-C or SIGTERM. It connects to the coordinator's address, and stays connected from run to run.
    It opens no other connection, but to the hub if the plan's model or tokenizer or the site's data is a hub name; none
    is opened to it. It runs no code that a coordinator sends. A site that was killed is started again with the same
    command, and goes on with the run.
    """

    known: dict[str, object] = {}
    log_to_stderr(arguments.log_format, known)
    known["site"] = read_config(Path(arguments.site)).name
    site = Site(arguments.site)
    try:
        with_rest = not site.serve()
    except KeyboardInterrupt:
        with_rest = True
    sys.stderr.flush()
    if with_rest:
        # A training in another thread would keep the process: it is begun again when the site is back.
        os._exit(130)
    return 0


@own_files()
def _check(arguments: argparse.Namespace) -> int:
    """Check a site's data and devices for a plan.

    Check a site for a plan before the run; the coordinator hears nothing of it, and nothing is charged. First its
    data: it is prepared, as the first training would do it, and the number of records that are used and that are not
    is printed, with the reasons. These counts are exact and no privacy unit covers them, so their line, and their
    object in JSON, is marked: must stay at this site. Send neither it nor an error about a record to anyone. A record
    that cannot be used is left out and counted. What is prepared is kept in the site's state folder, and the run does
    not prepare it again. Then its devices: what each rank of the site's mesh will hold, which must fit into the memory
    of the devices that are here. Exit code 4: the mesh suits the plan, but its devices are absent here.
    """
    plan = chosen_plan(arguments)

    config = _closed(arguments.site)
    if config.identity:
        check_private(Path(config.identity), "identity")
    policy = load_policy(Path(config.policy)) if config.policy else Policy()
    policy.check_listed(plan)  # before it sees a record
    devices = None
    if arguments.only != "data" and plan.question is None:  # which one process answers
        from cloister.cli.verbs.devices import Devices

        devices = Devices.of(plan, config.mesh, arguments.device or config.device)
    found: dict[str, object] = {}
    if arguments.only != "devices":
        from cloister.clients.training.release import MUST_STAY

        counts = _counted(config, plan)
        found[MUST_STAY.replace(" ", "_")] = counts
        if not arguments.json:
            print(f"{MUST_STAY}: {counts['summary']}", flush=True)
    return _finish(arguments, found, devices)


def _closed(path: str) -> SiteConfig:
    """The configuration of a site whose state folder is closed to others."""
    config = read_config(Path(path))
    close_folder(config.folder)
    return config


def _counted(config: SiteConfig, plan: Plan) -> dict[str, object]:
    """Exact counts of the site's records, for its own people."""
    if of_sequences(plan):
        made = _prepared(config, plan)
        counts = {"records": made.records, "left_out": made.left_out, "sequences": len(made.train)}
        return counts | {"summary": made.summary()}
    from cloister.lm.text.records import Unusable, read_each

    unusable, field = Unusable(), question_of(plan).field
    read = [field in record for record in read_each(config.data, unusable, split=config.split)]
    summary = f"{len(read)} records are read, {sum(read)} of them with the field {field!r}"
    return {
        "records": len(read),
        "left_out": dict(unusable.left_out),
        "with_field": sum(read),
        "summary": summary,
    }


def _prepared(config: SiteConfig, plan: Plan) -> Prepared:
    """Prepare the site's data; refuse data of which nothing is trained on."""
    from cloister.clients.site import preparation_of
    from cloister.clients.training.release import MUST_STAY
    from cloister.lm.data.store import cached
    from cloister.lm.tasks.registry import tokenizer_of

    preparation = preparation_of(config, plan, tokenizer_of(plan))
    made = cached(preparation.folder, preparation.key(), preparation.make)
    if not len(made.train):
        raise DataError(
            "data",
            config.data,
            expected=f"records to train on ({MUST_STAY}: {made.summary()})",
            fix="compare the records with [data] of the plan",
        )
    return made


def _plans(arguments: argparse.Namespace) -> int:
    """List the plans that the coordinator has asked for without a consent, with their cost.

    List the newest plans, at most 8, that the coordinator has asked the site to join when it had not consented: the
    name and digest of each, its privacy cost, what differs from the plan that the site joined last, and whether it is
    accepted by now. To consent to one run of one of them: cloister site accept. The policy can consent to a family.
    """
    from cloister.clients.consent.admission import consents_to
    from cloister.clients.consent.consents import Consents
    from cloister.clients.state.kept import newest_plan

    config = read_config(Path(arguments.site))
    policy = load_policy(Path(config.policy)) if config.policy else None
    offers = Consents(config.folder, config.name, config.plan).offers()
    found, lines = [], []
    last = newest_plan(config.folder)
    for plan in map(from_json, offers):
        consents = consents_to(plan, config, policy)
        digest, name, cost = plan.digest(), plan.run.name, _cost(plan)
        differs = _differences(from_json(last), plan) if last else []
        runs, accepted = len(consents.runs(digest)), consents.is_free(digest)
        found.append({"name": name, "plan": digest, "accepted": accepted, "taken": runs, "cost": cost})
        found[-1] |= {"family": plan.family(), "differs": differs}
        state = "accepted" if accepted else "not accepted"
        lines += [f"{name}  {state}; runs that have joined: {runs}", f"  digest {digest}"]
        lines += [f"  family {plan.family()}", *(f"  {line}" for line in (*cost, *differs))]
    return tell(arguments, {"plans": found}, *(lines or ["no plan was asked for without a consent"]))


def _differences(last: Plan, plan: Plan) -> list[str]:
    """What is different in a plan from the one before; `[simulation]` and `[faults]` are no part."""

    def values(of: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
        for name, value in of.items():
            if isinstance(value, dict):
                yield from values(value, f"{path}{name}.")
            else:
                yield f"{path}{name}", toml_value(value)

    agreed = [each.model_dump(mode="json", exclude={"simulation", "faults"}) for each in (last, plan)]
    before, after = (dict(values(each)) for each in agreed)
    differ = [name for name in before | after if before.get(name) != after.get(name)]
    return [f"{name} is {after.get(name, 'unset')}, was {before.get(name, 'unset')}" for name in differ]


def _cost(plan: Plan) -> list[str]:
    """What a plan costs a site's people in privacy, in words."""
    from cloister.lm.model.model import count_parameters

    try:
        terms = terms_of(plan, count_parameters(plan).trained)
    except CloisterError as error:  # of one plan, whose model cannot be read here
        return [f"not known: {one_line(error)}", *warnings(plan)]
    return [*(": ".join(row) for row in (privacy_rows(plan, terms) if terms else ())), *warnings(plan)]


@own_files()
def _accept(arguments: argparse.Namespace) -> int:
    """Consent to one run of a plan.

    Consent to one run of the plan with this digest; read the plan first. The first run of the plan that the coordinator
    starts takes the consent, and a further run needs another one: two runs of one plan train the same updates, so that
    their sums over different sites could show one site's. Where an earlier consent to the plan is not taken yet, none
    is added. The site may be running.
    """
    from cloister.clients.consent.consents import Consents

    digest = arguments.digest.lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise PlanError(
            "DIGEST", arguments.digest, expected="64 hex digits, as cloister plan check prints them"
        )
    config = _closed(arguments.site)
    consents = Consents(config.folder, config.name, config.plan)
    added, taken = consents.give(digest), len(consents.runs(digest))
    asked = digest in {from_json(offer).digest() for offer in consents.offers()}
    unasked = (
        "" if asked or taken else "; the coordinator has not asked for such a plan yet: compare the digest"
    )
    return tell(
        arguments,
        {"plan": digest, "added": added, "taken": taken},
        f"accepted  one run of the plan {digest}"
        + (
            unasked
            if added
            else ", which was accepted before and which no run has joined yet: nothing is added"
        ),
        f"before    {taken} runs of it have joined",
    )


def _finish(arguments: argparse.Namespace, found: dict[str, object], devices: Devices | None) -> int:
    """Print what was found, with what the devices will hold."""

    if devices is None:
        if arguments.json:
            print(json.dumps(found))
        return 0
    from cloister.cli.verbs.devices import ABSENT

    console, absent = PipedConsole(), devices.absent
    if not arguments.json:
        devices.show(console)
    devices.check_memory()
    if arguments.json:
        print(json.dumps(found | devices.as_json()))
    elif absent:
        console.print(
            f"[bold yellow]devices absent[/]: this machine lacks {len(absent)} of the "
            f"{len(devices.names)} devices. The mesh suits the plan; compare what is needed with their memory.",
            soft_wrap=True,
        )
    else:
        console.print("[bold green]the mesh suits the plan, and what its ranks hold fits the devices[/]")
    return ABSENT if absent else 0


def _join(arguments: argparse.Namespace) -> int:
    """Join a federation over the network.

    Make the site's key, settings and request, as `request` does, send the request to the coordinator, and print a code
    to tell the coordinator by telephone. Then wait until the coordinator has approved it, show the federation, compare
    its fingerprint with the one that the coordinator tells you, and install it. After Ctrl-C the same command goes on:
    with the same key, and another code.
    """
    from cloister.clients.network.enrol import enrol, wait_for_approval

    folder, name = Path(arguments.folder), arguments.name
    host_of(arguments.address)
    told = None if arguments.fingerprint is None else fingerprint.given(arguments.fingerprint)
    request, _ = make_request(folder, name, arguments.contact, datetime.datetime.now(datetime.UTC).date())
    settings = folder / "site.toml"
    if not read_config(settings).federation:
        identity = load_identity(folder / "identity.pem")
        joining = enrol(arguments.address, request, identity)
        lines = (
            f"identity     {folder / 'identity.pem'}: secret; keep a backup: it cannot be made again",
            f"settings     {settings} and policy.toml: fill them in; above all `data`",
            f"federation   {joining.entrance.federation}, as the server says; nothing is compared yet",
            f"code         {joining.code}\n",
            "Tell the coordinator this code by telephone, at a number that you know from elsewhere.",
            "Waiting for the coordinator. After Ctrl-C the same command goes on, with another code.\n",
        )
        print("\n".join(lines), flush=True)
        federation = wait_for_approval(joining, name, identity, lambda line: print(line, flush=True))
        _, installed = _agreed(folder, federation, told, "what the coordinator has sent")
        print(f"\ninstalled    {installed}", flush=True)
    if arguments.start:
        arguments.site = str(settings)
        return _start(arguments)
    print(f"next         cloister site start {settings}")
    return 0


def _request(arguments: argparse.Namespace) -> int:
    """Make a site's key, settings and request.

    Make a site's key, a site.toml and a policy.toml to fill in, and the request to send to the coordinator. A key or
    file that is there is never replaced.
    """

    folder = Path(arguments.folder)
    today = datetime.datetime.now(datetime.UTC).date()
    return _requested(
        arguments,
        *make_request(folder, arguments.name, arguments.contact, today),
        f"identity  {folder / 'identity.pem'}: secret; keep a backup: it cannot be made again",
        f"settings  {folder / 'site.toml'} and policy.toml: fill them in",
    )


def _rotate(arguments: argparse.Namespace) -> int:
    """Make a new key, and the request to replace the present one.

    Make a new key for the site, and a request, signed with the present key, to replace it. The new key is used once a
    federation with it is installed.
    """

    today = datetime.datetime.now(datetime.UTC).date()
    request, path = make_rotation(Path(arguments.folder), today)
    stay = "The present key stays in use until a federation with the new one is installed."
    return _requested(arguments, request, path, stay)


def _requested(arguments: argparse.Namespace, request: Request, path: Path, *made: str) -> int:
    """Print what was made, the request, and what to do with it."""
    return tell(
        arguments,
        {"name": request.name, "request": str(path), "fingerprint": request.fingerprint.hex()},
        *made,
        f"request   {path}: public",
        f"{fingerprint_line(request.fingerprint)}\n",
        "next:",
        f"  1. Send {path.name} to the coordinator, by any channel.",
        "  2. Tell the coordinator the fingerprint over another channel, such as the telephone.",
        "  3. With the file that the coordinator sends back: cloister site install FILE",
    )


def _install(arguments: argparse.Namespace) -> int:
    """Install a version of the federation.

    Install the version in a file; without one, the version after the installed one, for which the coordinator is
    asked. Show what it changes, compare its fingerprint with the one that the coordinator told you, and install it.
    Without --fingerprint it is asked for. Runs that have begun go on with the version that was installed when they
    began.
    """

    told = None if arguments.fingerprint is None else fingerprint.given(arguments.fingerprint)
    folder, origin = Path(arguments.folder), arguments.file or "what the coordinator has sent"
    if arguments.file:
        federation = Federation.from_toml(read_document(Path(origin), "federation"), origin)
        newest = federation.version
    else:
        federation, newest = _following(read_config(folder / "site.toml"))
    fix, after = FIX, []
    if federation.version < newest:
        told_by = f"cloister coordinator show FEDERATION --version {federation.version}"
        origin = f"version {federation.version} (the newest is {newest}), which the coordinator has sent"
        fix = f"ask the coordinator for the fingerprint of this version: {told_by}; do not go on if it is another"
        after = [f"next         version {federation.version + 1} of {newest} waits: run it again"]
    offer, installed = _agreed(folder, federation, told, origin, fix, quiet=bool(arguments.json))
    facts = version_facts(federation, offer.changes) | {"installed": str(installed), "newest": newest}
    return tell(arguments, facts, f"\ninstalled    {installed}", *after)


def _following(config: SiteConfig) -> tuple[Federation, int]:
    """The version after the installed one, from its coordinator, and the number of the newest.

    After a rotation was approved, the coordinator knows the site by its new key only, which is not installed yet.
    """
    from cloister.clients.network.enrol import following

    installed, refusals = read_installed(config), list[CloisterError]()
    none = RosterError(
        "FILE", expected="the file of the federation, because this site is in none yet that it could ask"
    )
    if installed is None:
        raise none
    for identity in identities(config):
        try:
            found = following(installed.entrance, config.name, identity, installed.version)
        except MemberError as error:
            refusals.append(error)
        else:
            if found is not None:
                return found
    raise (refusals or [none])[0]


def _agreed(
    folder: Path,
    federation: Federation,
    told: bytes | None,
    origin: str,
    fix: str = FIX,
    *,
    quiet: bool = False,
) -> tuple[Offer, Path]:
    """Show a version, and install it if its fingerprint is the one that the person was told, or is asked for."""

    if told is not None:
        check(told, federation.fingerprint, origin, fix)
    offer = consider(folder, federation, datetime.datetime.now(datetime.UTC))
    if not quiet:
        _show(offer)
    if told is None:
        check(asked("the coordinator"), federation.fingerprint, origin, fix)
    return offer, install(offer)


def _show(offer: Offer) -> None:
    """Print a version as the person sees it who decides on it."""
    federation, installed = offer.federation, offer.installed
    if installed is None:
        news = "nothing is installed yet: check that you know every site"
    elif installed.fingerprint == federation.fingerprint:
        news = "none: this version is installed"
    else:
        news = f"since version {installed.version}"
    print(*version_lines(federation, offer.changes if installed else ()), f"changes      {news}", sep="\n")
