"""The contract for places where bytes live, whatever they are made of.

A tier holds *objects*: bytes under a name. It is all that commit, mirroring and recovery ask
of memory, a disk or an object store, and little enough that a new place is quickly made:
:mod:`everstep.testing.conformance` tells whether it keeps the contract.

What every tier promises:

- :meth:`Tier.put` and :meth:`Tier.create` return when the object is there whole, and as durable
  as the tier is. Before that, and after any error, the name has what it had before: never a part,
  never a mixture.
- :meth:`Tier.create` does nothing where there is other content already: of many at once, in
  whichever process, exactly one wins.
- Repeating any operation is harmless. Names are written once by everstep: whatever is written to
  a name again (after an answer that was lost; by an older process that wakes up) is the same.
- A reader sees the bytes of one object, from its first to its last, or an error. If the object is
  replaced meanwhile it goes on with the old one or raises.
- Errors are ``FileNotFoundError`` for a name that is not there, and else
  :class:`~everstep.errors.StorageError` with the tier's kind and the object's address;
  :class:`~everstep.errors.UnreachableError` where another try may succeed. No text of an error
  holds a credential, nor does it have a cause that does.

What a tier cannot promise it says in its :class:`Traits`.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal, Protocol

from everstep.errors import OptionError
from everstep.format.names import TEMPORARY_SUFFIX
from everstep.seams.files.filesystem import ReadFile

__all__ = ["NAME_BYTES_MAX", "PART_BYTES_MAX", "Item", "Loss", "Tier", "Traits", "check_name"]

NAME_BYTES_MAX = 512
"""Of a whole name, in UTF-8: S3 has 1024, some of which belong to the prefix of the run."""
PART_BYTES_MAX = 200
"""Of each part between slashes: file systems have 255, some of which a temporary name takes."""

Loss = Literal["process", "node", "rack"]
"""What may be lost, as in TierCheck section 2.2."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a tier is and can do.

    Attributes:
        kind: ``"memory"``, ``"peer"``, ``"disk"`` or ``"object"``; in errors it is the tier.
        survives: what its contents outlive.
        cost: recovery asks the cheapest first (TierCheck section 3.3): 0 for memory of this node.
        bounded: every call ends within a stated time. Otherwise a call may hang as long as
            the storage does, and whoever calls watches its progress.
        consistent: what is listed is what is there. Otherwise a listing may be some time old,
            and whoever needs to know opens the name.
    """

    kind: str
    survives: frozenset[Loss]
    cost: int
    bounded: bool = True
    consistent: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """One name in a listing.

    Attributes:
        name: from the root of the tier.
        size_bytes: None for what other names begin with (a folder).
        modified_s: by the clock of whoever keeps it; for people only.
    """

    name: str
    size_bytes: int | None
    modified_s: float = 0.0


class Tier(Protocol):
    """A place where bytes live. Every method may be called from any thread."""

    @property
    def traits(self) -> Traits: ...

    @property
    def url(self) -> str:
        """Where it is, for people; without credentials."""
        ...

    def put(self, name: str, source: ReadFile) -> None:
        """Writes an object, replacing what has the name.

        Args:
            source: is read in order, from its first byte to its last; from the first again
                where something has to be repeated. Its own errors pass through.

        Raises:
            OptionError: ``name`` is none.
            DamageError: the source has fewer bytes than it said.
            OutOfSpaceError, PermissionDeniedError, UnreachableError, DeadlineError, StorageError
        """
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Writes a small object where there is none.

        Returns:
            True when the object is there now with just these bytes, whoever has written it: an
            answer may have been lost. So bytes that decide who was first must be the writer's
            own. False, having changed nothing, when there are others.
        """
        ...

    def open(self, name: str) -> ReadFile:
        """Opens an object for reading, any range of it, as it is now.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def scan(self, prefix: str = "") -> list[Item]:
        """What lies directly under ``prefix`` (a name without a slash at its end), sorted.

        Nothing is there: an empty list. What once had objects under it may be listed still.
        """
        ...

    def walk(self, prefix: str = "") -> list[Item]:
        """All objects under ``prefix``, however deep, sorted by name."""
        ...

    def delete(self, name: str) -> None:
        """Removes an object, if it is there."""
        ...

    def sweep(self, prefix: str) -> None:
        """Removes what writers that have died left directly under ``prefix`` of objects that were
        never whole, which no listing shows. Where somebody still writes, that may fail."""
        ...

    def check(self) -> None:
        """Returns if the tier can be read now.

        Raises:
            UnreachableError, PermissionDeniedError, DeadlineError, StorageError: why not.
        """
        ...

    def refresh(self) -> None:
        """Forgets credentials and connections: new ones are made from where they come from."""
        ...

    def close(self) -> None:
        """Lets go of connections and memory."""
        ...


def check_name(name: str) -> None:
    """Refuses what is no name of an object on every kind of tier.

    A name has parts between single slashes. It is the same on all tiers, so nothing that one of
    them would read in another way is allowed.

    Raises:
        OptionError
    """
    problem = _problem(name)
    if problem:
        raise OptionError(f"{name!r} is no name of an object: {problem}")


def _problem(name: str) -> str:
    if not isinstance(name, str) or not name:
        return "it must be a text"
    try:
        size_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "it is not Unicode"
    if size_bytes > NAME_BYTES_MAX:
        return f"more than {NAME_BYTES_MAX} bytes"
    if any(unicodedata.category(char).startswith("C") for char in name) or "\\" in name:
        return "it holds a character that is not printed, or a backslash"
    if unicodedata.normalize("NFC", name) != name:
        return "not in Unicode's normal form C: some file systems would change it"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"a part of it is {part!r}"
        if len(part.encode("utf-8")) > PART_BYTES_MAX:
            return f"a part of more than {PART_BYTES_MAX} bytes"
        if part.endswith(TEMPORARY_SUFFIX):
            return f"{TEMPORARY_SUFFIX!r} ends names of files that are not whole"
    return ""
