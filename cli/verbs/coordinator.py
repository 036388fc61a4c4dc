"""`cloister coordinator`: make a federation, approve sites, change it, and run its coordinator.

Make a federation, approve the requests of its sites, and change it. Each change is a new version, in one file
that every site installs after its operator has compared the fingerprint. `start` runs the coordinator's process, which
sites connect to.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cloister.cli.options.shared_options import Actions, Parser, add_action, tell
from cloister.cli.show.agreement import asked, fingerprint_line, typed_in, version_facts, version_lines
from cloister.cli.verbs.logs import FIELDS, log_to_stderr
from cloister.protocol.errors import CloisterError, EngineError, RosterError, visible
from cloister.protocol.identity import fingerprint
from cloister.protocol.identity.document import read_document
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.short_authentication import given
from cloister.protocol.machine.storage import own_files
from cloister.protocol.plan.settings import Section, Settings
from cloister.server.display import describe
from cloister.server.door.process import allow_files
from cloister.server.federation.control import command
from cloister.server.federation.embedded import Coordinator
from cloister.server.federation.registry import Registry, Renewal, Terms
from cloister.server.record.events import to_json
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity, reached
from cloister.server.record.journal import CREATED
from cloister.server.record.progress import Event, RoundStarted

S = TypeVar("S", bound="Section")

_FIRST = (
    "  1. cloister coordinator start FEDERATION",
    "  2. Each site: cloister site join ADDRESS --name NAME --contact TEXT",
    "  3. When you were told the codes of those that wait: cloister coordinator approve FEDERATION",
)
"""What to do next, before there is a site."""
_NEXT = (
    "  1. Tell every site the fingerprint by telephone; a site that waits at the door asks for it now.",
    "  2. Every other site: cloister site install, which asks the coordinator for it; or with the file, sent by mail.",
)


def options(parser: Parser) -> None:
    """The actions `create`, `approve`, `remove`, `revoke`, `renew`, `show`, `start` and `run`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_first(actions)
    _add_changes(actions)
    _add_processes(actions)


def _add_first(actions: Actions) -> None:
    """The actions `create` and `approve`, which make a federation and its next version with more sites."""
    create = add_action(actions, _create)
    create.add_federation("the folder of the federation, which it makes")
    create.value("--name", "name of the federation", required=True)
    create.value("--address HOST:PORT", "where sites reach the coordinator", dest="door", required=True)
    _add_certificate(create)
    create.value(
        "--authority-days N", "days for which the certificate authority is valid (default: 3650)", type=int
    )
    approve = add_action(actions, _approve)
    approve.add_federation()
    approve.value(
        "requests REQUEST",
        "a request file that a site has sent (default: the sites that wait at the door)",
        nargs="*",
    )
    approve.value(
        "--code NAME=CODE",
        "the code that a waiting site told you; repeatable (default: ask for each)",
        several=True,
    )
    _add_fingerprint(approve)
    for action in (create, approve):
        action.add_json()


def _add_changes(actions: Actions) -> None:
    """The actions that change or print a federation that is there."""
    remove = add_action(actions, _remove)
    revoke = add_action(actions, _revoke)
    revoke.value("--request REQUEST", "the site's new request (default: it leaves)")
    _add_fingerprint(revoke)
    renew = add_action(actions, _renew)
    renew.value("--address HOST:PORT", "another address, where sites reach the coordinator", dest="door")
    _add_certificate(renew)
    show = add_action(actions, _show)
    show.value("--version N", "an earlier version (default: the newest)", type=int)
    for action in (remove, revoke):
        action.value("site SITE", "name of the site")
    for action in (remove, revoke, renew, show):
        action.add_federation()
        action.add_json()


def _add_processes(actions: Actions) -> None:
    """The actions `start` and `run`: the coordinator's process, and that of one run."""
    start = add_action(actions, _start)
    start.add_federation()
    start.value(
        "--bind HOST:PORT",
        "where it listens (default: all interfaces, the port of the federation's address)",
        "",
    )
    start.add_metrics()
    start.add_log_format()
    one = add_action(actions, _run)
    one.add_federation()
    one.add_run()
    one.value("--door FD", "the inherited socket to the process of `start`", required=True, type=int)
    one.add_log_format()


def _start(arguments: argparse.Namespace) -> int:
    """Run the coordinator: let sites connect, and run what is submitted.

    Run the coordinator until Ctrl-C or SIGTERM. It listens on one port, to which sites stay connected, and runs the
    runs that are submitted, one after the other, each in a process of its own. A run that was interrupted goes on at
    the next start.
    """

    log_to_stderr(arguments.log_format, {})
    Coordinator(
        arguments.federation,
        bind=arguments.bind,
        metrics=arguments.metrics,
        metrics_on_network=arguments.metrics_on_network,
        log_format=arguments.log_format,
    ).serve()
    return 0


