"""Every exception that everstep raises on purpose.

::

    EverstepError                     root of the tree; carries the fields below
    |-- OptionError                   a constructor argument or option that cannot work
    |-- StateError                    something about the training state
    |   |-- UnsupportedStateError     leaves that cannot be stored, all listed by name
    |   |-- MismatchError             saved and live state differ, all differences listed
    |   |-- AuditError                changed by something that nobody was told of
    |   `-- NonFiniteError            a gradient that is NaN or infinite was consumed
    |-- StorageError                  the place where bytes live
    |   |-- OutOfSpaceError           disk full, quota reached or budget exceeded
    |   |-- PermissionDeniedError     read-only or foreign directory
    |   |-- FormatError               bytes that are not what they claim to be
    |   |   `-- NewerFormatError      written by a newer everstep
    |   |-- DamageError               a digest does not match; names file and entry
    |   |-- UnreachableError          a store that does not answer; the next try may succeed
    |   `-- ForeignDirectoryError     a directory with other people's files
    |-- RecoveryError                 nothing (or not what was asked for) can be recovered
    |-- ReplayError                   logged updates cannot be applied to this state
    |-- FencedError                   a newer timeline has taken this run over
    |-- KeeperError                   the keeper process: lost, refused, of another version
    |   `-- KeeperTimeoutError        it did not answer in time; a DeadlineError too
    |-- DeadlineError                 something took longer than its stated time
    |-- InfeasibleError               no choice reaches the goal; says what would
    `-- UnavailableError              this machine or build lacks what was asked for

Operating errors carry fields (``step``, ``rank``, ``tier``, ``path``, ``hint``) and say
what happened, where, and what to do. Bugs are assertions.
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
        message: what happened, in one sentence.
        step: the user's step, if one is concerned.
        rank: the rank concerned.
        tier: the tier concerned ("disk", ...).
        path: the file or directory concerned.
        hint: what the reader can do about it.
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
        # Behind the first line: what follows may be a list, of which it is no part.
        first, newline, rest = self.message.partition("\n")
        colon = ":" if newline and first.endswith(":") else ""
        first = first[: len(first) - len(colon)] + (f" [{', '.join(where)}]" if where else "")
        text = first + colon + newline + rest
        return text + (f"\n  hint: {self.hint}" if self.hint else "")

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


class OptionError(EverstepError, ValueError):
    """A constructor argument or option that cannot work."""


class StateError(EverstepError):
    """Something about the training state itself."""


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
    """State was changed behind everstep's back, and what was captured of it is not committed; or
    a base is not what replay of the log gives."""


class NonFiniteError(StateError):
    """An update has consumed a gradient with NaN or infinity in it."""


class StorageError(EverstepError):
    """The place where bytes live does not do what it should."""


class OutOfSpaceError(StorageError):
    """Disk full, quota reached, or a budget exceeded."""


class PermissionDeniedError(StorageError):
    """The directory cannot be written (or read) by this user."""


class FormatError(StorageError):
    """Bytes that are not what they claim to be; refused before anything is allocated."""


class NewerFormatError(FormatError):
    """Written by a newer everstep than this one."""


class DamageError(StorageError):
    """A digest does not match: the bytes on disk are not the bytes that were written.

    Attributes:
        entry: name of the damaged entry, or None when the damage is outside any entry.
    """

    def __init__(self, message: str, *, entry: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.entry = entry


class UnreachableError(StorageError):
    """A store does not answer, or answers that it cannot now; the next try may succeed."""


class ForeignDirectoryError(StorageError):
    """A directory that holds something else than a run."""


class RecoveryError(EverstepError):
    """Nothing, or not what was asked for, can be recovered."""


class ReplayError(EverstepError):
    """Logged updates cannot be applied to this state, or not in this order."""


class FencedError(EverstepError):
    """A newer timeline has taken this run over; this process may not commit or delete (I11)."""


class DeadlineError(EverstepError):
    """Something took longer than its stated time.

    Not a ``TimeoutError``: that is an ``OSError``, and would be taken for the file system's
    answer by everything that handles those.
    """


class KeeperError(EverstepError):
    """Trouble with the keeper process: it is lost, it refused, or it is of another version."""


class KeeperTimeoutError(KeeperError, DeadlineError):
    """The keeper process did not answer, or did not come up, within the stated time."""


class InfeasibleError(EverstepError):
    """No choice helps with these costs; says which one would have to be what.

    Attributes:
        quantity: the cost that stands in the way.
        needed: the bound on whose other side it would have to be, in the quantity's unit.
    """

    def __init__(self, message: str, *, quantity: str, needed: float, **where: Any) -> None:
        super().__init__(message, **where)
        self.quantity = quantity
        self.needed = needed

    def fields(self) -> dict[str, Any]:
        """The error as plain data, for ``--json`` outputs."""
        return {**super().fields(), "quantity": self.quantity, "needed": self.needed}


class UnavailableError(EverstepError):
    """This machine, build or installation lacks what was asked for."""
