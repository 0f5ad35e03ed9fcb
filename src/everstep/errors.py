"""Exceptions that everstep raises on purpose.

::

    EverstepError                     root of the tree; carries the fields below
    |-- OptionError                   a constructor argument or option that cannot work
    |-- StateError                    something about the training state
    |   |-- UnsupportedStateError     leaves that cannot be stored, all listed by name
    |   |-- MismatchError             saved and live state differ, all differences listed
    |   |-- AuditError                changed by a write that no hook announced
    |   `-- NonFiniteError            a gradient that is NaN or infinite was consumed
    |-- StorageError                  a disk or another tier
    |   |-- OutOfSpaceError           disk full, quota reached or budget exceeded
    |   |-- PermissionDeniedError     read-only or foreign directory
    |   |-- FormatError               malformed bytes
    |   |   `-- NewerFormatError      written by a newer everstep
    |   |-- DamageError               a digest does not match; names file and entry
    |   |-- UnreachableError          a store that does not answer; the next try may succeed
    |   `-- ForeignDirectoryError     a directory that is not a run folder
    |-- RecoveryError                 the requested state, or any state, cannot be recovered
    |-- ReplayError                   logged updates cannot be applied to this state
    |-- FencedError                   a newer timeline has taken this run over
    |-- KeeperError                   the keeper process: lost, refused, of another version
    |   `-- KeeperTimeoutError        it did not answer in time; a DeadlineError too
    |-- DeadlineError                 an operation exceeded its timeout
    |-- InfeasibleError               no choice reaches the goal; names the limiting cost
    `-- UnavailableError              this machine or build lacks a requested feature

Errors carry the fields ``step``, ``rank``, ``tier``, ``path`` and ``hint``: where it happened and a
remedy. Bugs in everstep are assertions.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

__all__ = [
    "AuditError",
    "DamageError",
    "DeadlineError",
    "EverstepError",
    "FencedError",
    "ForeignDirectoryError",
    "FormatError",
    "InfeasibleError",
    "KeeperError",
    "KeeperTimeoutError",
    "MismatchError",
    "NewerFormatError",
    "NonFiniteError",
    "OptionError",
    "OutOfSpaceError",
    "PermissionDeniedError",
    "RecoveryError",
    "ReplayError",
    "StateError",
    "StorageError",
    "UnavailableError",
    "UnreachableError",
    "UnsupportedStateError",
]


class EverstepError(Exception):
    """Root of all errors raised on purpose.

    Args:
        message: one sentence that describes the failure.
        step: step of training at which it happened.
        rank: rank on which it happened.
        tier: tier on which it happened ("disk", ...).
        path: file or directory.
        hint: a remedy.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        tier: str | None = None,
        path: PurePath | str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.rank = rank
        self.tier = tier
        self.path = None if path is None else str(path)
        self.hint = hint

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("rank", self.rank), ("tier", self.tier))
            if value is not None
        ]
        if self.path is not None and self.path not in self.message:
            where.append(self.path)
        # The location goes at the end of the first line: a list of details may follow.
        first, newline, rest = self.message.partition("\n")
        colon = ":" if newline and first.endswith(":") else ""
        first = first[: len(first) - len(colon)] + (f" [{', '.join(where)}]" if where else "")
        text = first + colon + newline + rest
        return text + (f"\n  hint: {self.hint}" if self.hint else "")

    def __reduce__(self) -> tuple[Any, ...]:
        # torch sends the errors of ranks to each other. Without this an error would be made anew
        # from its message alone, which fails where an argument is required.
        return _rebuilt, (type(self), self.args, self.__dict__)

    def fields(self) -> dict[str, Any]:
        """The error as plain data, for ``--json`` outputs."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "step": self.step,
            "rank": self.rank,
            "tier": self.tier,
            "path": self.path,
            "hint": self.hint,
        }


def _rebuilt(
    kind: type[EverstepError], args: tuple[Any, ...], fields: dict[str, Any]
) -> EverstepError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class OptionError(EverstepError, ValueError):
    """An invalid constructor argument or option."""


class StateError(EverstepError):
    """A problem with the training state itself."""


class UnsupportedStateError(StateError, TypeError):
    """Leaves of the state that cannot be stored.

    Attributes:
        leaves: ``(name, reason)`` of every one of them.
    """

    def __init__(self, message: str, *, leaves: tuple[tuple[str, str], ...], **where: Any) -> None:
        super().__init__(message, **where)
        self.leaves = leaves


class MismatchError(StateError):
    """Saved and live state differ in names, shapes or dtypes.

    Attributes:
        mismatches: every difference, as ``(name, what differs)``.
    """

    def __init__(
        self, message: str, *, mismatches: tuple[tuple[str, str], ...], **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.mismatches = mismatches


class AuditError(StateError):
    """A write that no hook announced changed the state, or a base differs from replay.

    The captured base is not committed.
    """


class NonFiniteError(StateError):
    """An optimizer update has consumed a gradient with NaN or infinity."""


class StorageError(EverstepError):
    """A disk or another tier failed."""


class OutOfSpaceError(StorageError):
    """Disk full, quota reached, or a budget exceeded."""


class PermissionDeniedError(StorageError):
    """The directory cannot be written (or read) by this user."""


class FormatError(StorageError):
    """Malformed bytes; refused before memory is allocated for them."""


class NewerFormatError(FormatError):
    """A file written by a newer version of everstep."""


class DamageError(StorageError):
    """A digest does not match: the bytes on disk are not the bytes that were written.

    Attributes:
        entry: name of the damaged entry, or None when the damage is outside any entry.
    """

    def __init__(self, message: str, *, entry: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.entry = entry


class UnreachableError(StorageError):
    """A store does not answer or is temporarily unavailable; a retry may succeed."""


class ForeignDirectoryError(StorageError):
    """A directory that holds files of something else than a run."""


class RecoveryError(EverstepError):
    """The requested state, or any state, cannot be recovered."""


class ReplayError(EverstepError):
    """Logged updates cannot be applied to this state, or not in this order."""


class FencedError(EverstepError):
    """A newer timeline has taken over this run; this process may not commit or delete (I11)."""


class DeadlineError(EverstepError):
    """An operation exceeded its timeout.

    Not a subclass of ``TimeoutError``: that is an ``OSError``, and handlers of file-system errors
    would catch it.
    """


class KeeperError(EverstepError):
    """The keeper process is lost, refused a request, or has another version."""


class KeeperTimeoutError(KeeperError, DeadlineError):
    """The keeper process did not start or answer within the timeout."""


class InfeasibleError(EverstepError):
    """No choice reaches the goal with the given costs.

    Attributes:
        quantity: name of the limiting cost.
        needed: bound that the cost would have to meet, in its unit.
    """

    def __init__(self, message: str, *, quantity: str, needed: float, **where: Any) -> None:
        super().__init__(message, **where)
        self.quantity = quantity
        self.needed = needed

    def fields(self) -> dict[str, Any]:
        """The error as plain data, for ``--json`` outputs."""
        return {**super().fields(), "quantity": self.quantity, "needed": self.needed}


class UnavailableError(EverstepError):
    """This machine, build or installation lacks a requested feature."""
