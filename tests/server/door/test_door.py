"""The door as a carrier: what arrives, how often it is sent, and what a broken connection costs."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cloister.aggregation.sums import Sums
from cloister.lm.model.model import count_parameters
from cloister.protocol.errors import EngineError
from cloister.protocol.identity.heads import Head, Heads
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.messages import Contribute, Contribution, Failed, Join, Joined
from cloister.protocol.messages.transfer import CHUNK, SMALL
from cloister.protocol.plan.soundness import parse
from cloister.server.door import sites as door_sites
from cloister.server.door.door import Door
from cloister.server.door.grid import most_bytes_of
from cloister.server.federation.app import GridChannel
from cloister.server.sum.channel import Failure
from cloister.simulations.engines.process import return_freed_memory
from cloister.tests.parties.door_parties import (
    AUTHORITY,
    CERTIFICATE,
    RUN,
    WAIT_S,
    Answering,
    AtDoor,
    Raw,
    Relay,
    connected,
    contribute,
    entrance_at,
    federation_of,
    identity_of,
    join_request,
    open_channel,
    said,
)
from cloister.tests.parties.envelopes import sender_of

MODEL = np.arange(5 * CHUNK // 4, dtype=np.float32)  # five chunks


def ask(channel: AtDoor, request: Any, deadline_s: float = WAIT_S) -> Any:
    """What the only site answers; a vector is copied, because the next answer removes its file."""
    ((_, reply),) = [
        (node, np.array(reply.spans[0]) if isinstance(reply, Contribution) else reply)
        for node, reply in channel.ask(dict.fromkeys(channel.nodes(), request), deadline_s, group="1")
    ]
    return reply


def random_vector(chunks: float) -> Any:
    return np.frombuffer(os.urandom(4 * int(chunks * CHUNK / 4)), np.uint32)


def test_totals_that_are_longer_than_an_update_arrive(tmp_path: Path) -> None:
    """The confusion matrix of many classes has more cells than a small adapter has parameters."""
    classes = json.dumps([f"class {number}" for number in range(256)])
    adapter = ["model.adapter.scheme=ffa-lora", "model.adapter.rank=2"]
    plan = parse("", ["data.task=classify", f"data.classes={classes}", *adapter])
    sums = Sums(plan, count_parameters(plan).trained)
    assert sums.evaluation.length > 2 * sums.training.length
    site = Answering(vector=np.zeros(sums.evaluation.length, sums.evaluation.ring.dtype))
    most = most_bytes_of(plan, sums.parameters)
    with open_channel(tmp_path, most_bytes=most) as channel, connected(channel, site, tmp_path):
        assert (ask(channel, contribute(MODEL)) == site.vector).all()


def test_messages_and_vectors_arrive_as_they_were_sent(tmp_path: Path) -> None:
    site = Answering(vector=random_vector(2.5))
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path):
        assert ask(channel, join_request()) == Joined("site-1")
        assert (ask(channel, contribute(MODEL)) == site.vector).all()
        long = join_request("x" * (SMALL + 1))
        assert ask(channel, long) == Joined("site-1")
        first, second, third = site.asked
        assert isinstance(first, Join)
        assert isinstance(second, Contribute)
        assert isinstance(third, Join)
        assert (second.model == MODEL).all()
        assert third.plan == long.plan
        (known,) = channel.connected()
        assert (known.name, known.online) == ("site-1", True)
        assert known.received == site.vector.nbytes
        left = [path for path in (tmp_path / "spool" / "replies").rglob("*") if path.is_file()]
        assert not left, "an upload is left after it was taken"


def test_a_request_is_answered_as_often_as_it_is_asked(tmp_path: Path) -> None:
    """Also at once after its reply was taken, when the site has just handled the same bytes."""
    site = Answering()
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path):
        for _ in range(100):
            assert ask(channel, join_request(), 5.0) == Joined("site-1")
    assert len(site.asked) == 100


def test_a_defect_at_a_site_is_told_and_the_site_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not wait for its deadline."""
    site = Answering()
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr("cloister.clients.network.door.decode_reply", lambda _: 1 // 0)
            failed = ask(channel, join_request())
        assert isinstance(failed, Failed)
        assert ask(channel, join_request("{} ")) == Joined("site-1")


def test_a_vector_is_fetched_once(tmp_path: Path) -> None:
    site = Answering()
    with open_channel(tmp_path) as channel:
        with connected(channel, site, tmp_path):
            for number in (1, 2):
                ask(channel, contribute(MODEL, number))
                ask(channel, join_request())
        assert channel.connected()[0].sent == MODEL.nbytes
        # A process that starts again finds the file, and checks it.
        file = next((tmp_path / "site-1").iterdir())
        with connected(channel, Answering("site-2"), tmp_path):
            pass
        with file.open("r+b") as damaged:
            damaged.write(b"\xff")
        again = Answering()
        with open_channel(tmp_path / "again") as other, connected(other, again, tmp_path):
            ask(other, contribute(MODEL))
            (asked,) = again.asked
            assert isinstance(asked, Contribute)
            assert (asked.model == MODEL).all()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_transfer_that_is_cut_goes_on_where_it_was(tmp_path: Path, direction: str) -> None:
    site = Answering(vector=random_vector(128))
    big = np.arange(128 * CHUNK // 4, dtype=np.float32)
    with open_channel(tmp_path, most_bytes=128 * CHUNK) as channel, Relay(channel.address) as relay:
        relay.cut_at[direction] = 120 * CHUNK
        with connected(channel, site, tmp_path, through=relay):
            assert (ask(channel, contribute(big)) == site.vector).all()
        assert relay.cut_at == {}, "nothing was cut"
        assert len(site.asked) == 1
        # What was under way is sent again, which on a busy machine is several megabytes; all is (120 + 128) chunks.
        assert 128 * CHUNK < relay.moved[direction] < 240 * CHUNK
        assert channel.connected()[0].received >= 128 * CHUNK


@pytest.mark.parametrize("request_", [contribute(MODEL), join_request()], ids=["vectors", "small"])
def test_a_reply_that_was_lost_is_sent_again_byte_for_byte(tmp_path: Path, request_: Any) -> None:
    site = Answering()
    with open_channel(tmp_path) as channel, Relay(channel.address) as relay:

        def lose(_request: Any) -> None:
            site.vector = random_vector(0.01)  # asked again, the site would answer something else
            uploaded = site.vector.nbytes if isinstance(request_, Contribute) else 0
            relay.cut_at["up"] = relay.moved["up"] + uploaded + 100

        site.during = lose
        with connected(channel, site, tmp_path, through=relay):
            found = ask(channel, request_)
        assert relay.cut_at == {}, "nothing was lost"
        assert len(site.asked) == 1
        assert (found == site.vector).all() if isinstance(request_, Contribute) else found == Joined("site-1")


def test_a_site_that_starts_again_has_its_node_and_gets_its_request_again(tmp_path: Path) -> None:
    first, second = Answering(), Answering()
    begun, leave = threading.Event(), threading.Event()

    def hang(_request: Any) -> None:
        begun.set()
        leave.wait(WAIT_S)

    first.during = hang
    with open_channel(tmp_path) as channel:
        found: list[Any] = []
        with connected(channel, first, tmp_path):
            asking = threading.Thread(target=lambda: found.append(ask(channel, contribute(MODEL))))
            asking.start()
            assert begun.wait(WAIT_S)
            with connected_again(channel, second, tmp_path):
                asking.join(WAIT_S)
            leave.set()
        assert (found[0] == second.vector).all()
        one, other = first.asked[0], second.asked[0]
        assert isinstance(one, Contribute)
        assert isinstance(other, Contribute)
        assert one.sum == other.sum
        assert channel.nodes() == [1]


def connected_again(channel: AtDoor, site: Answering, folder: Path) -> Any:
    """A second process of a site that is connected already."""
    return connected(channel, site, folder / "second", more=0)


def spooled(folder: Path) -> int:
    """Bytes of a reply's vectors that the channel of a folder has on disk."""
    files = [path for path in (folder / "spool" / "replies").rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def test_a_coordinator_that_starts_again_goes_on_from_its_spool(tmp_path: Path) -> None:
    site = Answering(vector=random_vector(32))
    with open_channel(tmp_path) as channel:
        address = channel.address
        with Relay(address) as relay:
            relay.hold_at["up"] = 24 * CHUNK
            with connected(channel, site, tmp_path, through=relay):
                asking = channel.ask({1: contribute(MODEL)}, WAIT_S, group="1")
                thread = threading.Thread(target=lambda: list(suppressed(asking)))
                thread.start()
                while (held := spooled(tmp_path)) < 8 * CHUNK:  # not what the relay moved: a busy disk lags
                    assert thread.is_alive()
                channel.close()
                thread.join(WAIT_S)
                with open_channel(tmp_path, bind=address) as restarted:
                    relay.hold_at.clear()
                    relay.passing.set()
                    assert restarted.wait_for(1, WAIT_S) == 1
                    assert (ask(restarted, contribute(MODEL)) == site.vector).all()
                    (known,) = restarted.connected()
    assert len(site.asked) == 1
    assert known.received <= 32 * CHUNK - held, "the upload began again"


def suppressed(asking: Any) -> Any:
    """The answers until the coordinator's process has ended."""
    with contextlib.suppress(EngineError):
        yield from asking


def test_a_run_that_starts_again_gets_what_was_taken_without_a_second_upload(tmp_path: Path) -> None:
    """It had folded in the vector; its accumulator was in memory. The sites stay connected meanwhile."""
    site = Answering(vector=random_vector(4))
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path) as client:
        assert (ask(channel, contribute(MODEL)) == site.vector).all()
        channel.grid.close()
        assert client.connected
        with AtDoor(tmp_path, door=channel.door) as restarted:
            assert restarted.wait_for(1, WAIT_S) == 1
            assert (ask(restarted, contribute(MODEL)) == site.vector).all()
            assert restarted.connected()[0].received == 0, "it was uploaded again"
            assert ask(restarted, join_request()) == Joined("site-1")
            assert spooled(tmp_path) == 0, "it was kept longer than it may be wanted"


def test_a_reply_that_was_not_taken_outlives_the_run(tmp_path: Path) -> None:
    site = Answering(vector=random_vector(4))
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path):
        asking, wanted = GridChannel(channel.grid, sender_of(RUN), {1: "site-1"}), {1: contribute(MODEL)}
        requests: dict[str, Any] = {}
        asking._push(requests, asking._asked(wanted, WAIT_S, "1"))
        assert channel.grid.wait(WAIT_S)
        while not channel.grid._answers:
            assert channel.grid.wait(WAIT_S)
        channel.grid.close()  # it dies before it takes the reply
        assert requests
        with AtDoor(tmp_path, door=channel.door) as restarted:
            assert restarted.wait_for(1, WAIT_S) == 1
            assert (ask(restarted, contribute(MODEL)) == site.vector).all()
            assert restarted.connected()[0].received == 0, "it was uploaded again"
    assert len(site.asked) == 1


def test_a_request_that_is_answered_is_not_kept_until_its_deadline(tmp_path: Path) -> None:
    """Its vectors are open files: a run of many rounds would have too many of them."""
    with open_channel(tmp_path) as channel, connected(channel, Answering(), tmp_path):
        for _ in range(3):
            ask(channel, contribute(MODEL))
        # When the door answers this, it has forgotten the requests before.
        assert ask(channel, join_request()) == Joined("site-1")
        gc.collect()
        open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [path for path in open_files if path.startswith(str(tmp_path / "spool" / "requests"))]


@pytest.mark.slow
def test_an_upload_that_moves_at_the_deadline_is_waited_for(tmp_path: Path) -> None:
    site = Answering(vector=random_vector(32))
    with open_channel(tmp_path) as channel, Relay(channel.address) as relay:
        relay.hold_at["up"] = 12 * CHUNK
        with connected(channel, site, tmp_path, through=relay):
            opens = threading.Timer(1.5, relay.passing.set)
            opens.start()
            assert (ask(channel, contribute(MODEL), 0.75) == site.vector).all()
            opens.join()


@pytest.mark.slow
def test_the_deadline_begins_when_the_site_has_the_model(tmp_path: Path) -> None:
    site, trained = Answering(), threading.Event()

    def train(_request: Any) -> None:
        trained.wait(WAIT_S)

    with open_channel(tmp_path) as channel, Relay(channel.address) as relay:
        relay.hold_at["down"] = 4 * CHUNK
        with connected(channel, site, tmp_path, through=relay):
            site.during = train
            timers = [threading.Timer(1.0, relay.passing.set), threading.Timer(2.0, trained.set)]
            for timer in timers:
                timer.start()
            assert (
                ask(channel, contribute(np.arange(128 * CHUNK // 4, dtype=np.float32)), 1.5) == site.vector
            ).all()
            for timer in timers:
                timer.join()


def test_an_upload_that_stops_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_sites, "STALL_S", 0.2)
    site = Answering(vector=random_vector(32))
    with open_channel(tmp_path) as channel, Relay(channel.address) as relay:
        relay.hold_at["up"] = 12 * CHUNK
        with connected(channel, site, tmp_path, through=relay):
            assert ask(channel, contribute(MODEL), 0.75) == Failure(
                "node 1", "timeout: no answer within 0.75 s"
            )
            relay.passing.set()
            relay.hold_at.clear()
            monkeypatch.undo()
            assert (ask(channel, contribute(MODEL, 2)) == site.vector).all()
            assert ask(channel, join_request()) == Joined("site-1")
        left = [path for path in (tmp_path / "spool" / "replies").rglob("*") if path.is_file()]
        assert not left, "the upload that stopped is left"


def test_a_site_is_asked_again_after_it_was_late(tmp_path: Path) -> None:
    site = Answering()
    leave = threading.Event()

    def hang(_request: Any) -> None:
        leave.wait(WAIT_S)

    site.during = hang
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path):
        late = ask(channel, join_request("1"), 0.1)
        assert late == Failure("node 1", "timeout: no answer within 0.1 s")
        leave.set()
        assert ask(channel, join_request("2")) == Joined("site-1")
        assert list(channel.ask({3: join_request()}, 0.1, group="x")) == [
            (3, Failure("node 3", "timeout: no answer within 0.1 s"))
        ]


def test_a_site_whose_disk_refuses_the_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "site-1").write_text("a file where the folder of vectors should be")
    with open_channel(tmp_path) as channel, connected(channel, Answering(), tmp_path):
        reply = ask(channel, contribute(MODEL))
        assert isinstance(reply, Failed)
        assert "a disk that accepts the write" in reply.reason


def test_a_proxy_is_asked_to_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_channel(tmp_path) as channel, Relay(channel.address, proxy=True) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
        with connected(channel, Answering(), tmp_path):
            assert ask(channel, join_request()) == Joined("site-1")
        assert proxy.connects == [f"CONNECT {channel.address} HTTP/1.1"]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with connected(channel, Answering("site-2"), tmp_path):
            assert len(proxy.connects) == 1


def test_sites_stay_when_a_run_is_over_and_serve_the_next(tmp_path: Path) -> None:
    site = Answering()
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path) as client:
        assert (ask(channel, contribute(MODEL)) == site.vector).all()
        assert client.run_label == RUN
        channel.grid.close(over=True)
        until = time.monotonic() + WAIT_S
        while client.run_label or any((tmp_path / "site-1").iterdir()):
            assert time.monotonic() < until, "the model of a run that is over stays at the site"
        assert client.connected
        with AtDoor(tmp_path / "next", door=channel.door, run="next") as following:
            assert following.wait_for(1, WAIT_S) == 1
            assert (ask(following, contribute(MODEL)) == site.vector).all()
            assert str(client.run_label) == "next"