@own_files()
def _run(arguments: argparse.Namespace) -> int:
    """The process of one run, which `start` starts.

    Run one run, and print its events as lines of JSON. `start` starts this process with the right options; it is here
    so that what it prints can be typed.
    """

    known: dict[str, object] = {}
    log_to_stderr(arguments.log_format, known)
    log = logging.getLogger("cloister")
    from cloister.server.federation.deployed import by_door, coordinate

    allow_files()  # each upload that waits to be summed is an open file
    one_at_a_time = threading.Lock()

    def observe(event: Event) -> None:
        with one_at_a_time:
            print(to_json(event), flush=True)
            if "run" not in known and reached(folder, CREATED):
                known["run"] = identity(folder)
            if isinstance(event, RoundStarted):
                known.update(round=event.round, attempt=event.attempt)
            words = describe(event)
            if words:
                about = {field: getattr(event, field) for field in FIELDS if hasattr(event, field)}
                log.info("%s", words, extra=about)

    registry = Registry.open(Path(arguments.federation))
    with socket.socket(fileno=arguments.door) as door, RunFolder.reopen(Path(arguments.run)) as folder:
        coordinate(folder, registry, observe, partial(by_door, far=door, observe=observe))
    # The run is over: a signal would only break off the interpreter's end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return 0


def _add_fingerprint(parser: Parser) -> None:
    parser.value(
        "--fingerprint HEX",
        "the fingerprint that a site told you of its request; repeatable (default: ask for each)",
        several=True,
    )


def _add_certificate(parser: Parser) -> None:
    parser.value(
        "--certificate-name HOST",
        "a DNS name or IP address in the coordinator's certificate, besides the host of its address; repeatable",
        dest="certificate_names",
        several=True,
    )
    parser.value(
        "--certificate-days N",
        "days for which the coordinator's certificate is valid (default: 398)",
        type=int,
    )


def _create(arguments: argparse.Namespace) -> int:
    """Make the folder of a federation that has no site yet.

    Make the folder of a federation, with a certificate authority and a certificate of the coordinator. Then start the
    coordinator, to which sites come with `cloister site join`, or approve the request files that they send.
    """

    folder = Path(arguments.federation)
    terms = _given(arguments, Terms, "federation")
    registry = Registry.create(folder, terms, [], datetime.datetime.now(datetime.UTC))
    return _told(registry, None, arguments)


def _approve(arguments: argparse.Namespace) -> int:
    """Approve requests of sites: add sites, or take a site's next key.

    Approve requests of sites, and publish the next version of the federation: add sites, or replace the key of a site
    whose old key signed the request. Without request files, list the sites that wait at the door of the running
    coordinator, and approve those whose code you were told by telephone. Compare the fingerprint of each request file
    with its site by telephone. A request that is not approved in this way is never accepted.
    """

    registry = Registry.open(Path(arguments.federation))
    registry.check_certificates(datetime.datetime.now(datetime.UTC))
    if not arguments.requests:
        new, refused = _from_door(registry, arguments)
        if new:
            _published(registry, registry.federation.approving(new), arguments)
        for error in refused[1:]:
            print(error, file=sys.stderr)
        if refused:
            raise refused[0]
        return 0
    if arguments.code:
        raise RosterError("--code", arguments.code[0], expected="it without request files")
    requests = [_read_request(Path(name)) for name in arguments.requests]
    new = [request for request in requests if registry.federation.site(request.name) != request]
    if not new:
        return _told(registry, None, arguments)  # an interrupted command is run again
    following = registry.federation.approving(new)
    _agreed(new, arguments)
    return _published(registry, following, arguments)


def _from_door(
    registry: Registry, arguments: argparse.Namespace
) -> tuple[list[Request], list[CloisterError]]:
    """The requests at the door whose codes a person was told, and why others are not among them: a wrong code takes
    nothing from those that are right. Prints all that wait.

    Raises:
        EngineError: no coordinator runs.
    """

    (found,) = command(registry.path, do="waiting")
    told = {name: given(code) for name, _, code in (each.partition("=") for each in arguments.code)}
    if not told or not arguments.json:
        tell(arguments, found, *_listed(found))
    if not told and sys.stdin.isatty() and not arguments.json:
        for name in dict.fromkeys(each["name"] for each in found["waiting"]):
            typed = typed_in(f"Type the code that {name} tells you (empty: it waits on): ")
            told |= {name: given(typed)} if typed.strip() else {}
    requests, refused = [], []
    for name, code in told.items():
        try:
            (answer,) = command(registry.path, do="compare", name=name, code=code)
        except CloisterError as error:
            refused.append(error)
            continue
        requests.append(Request.from_toml(answer["request"], f"of {name}"))
    return requests, refused


def _listed(found: Mapping[str, Any]) -> list[str]:
    """The requests that wait, in words."""

    lines = []
    for each in found["waiting"]:
        lines += [
            f"{each['name']}",
            f"  contact      {visible(each['contact'])}",
            f"  from         {each['address']}, since {each['since']}",
            f"  codes        {each['tries']} made for this name; {each['wrong']} wrong ones compared with this one",
        ]
    lines.append(
        f"{len(found['waiting'])} sites wait; {found['failed']} exchanges have failed since the start"
    )
    if found["waiting"]:
        lines.append(
            "Call each at a number that you know from elsewhere; approve those whose code is the one that they read.\n"
        )
    return lines


