"""The files of a site that later messages need: the plan that it joined, the base model, what it made for sums.

Each run has a folder of its own in the state folder (`run_folder`), so that no run replaces a file of another. It also
has the attempts of the secure sum (`attempt_files.py`) and what updates carry (`carried.py`). Runs share the base
models, the tokenised data (`lm/data/prepare.py`), the ledger, the rounding key and the consents (`consents.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector.span import Manifest, Piece, check_received, manifest_of
from cloister.clients.setup.config import Membership
from cloister.lm.model.layout import Vector
from cloister.protocol.errors import PinnedError, StaleError, StepError, StorageError, UpdateError
from cloister.protocol.machine.storage import on_disk, sync_folders, write_bytes, write_file, write_new
from cloister.protocol.messages.blocks import all_finite
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import EVALUATE, TRAIN, ByFeature, Join, Purpose, SumId
from cloister.protocol.plan.plan import Plan

ROUNDING_KEY = "rounding.key"
"""The file, in the state folder, of the secret from which a site's rounding follows, for each run apart."""
DECLARED_ROUNDING = "rounding.declared"
"""The file, in a simulated site's state folder, of the key of its rounding in all runs."""
_ROUNDING_KEY = 32  # bytes
_SEALED = struct.Struct("<Q")
"""The bytes of the JSON at the end of a kept vector."""


@dataclass(frozen=True)
class Written:
    """A vector in pieces that tile it, in their order."""

    manifest: Manifest
    """Offset, length and hash of each piece that is not empty."""
    pieces: list[Piece]
    """The pieces."""
    seconds: float = 0.0
    """Seconds in which an update was trained."""


def run_folder(state: Path, run: str) -> Path:
    """The folder of a run in a site's state folder; the run's identity is the coordinator's text, so it is hashed."""
    return state / "runs" / run_id(run)


def run_id(run: str) -> str:
    """A name of a run that is safe in a path: 32 hex digits."""
    return hashlib.sha256(run.encode()).hexdigest()[:32]


def newest_plan(state: Path) -> str | None:
    """The text of the plan that the site has joined last, of those whose folders are there; None: of none."""
    found = sorted((state / "runs").glob("*/joined.json"), key=lambda path: path.stat().st_mtime_ns)
    return str(json.loads(found[-1].read_bytes())["plan"]) if found else None


def joined_folders(state: Path, digest: str) -> set[str]:
    """Names (`run_id`) of the folders of the runs that have joined the plan with a digest.

    Raises:
        StorageError: the disk refuses to read one.
    """
    found = (state / "runs").glob("*/joined.json")
    with on_disk(state):
        return {path.parent.name for path in found if f'"digest": "{digest}"'.encode() in path.read_bytes()}