def test_a_site_serves_the_next_run_though_it_cannot_remove_what_the_last_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems keep a file that is open elsewhere."""
    site, unlink = Answering(), Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        if path.parent == tmp_path / "site-1":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, missing_ok=missing_ok)

    def fails() -> None:
        ended.set()
        raise RuntimeError

    ended = threading.Event()
    monkeypatch.setattr(Path, "unlink", busy)
    with open_channel(tmp_path) as channel, connected(channel, site, tmp_path) as client:
        assert (ask(channel, contribute(MODEL)) == site.vector).all()
        client._ended = fails  # a defect of what comes after that
        channel.grid.close(over=True)
        assert ended.wait(WAIT_S)
        with AtDoor(tmp_path / "next", door=channel.door, run="next") as following:
            assert following.wait_for(1, WAIT_S) == 1
            assert (ask(following, contribute(MODEL + 1)) == site.vector).all()


def test_an_older_copy_of_a_sites_folder_is_refused_whatever_key_it_has(tmp_path: Path) -> None:
    """And the site that is connected stays: a copy that runs beside it must not take its place."""
    federation = [federation_of({"site-1": identity_of("site-1")})]
    heads, newest = Heads(None, tmp_path / "heads"), pb.Head(number=7, hash="a" * 64)
    with Door(lambda: CERTIFICATE, lambda: federation[0], "127.0.0.1:0", heads) as door:
        heads.note("site-1", Head(7, "a" * 64))
        for key in ("site-1", "another key"):
            federation[0] = federation_of({"site-1": identity_of(key)})
            with Raw(entrance_at(door.address)) as raw, Raw(entrance_at(door.address)) as copy:
                _, welcome = raw.welcomed("site-1", identity_of(key), newest)
                assert (welcome.seen.number, welcome.seen.hash) == (7, "a" * 64)
                for older in (None, pb.Head(number=6, hash="b" * 64), pb.Head(number=8, hash="no hash")):
                    copy.unsent = type(copy.unsent)()
                    with pytest.raises(grpc.RpcError) as raised:
                        copy.welcomed("site-1", identity_of(key), older)
                    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert door.connected() == ["site-1"]


def test_a_site_whose_log_is_shorter_than_it_was_in_the_session_is_refused(tmp_path: Path) -> None:
    federation = federation_of({"site-1": identity_of("site-1")})
    heads = Heads(None, tmp_path / "heads")
    with (
        Door(lambda: CERTIFICATE, lambda: federation, "127.0.0.1:0", heads) as door,
        Raw(entrance_at(door.address)) as raw,
    ):
        call, _ = raw.open("site-1")
        for number in (7, 7, 8):
            raw.say(alive=pb.Alive(head=pb.Head(number=number, hash="a" * 64)))
            assert said(call).WhichOneof("said") == "alive"
        raw.say(alive=pb.Alive(head=pb.Head(number=7, hash="a" * 64)))
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert door.states()["site-1"].startswith("refused: audit log of site-1")
    assert heads.known("site-1") == Head(8, "a" * 64)


def test_a_certificate_that_was_renewed_is_served_at_once(tmp_path: Path) -> None:
    """And the sessions that are open stay."""
    served = [CERTIFICATE]
    federation = federation_of({"site-1": identity_of("site-1"), "site-2": identity_of("site-2")})
    with (
        Door(lambda: served[0], lambda: federation, "127.0.0.1:0") as door,
        AtDoor(tmp_path, door=door) as channel,
        connected(channel, Answering(), tmp_path),
    ):
        served[0] = AUTHORITY.server()
        assert ssl.get_server_certificate(split(door.address)) == served[0].pem.decode()
        with connected(channel, Answering("site-2"), tmp_path):
            assert [site.online for site in channel.connected()] == [True, True]


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_no_thread_and_no_secret_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    before = set(threading.enumerate())
    with open_channel(tmp_path) as channel, connected(channel, Answering(), tmp_path) as client:
        ask(channel, contribute(MODEL))
        assert client._session is not None
        key = client._session.key
        shown = caplog.text + repr(client._session) + repr(CERTIFICATE)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if "_poll_wrapper" not in name}  # gRPC's own, one in a process
    for secret in (key, CERTIFICATE.key):
        assert repr(secret)[2:-1] not in shown
        assert secret.hex() not in shown


def memory() -> int:
    """Bytes of this process that are not those of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_sites(tmp_path: Path) -> None:
    vector = np.arange(2**24, dtype=np.uint32)  # 64 MiB, one array for all sites of this process
    model = np.zeros(4, np.float32)
    peaks = []
    names = [f"site-{number}-{index}" for number in (1, 4) for index in range(number)]
    with open_channel(tmp_path, names=names, most_bytes=vector.nbytes) as channel:
        for number in (1, 4):
            gc.collect()
            return_freed_memory()  # of earlier tests, which would be returned while sites upload
            with contextlib.ExitStack() as stack:
                for index in range(number):
                    site = Answering(f"site-{number}-{index}", vector)
                    stack.enter_context(connected(channel, site, tmp_path))
                there = zip(channel.nodes(), channel.connected(), strict=True)
                nodes = [node for node, each in there if each.online]
                most = 0
                asked = channel.ask({node: contribute(model) for node in nodes}, WAIT_S, group="1")
                for _, reply in asked:
                    assert isinstance(reply, Contribution)
                    most = max(most, memory())
                peaks.append(most)
    assert peaks[1] - peaks[0] < vector.nbytes