def _remove(arguments: argparse.Namespace) -> int:
    """Remove a site that leaves.

    Make a version without a site that leaves, and disconnect it. Its key may come back.
    """

    registry = Registry.open(Path(arguments.federation))
    return _published(registry, registry.federation.removing(arguments.site), arguments)


def _revoke(arguments: argparse.Namespace) -> int:
    """Revoke the key of a site, after it was lost or stolen.

    Make a version in which the key of a site is revoked for good, and disconnect it. With --request, the site has the
    key of that request from then on, which the old key has not signed: be sure who sent it. Runs that have begun keep
    the old key in their roster: stop them if it was stolen.
    """

    registry = Registry.open(Path(arguments.federation))
    request = _read_request(Path(arguments.request)) if arguments.request else None
    following = registry.federation.revoking(arguments.site, request)
    _agreed([request] if request else [], arguments)
    return _published(registry, following, arguments)


def _renew(arguments: argparse.Namespace) -> int:
    """Make the coordinator's certificate again, or move the coordinator.

    Make the coordinator's certificate again, with the same key. A running coordinator shows it to each new connection.
    Another address makes a new version, which the sites install; a coordinator that runs takes it at its next start.
    """

    renewal = _given(arguments, Renewal, "renewal")
    registry = Registry.open(Path(arguments.federation))
    before = registry.federation
    renewed = registry.renew(renewal, datetime.datetime.now(datetime.UTC))
    if renewed.federation == before:
        return _told(
            renewed, None, arguments, ("  nothing: sites see the new certificate with their next connection",)
        )
    moved = "  3. When all have installed it, at the coordinator: end `cloister coordinator start`, and start it again."
    return _told(renewed, before, arguments, (*_NEXT, moved) if renewed.federation.sites else ())


def _show(arguments: argparse.Namespace) -> int:
    """Print the newest version, or an earlier one, and its fingerprint.

    Print the sites, address, certificates and the fingerprint of a version. A site that missed some installs each one,
    in their order, with its own fingerprint.
    """

    registry = Registry.open(Path(arguments.federation))
    if arguments.version is not None:
        registry = Registry(registry.path, registry.version(arguments.version))
    return _told(registry, None, arguments)


def _given(arguments: argparse.Namespace, section: type[S], name: str) -> S:
    """A section of which options give the fields."""

    given = {field: getattr(arguments, field) for field in section.model_fields}
    text = json.dumps({field: value for field, value in given.items() if value not in (None, [])})
    return Settings(section, name, RosterError).from_json(text)


def _read_request(path: Path) -> Request:

    return Request.from_toml(read_document(path, "request"), str(path))


def _agreed(requests: list[Request], arguments: argparse.Namespace) -> None:
    """Let a person compare the fingerprint of each request with what its site has told.

    Raises:
        RosterError: a fingerprint was not given, or another one was.
    """

    told = [fingerprint.given(text) for text in arguments.fingerprint]
    for request in requests:
        if not arguments.json:
            print(f"{request.name}\n  contact      {visible(request.contact)}\n  made         {request.date}")
            print(f"  {fingerprint_line(request.fingerprint)}\n")
    for request in requests:
        same = [one for one in told if fingerprint.same(one, request.fingerprint)]
        if not same and not told:
            one = asked(request.name)
            same = [one] if fingerprint.same(one, request.fingerprint) else []
        if not same:
            raise RosterError(
                f"fingerprint of the request of {request.name}",
                fingerprint.shown(request.fingerprint),
                expected="one of those that were given" if told else "the one that was typed",
                fix=f"do not approve it: {request.name} has another request; get the file again over another channel",
            )
    unused = [one for one in told if not any(fingerprint.same(one, each.fingerprint) for each in requests)]
    if unused:
        raise RosterError("--fingerprint", fingerprint.shown(unused[0]), expected="that of a request")


def _published(registry: Registry, following: Federation, arguments: argparse.Namespace) -> int:
    """Publish the next version; a coordinator that runs disconnects the sites that it no longer has."""

    published = registry.publish(following)
    with suppress(EngineError):  # none runs
        list(command(registry.path, do="refresh"))
    return _told(published, registry.federation, arguments)


def _told(
    registry: Registry,
    before: Federation | None,
    arguments: argparse.Namespace,
    following: Sequence[str] = (),
) -> int:
    """Print a version, what is new in it, and what to do next, unless another list says that."""
    federation = registry.federation
    changes = federation.changes_since(before) if before else ()
    until = {name: registry.certificate(name).not_valid_after_utc for name in ("authority", "door")}
    facts = version_facts(federation, changes) | {
        "file": str(registry.file),
        "sites": [site.name for site in federation.sites],
    }
    return tell(
        arguments,
        facts,
        *version_lines(federation, changes),
        *(f"certificate  {name}: valid until {last:%Y-%m-%d}" for name, last in until.items()),
        f"file         {registry.file}\n",
        "next:",
        *(following or (_NEXT if federation.sites else _FIRST)),
    )