class Kept:
    """A site's state folder.

    Args:
        state: The folder.
        bases: Folder of base models; several sites of one machine may share it.
    """

    def __init__(self, state: Path, bases: Path) -> None:
        self._state = state
        self._bases = bases

    # The plan and the base of a run, which are sent once, when the site joins.

    def remember(self, request: Join, digest: bytes, membership: Membership | None) -> None:
        """Keep the plan and base of a join, durably, for later messages, which name the plan by its digest.

        Args:
            request: The join, whose base was checked (`checked_base`).
            digest: Digest of its plan.
            membership: As whom the site joins; kept for the whole run.

        Raises:
            PinnedError: the site has joined that run with another plan or base.
            StorageError: the disk refuses a write.
        """
        joined = {"digest": digest.hex(), "plan": request.plan, "base": request.base_hash.hex()}
        joined |= membership._asdict() if membership else {}
        self.check(request, digest)
        path = base_path(self._bases, request.base_hash)
        if request.base_hash and not path.exists():
            write_file(path, lambda temporary: save_vector(temporary, request.base))
        write_bytes(self._joined(request.run), json.dumps(joined).encode())

    def check(self, request: Join, digest: bytes, *, again: bool = False) -> None:
        """Check that a join is the one that the site knows, if it has joined the run before.

        Args:
            request: The join.
            digest: Digest of its plan.
            again: Whether the run has taken a consent: then what `remember` kept must be whole. Without it the site
                would go on under the roster of today, and not under the one with which it has joined.

        Raises:
            PinnedError: the site has joined that run with another plan or base.
            StorageError: it has joined that run, and with what is lost.
        """
        known, joined = self._read(request.run), {"digest": digest.hex(), "base": request.base_hash.hex()}
        if known is None and again:
            raise StorageError(
                str(self._joined(request.run)),
                expected="the plan and roster with which this site has joined the run",
                fix="restore the file from a backup; without it the site takes no part in the run",
            )
        if known is not None and any(known[name] != joined[name] for name in joined):
            raise PinnedError(
                "base model", request.base_hash.hex(), expected="the one that was joined in this run"
            )

    def knows(self, run: str) -> bool:
        """Whether the site has joined a run: its file is there, whatever it has."""
        return self._joined(run).exists()

    def membership(self, run: str) -> Membership | None:
        """As whom the site has joined a run; None where that was not kept."""
        joined = self._read(run)
        if joined is None or not set(Membership._fields) <= set(joined):
            return None
        return Membership(*(joined[name] for name in Membership._fields))

    def recall(self, run: str, digest: bytes, read: Callable[[str], Plan]) -> tuple[Plan, bytes]:
        """The plan that the site joined in a run, and the hash of its base model, which is empty if there is none.

        Args:
            run: Identity of the run.
            digest: Digest of the plan, as a message names it.
            read: Reads a plan's text.

        Raises:
            PinnedError: the site has not joined that run, or has joined another plan in it.
            StorageError: what it keeps is not that plan.
        """
        joined = self._read(run)
        if joined is None:
            raise PinnedError("run", run, expected="a run that this site was asked to join first")
        named, text, base_hash = joined["digest"], joined["plan"], bytes.fromhex(joined["base"])
        if named != digest.hex():
            raise PinnedError(
                "digest of the plan", digest.hex(), expected=f"{named}, which was joined in this run"
            )
        plan = read(text)
        if plan.digest() != named:
            raise StorageError(str(self._joined(run)), expected="the plan that this site has joined")
        return plan, base_hash

    def _joined(self, run: str) -> Path:
        return run_folder(self._state, run) / "joined.json"

    def _read(self, run: str) -> dict[str, str] | None:
        """What `remember` kept of a run; None where it kept nothing that is whole."""
        try:
            joined = json.loads(self._joined(run).read_bytes())
            needed = ("digest", "plan", "base", *(set(Membership._fields) & set(joined)))
            return {name: str(joined[name]) for name in needed}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    # Finished updates and totals, so that no retry trains or evaluates again, and what is masked again is the same.

    @contextmanager
    def turn(self, run: str) -> Iterator[None]:
        """Take the lock on what is kept of a run: of two processes that are asked for one update, one makes it.

        Raises:
            StepError: another process has it. It may still be training for an earlier attempt; a later one gets what it
                has made.
            StorageError: the disk refuses the access.
        """
        path = run_folder(self._state, run) / "update.lock"
        with on_disk(path):
            lock = path.open("wb")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StepError(
                    "update", expected="one process of this site that makes it", fix="try the round again"
                ) from None
            yield

    def rounding_key(self, run: str) -> bytes:
        """The key of the site's rounding in a run: a secret, made once, unless a simulation has declared it.

        Raises:
            StorageError: the disk refuses it, or the file is damaged.
        """
        declared = self._state / DECLARED_ROUNDING
        if declared.exists():
            return declared.read_bytes()
        path = self._state / ROUNDING_KEY
        write_new(path, os.urandom(_ROUNDING_KEY))
        key = path.read_bytes()
        if len(key) != _ROUNDING_KEY:
            raise StorageError(
                str(path), f"{len(key)} bytes", expected=f"{_ROUNDING_KEY}", fix="remove the file"
            )
        return hmac.digest(key, run.encode(), "sha256")

    def keep(
        self,
        about: SumId,
        write: Callable[[Path], Written],
        facts: Mapping[str, str],
        told: ByFeature = (),
        *,
        durable: bool,
    ) -> Written:
        """Keep what the site has made for a sum, and remove the same of other rounds of the run.

        One file has the ring integers, each piece at its offset, then the facts and the manifest in JSON, and the
        number of bytes of that.

        Args:
            about: The sum.
            write: Writes the vector that is summed, before its masks, into a new file that only its owner may read
                (`write_pieces`).
            facts: The inputs that the vector depends on; `made` returns it for the same facts only.
            told: What features told for it; `told` returns it.
            durable: Sync it before this returns.

        Returns:
            What `write` returned.

        Raises:
            StorageError: the disk is full.
        """
        folder = run_folder(self._state, about.run)
        path = _path(folder, about.purpose, about.round)
        done: list[Written] = []

        def fill(temporary: Path) -> None:
            done.append(written := write(temporary))
            entries = [[offset, size, digest.hex()] for offset, size, digest in written.manifest]
            features = {name: each.hex() for name, each in told}
            sealed = json.dumps(
                {"facts": dict(facts), "manifest": entries, "seconds": written.seconds, "told": features}
            ).encode()
            with temporary.open("ab") as file:
                file.write(sealed + _SEALED.pack(len(sealed)))

        write_file(path, fill, durable=durable)
        for old in folder.glob(f"{_NAMES[about.purpose]}-*"):
            if old != path:
                old.unlink(missing_ok=True)
        return done[0]

    def told(self, about: SumId, length: int, dtype: npt.DTypeLike) -> ByFeature:
        """What features told for a sum that `made` has returned; the arguments are as there."""
        path = _path(run_folder(self._state, about.run), about.purpose, about.round)
        told = json.loads(_sealed(path, length * np.dtype(dtype).itemsize))["told"]
        return tuple((name, bytes.fromhex(each)) for name, each in sorted(told.items()))

    def made(
        self, about: SumId, facts: Mapping[str, str], length: int, dtype: npt.DTypeLike
    ) -> Written | None:
        """What the site has made for a sum if it is whole, of this length and type; None if there is none.

        Its pieces are mapped from the file, copied on a write; a change does not reach the file.

        Args:
            about: The sum.
            facts: As for `keep`.
            length: Elements of the vector.
            dtype: The ring's.

        Raises:
            StaleError: the site has made it from other facts.
        """
        path = _path(run_folder(self._state, about.run), about.purpose, about.round)
        try:
            sealed = json.loads(_sealed(path, length * np.dtype(dtype).itemsize))
            others = {name for name, value in facts.items() if sealed["facts"].get(name) != value}
            if others:
                name = _NAMES[about.purpose]
                raise StaleError(
                    f"{name} of round {about.round}",
                    " and ".join(sorted(others)),
                    expected=f"the same as when this site made its {name} of the round: there is one {name} in a round",
                )
            manifest = tuple(
                (offset, size, bytes.fromhex(digest)) for offset, size, digest in sealed["manifest"]
            )
            vector = np.memmap(path, dtype, "c", shape=(length,))
            spans = [np.asarray(vector[offset : offset + size]) for offset, size, _ in manifest]
            pieces = check_received(manifest, spans, length, dtype)
            # The process that made it may have been killed before it did.
            sync_folders(path.parent, path.parent)
            return Written(manifest, pieces, float(sealed["seconds"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UpdateError):
            return None  # missing, torn by a crash, or of another model: the site trains


def checked_base(request: Join, plan: Plan) -> Vector | None:
    """The base model of a join; None where it has none.

    Raises:
        UpdateError: it is not the model that the request's hash names, or non-finite, or the plan names the model.
    """
    if not request.base_hash:
        return None
    if not plan.public.source or plan.model.adapter.scheme == "full":
        raise UpdateError("base model", request.base_hash.hex(), expected="none: the plan names the model")
    check_sent("base model", request.base, request.base_hash)
    return request.base


def check_sent(what: str, vector: Vector, named: bytes) -> None:
    """Check a vector that every site of a sum gets, before any record is used.

    What is trained from a non-finite one would depend on records; its hash binds the masks to it.

    Args:
        what: What errors call it.
        vector: (d,) float32.
        named: The hash that the request names.

    Raises:
        UpdateError: it has another hash, or is non-finite.
    """
    own = vector_hash(vector)
    if own != named:
        raise UpdateError(what, own.hex(), expected=f"the one with the hash {named.hex()}")
    if not all_finite(vector):
        raise UpdateError(what, "non-finite", expected="finite numbers")


def update_path(folder: Path, round_number: int) -> Path:
    """Where a site keeps its finished update of a round in the folder of the run."""
    return _path(folder, TRAIN, round_number)


_NAMES: dict[Purpose, str] = {TRAIN: "update", EVALUATE: "totals"}


def _path(folder: Path, purpose: Purpose, round_number: int) -> Path:
    return folder / f"{_NAMES[purpose]}-{round_number:05d}.ring"


def _sealed(path: Path, size: int) -> bytes:
    """What follows the `size` bytes of a kept vector, without its length.

    Raises:
        ValueError: the file is not whole, or its vector has another size.
    """
    with path.open("rb") as file:
        file.seek(-_SEALED.size, os.SEEK_END)
        (length,) = _SEALED.unpack(file.read())
        if file.tell() != size + length + _SEALED.size:
            raise ValueError(f"{path}: not a kept vector of {size} bytes")
        file.seek(size)
        return file.read(length)


def write_pieces(path: Path, pieces: list[Piece]) -> Written:
    """Write the pieces of a vector into a new file, which only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        for offset, vector in pieces:
            file.seek(offset * vector.itemsize)
            file.write(vector.data)
    return Written(manifest_of(pieces), pieces)


def base_path(folder: Path, base_hash: bytes) -> Path:
    """Where the base model with a hash is kept in a folder."""
    return folder / f"base-{base_hash.hex()}.npy"


def read_base(path: Path, base_hash: bytes) -> Vector | None:
    """The base model in a file; None for the empty hash.

    Raises:
        StorageError: it is missing or has changed.
    """
    if not base_hash:
        return None
    try:
        base: Vector = np.load(path)
    except (OSError, ValueError) as error:
        raise StorageError(
            str(path), expected=f"the base model that this site was given ({error})"
        ) from error
    if vector_hash(base) != base_hash:
        raise StorageError(str(path), expected="the base model that this site was given, but it has changed")
    return base


def save_vector(path: Path, vector: Vector) -> None:
    """Write what `Kept.base` reads."""
    with path.open("wb") as file:
        np.save(file, vector)
