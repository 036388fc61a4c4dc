"""The errors of the project, one class for each fact.

A user at the command line sees `str(error)`: one printable line that names the field, its value, what was expected and,
if there is one, the fix. An error may quote what another party has sent, and its text goes to terminals and logs. An
exception of any other class is a defect and shows its traceback.
"""

from __future__ import annotations

import copyreg
from typing import Any, Self


class CloisterError(Exception):
    """An error that a user can fix; `str()` is one line for that user.

    Args:
        field: What was wrong: a plan field such as `local.steps`, an option, a path.
        value: The value it had, shown with `repr`; omit it if there was none.
        expected: What would have been accepted.
        fix: What to do, if that is more than giving what was expected.
    """

    _ABSENT = object()

    def __init__(self, field: str, value: object = _ABSENT, *, expected: str, fix: str = "") -> None:
        self.field = field
        self.value = None if value is self._ABSENT else value
        self._shown = () if value is self._ABSENT else (value,)
        self.expected = expected
        self.fix = fix
        shown = field if value is self._ABSENT else f"{field} is {_short(value)}"
        parts = [f"{shown}: expected {expected}"]
        if fix:
            parts.append(fix)
        super().__init__(visible("; ".join(parts)))

    @classmethod
    def of(cls, error: CloisterError, field: str = "", *, fix: str | None = None) -> Self:
        """What another error says, as one of this class.

        Args:
            error: The other error.
            field: Another field; empty: the same.
            fix: Another fix; None: the same.
        """
        fix = error.fix if fix is None else fix
        return cls(field or error.field, *error._shown, expected=error.expected, fix=fix)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the finished text with the attributes, not as a call of `__init__`, which takes other arguments."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # not in its stub


class PlanError(CloisterError):
    """A plan is invalid: a field is unknown, of the wrong type, or contradicts another."""


class PackageError(CloisterError):
    """An installed package is not what a plan names."""


class SearchError(CloisterError):
    """A search over plans is invalid, or would not have the price that it states."""


class ModelError(CloisterError):
    """A model, tokenizer or adapter cannot be loaded or does not fit the plan."""


class DataError(CloisterError):
    """A site's data is missing, empty or not of the format that the plan names."""


class RunFolderError(CloisterError):
    """A run folder cannot be used: it holds another run, is locked, or lacks what a resume needs."""


class StorageError(CloisterError):
    """The disk refused a read or write; existing data is unchanged."""


class UpdateError(CloisterError):
    """A site's update cannot be summed: it is non-finite, of the wrong length, or for another round."""


class QuorumError(CloisterError):
    """Too few sites finished a round in every attempt that the plan allows."""


class SpoiledError(CloisterError):
    """Sums were opened whose counters no honest sites can have."""


class FaultError(CloisterError):
    """A simulated site dropped out, because the plan's faults say so."""


class EngineError(CloisterError):
    """An engine cannot start, or has lost something that it needs to continue."""


class DoorError(CloisterError):
    """A session at the door has ended or was refused: its peer is gone, silent, too fast or not understood."""


class SessionError(DoorError):
    """A transfer names no session that is open."""


class UntrustedError(DoorError):
    """A server does not show a certificate of the federation's authority for its name, or it is not valid."""


class TransferError(DoorError):
    """A vector cannot be sent or received: it is not wanted, too long, or does not match its hash."""


class MachineError(CloisterError):
    """A machine lacks what its party needs: a package, space on its disk, a port, or the right time."""


class ConnectionFailedError(CloisterError):
    """A hop of the way from a site to a server fails: name, proxy, TCP, TLS or HTTP/2."""


class RankError(CloisterError):
    """A rank, one of the processes in which a site trains, has ended, is late, or has raised a defect."""


class SecureSumError(CloisterError):
    """A step of the secure sum was refused; the refusal revealed nothing."""


class ParameterError(SecureSumError):
    """No graph and threshold can tolerate the dropouts and colluders that the plan demands."""


class EncodingError(SecureSumError):
    """Bytes are not the canonical encoding of what was expected."""


class StepError(SecureSumError):
    """A message came out of order, or a one-time step was requested again."""


class StaleError(SecureSumError):
    """A stale message or attempt: it belongs to another run, plan, model, cohort, round or attempt."""


class MemberError(SecureSumError):
    """A list of sites names one that does not belong there, names one twice, or leaves one out."""


class RestoredError(SecureSumError):
    """A party's folder is older than another party has seen it, such as a restored backup."""


class BalanceError(SecureSumError):
    """A list of the sites' local steps is not one that the plan allows."""


class TooFewSitesError(SecureSumError):
    """Fewer sites are left than the threshold, or the minimum that a site demands."""


class SignatureError(SecureSumError):
    """A signature was not made by the named site."""


class OneTimeKeyError(SecureSumError):
    """A one-time key is not a usable X25519 key, or a site's own key was changed on its way back."""


class ShareError(SecureSumError):
    """An encrypted share is missing, was altered, or was made for another site."""


class AgreementError(SecureSumError):
    """Too few sites signed the same list of survivors, or a site was given a second list."""


class ExclusiveError(SecureSumError):
    """Both secrets of one site were asked for: together they would open its update."""


class AnsweredError(SecureSumError):
    """A site has already answered for other survivors: the difference of two sums would open updates."""


class MaskError(SecureSumError):
    """Part of a vector would be masked twice with the same keys, or has the wrong width, length or place."""


class ReconstructionError(SecureSumError):
    """A reconstructed secret is not the one that its site committed to or advertised."""


class LengthError(SecureSumError):
    """A site's vector is longer than any that an honest site sends, or sketches do not add up to that of the sum."""


class PinnedError(SecureSumError):
    """A message belongs to a plan or run that is not the one the site has accepted."""


class ConsentError(CloisterError):
    """A site's people have not consented to the run of a plan."""


class RosterError(CloisterError):
    """A card or roster is damaged, inconsistent, or not the one that was agreed on."""


class CertificateError(CloisterError):
    """A certificate or its key is damaged, expired, or not of the kind that was expected."""


class BudgetError(CloisterError):
    """A release would exceed the privacy budget."""


class LedgerError(CloisterError):
    """A ledger is damaged or altered, or a charge contradicts what it holds."""


class AuditLogError(CloisterError):
    """An audit log is damaged or altered."""


class PolicyError(CloisterError):
    """A site's policy forbids the request."""


class AccountingError(CloisterError):
    """Privacy losses cannot be composed or calibrated as requested."""


def one_line(error: BaseException) -> str:
    """An exception as one line: a `CloisterError`'s own text, else the class and text of the exception."""
    text = str(error) if isinstance(error, CloisterError) else f"{type(error).__name__}: {error}"
    return visible(text).removesuffix(":")


def visible(text: str) -> str:
    """A text as one line; a question mark replaces each character that is not printable, such as one of an escape
    sequence or one that changes the direction of writing."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= 120 else text[:117] + "..."
