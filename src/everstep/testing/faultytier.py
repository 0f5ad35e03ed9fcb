"""A tier with the faults of object stores.

:class:`FaultyTier` wraps another tier and injects a :class:`TierFault` at numbered operations. It
is deterministic: the same calls and faults give the same result. :meth:`FaultyTier.seeded` draws
faults from a seed. Wrapped in a :class:`~everstep.tiers.retry.RetryingTier` it must still keep the
contract (:mod:`everstep.testing.conformance`), with the faults in ``SURVIVED``.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from everstep.errors import PermissionDeniedError, UnreachableError
from everstep.seams import ReadFile
from everstep.tiers import MemoryFile, Tier
from everstep.tiers.contract import Item, Traits, read_whole

FaultKind = Literal[
    "unavailable",
    "timeout",
    "lost_answer",
    "duplicate",
    "late_duplicate",
    "truncated",
    "expired",
    "stale_list",
]
"""Kinds of faults:

``unavailable``     status 500: the operation is not done
``timeout``         no answer, the operation is not done
``lost_answer``     the operation is done, but the answer is lost
``duplicate``       the request arrives twice
``late_duplicate``  the request arrives twice, the second time before the next operation
``truncated``       a read ends early
``expired``         the credentials have expired, until they are refreshed
``stale_list``      the listing that was returned before, or an empty one
"""

SURVIVED: tuple[FaultKind, ...] = (
    "unavailable",
    "timeout",
    "lost_answer",
    "duplicate",
    "late_duplicate",
    "truncated",
    "expired",
)
"""Faults that retries hide. A stale listing cannot be distinguished from a correct one: readers of
listings must tolerate it."""

_ON = {
    "lost_answer": ("put", "create", "delete"),
    "duplicate": ("put", "create", "delete"),
    "late_duplicate": ("put", "create"),
    "truncated": ("read",),
    "stale_list": ("scan",),
}
_LASTING = 16  # operations in which credentials expire twice at most


@dataclass(frozen=True, slots=True)
class TierFault:
    """One fault.

    Attributes:
        kind: see :data:`FaultKind`.
        at: the first operation (from 1) that it may act on.
        count: number of operations that it acts on.
        name: prefix of the names that it acts on.
    """

    kind: FaultKind
    at: int = 1
    count: int = 1
    name: str = ""


class FaultyTier:
    """A wrapper of a tier that injects faults.

    Args:
        inner: the tier to wrap.
        faults: the faults to inject.
        later: if a fault cannot act on operation ``at``, it acts on the next possible one.

    Attributes:
        log: one line for each operation, with the fault that acted on it.
    """

    def __init__(
        self, inner: Tier, faults: Sequence[TierFault] = (), *, later: bool = True
    ) -> None:
        self._inner = inner
        self._faults = list(faults)
        self._later = later
        self._lock = threading.RLock()
        self._expired = False
        self._late: list[tuple[str, str, bytes]] = []
        self._listed: dict[str, list[Item]] = {}
        self.log: list[str] = []

    @classmethod
    def seeded(
        cls,
        inner: Tier,
        seed: int,
        *,
        kinds: Sequence[FaultKind] = SURVIVED,
        share: float = 0.3,
        operations: int = 2000,
    ) -> FaultyTier:
        """Draw faults on about ``share`` of the first operations, at most two in a row.

        After credentials have expired twice, they stay valid for a while: otherwise each of
        several threads would find expired credentials that another one has just refreshed.
        """
        drawn = random.Random(seed)
        faults = []
        row = 0
        expired = [-_LASTING] * 2
        for number in range(1, operations + 1):
            row = row + 1 if row < 2 and drawn.random() < share else 0
            if not row:
                continue
            kind = drawn.choice(list(kinds))
            if kind == "expired":
                if number - expired[0] < _LASTING:
                    continue
                expired = [expired[1], number]
            faults.append(TierFault(kind, at=number))
        return cls(inner, faults, later=False)

    @property
    def traits(self) -> Traits:
        stale = any(fault.kind == "stale_list" for fault in self._faults)
        inner = self._inner.traits
        return replace(inner, consistent=False) if stale else inner

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, name: str, source: ReadFile) -> None:
        with self._operation("put", name) as kind:
            if kind is None:
                self._inner.put(name, source)
                return
            data = read_whole(source, name)  # read once: a duplicate writes it twice
            self._write("put", kind, name, data)

    def create(self, name: str, data: bytes) -> bool:
        with self._operation("create", name) as kind:
            return self._write("create", kind, name, bytes(data))

    def open(self, name: str) -> ReadFile:
        with self._operation("open", name):
            return _FaultyFile(self, name, self._inner.open(name))

    def scan(self, prefix: str = "") -> list[Item]:
        with self._operation("scan", prefix) as kind:
            if kind != "stale_list":
                self._listed[prefix] = self._inner.scan(prefix)
            return self._listed.get(prefix, [])

    def delete(self, name: str) -> None:
        with self._operation("delete", name) as kind:
            self._inner.delete(name)
            if kind == "duplicate":
                self._inner.delete(name)
            if kind == "lost_answer":
                raise self._unreachable("no answer in time", name)

    def sweep(self, prefix: str) -> None:
        """Do nothing: it concerns no object and never fails."""
        self._inner.sweep(prefix)

    def check(self) -> None:
        with self._operation("check", ""):
            self._inner.check()

    def refresh(self) -> None:
        """Renew the credentials."""
        self._expired = False
        self._inner.refresh()

    def close(self) -> None:
        self._inner.close()

    def read(self, name: str, file: ReadFile, buffer: memoryview, offset: int) -> int:
        """Read from an open file; a truncated read returns half of the bytes."""
        with self._operation("read", name) as kind:
            got = file.read_into(buffer, offset)
            if kind == "truncated":
                buffer[got // 2 : got] = bytes(got - got // 2)
                return got // 2
            return got

    def _write(self, op: str, kind: FaultKind | None, name: str, data: bytes) -> bool:
        done = self._apply(op, name, data)
        if kind == "duplicate":
            self._apply(op, name, data)
        if kind == "late_duplicate":
            self._late.append((op, name, data))
        if kind == "lost_answer":
            raise self._unreachable("no answer in time", name)
        return done

    def _apply(self, op: str, name: str, data: bytes) -> bool:
        if op == "create":
            return self._inner.create(name, data)
        self._inner.put(name, MemoryFile([memoryview(data)]))
        return True

    @contextlib.contextmanager
    def _operation(self, op: str, name: str) -> Iterator[FaultKind | None]:
        """Run one operation at a time; raise, or return the fault that acts on it."""
        with self._lock:
            yield self.begin(op, name)

    def begin(self, op: str, name: str) -> FaultKind | None:
        """Return the fault that acts on the next operation; raise if it prevents the operation."""
        late = self._late
        self._late = []
        for what, where, data in late:
            self._apply(what, where, data)
        fault = self._next(op, name)
        self.log.append(f"{len(self.log) + 1} {op} {name} {fault.kind if fault else ''}".rstrip())
        if fault is not None and fault.kind == "expired":
            self._expired = True
        if self._expired:
            raise PermissionDeniedError(
                f"could not {op} {name}: the credentials have expired (ExpiredToken)",
                tier=self.traits.kind,
                path=f"{self.url}/{name}",
                hint="check that they are still valid",
            )
        if fault is None:
            return None
        if fault.kind == "unavailable":
            raise self._unreachable("status 500 InternalError", name)
        if fault.kind == "timeout":
            raise self._unreachable("no answer in time", name)
        return fault.kind

    def _next(self, op: str, name: str) -> TierFault | None:
        number = len(self.log) + 1
        for place, fault in enumerate(self._faults):
            if number < fault.at or (not self._later and number != fault.at):
                continue
            if op in _ON.get(fault.kind, (op,)) and name.startswith(fault.name):
                if fault.count > 1:
                    self._faults[place] = replace(fault, count=fault.count - 1)
                elif fault.kind == "stale_list":  # listings stay what they are: not consistent
                    self._faults[place] = replace(fault, at=1 << 60)
                else:
                    del self._faults[place]
                return fault
        return None

    def _unreachable(self, said: str, name: str) -> UnreachableError:
        return UnreachableError(
            f"could not reach {name or 'it'}: {said}",
            tier=self.traits.kind,
            path=f"{self.url}/{name}",
            hint="check the store",
        )


class _FaultyFile:
    def __init__(self, tier: FaultyTier, name: str, file: ReadFile) -> None:
        self._tier = tier
        self._name = name
        self._file = file

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return self._tier.read(self._name, self._file, buffer, offset)

    def close(self) -> None:
        self._file.close()
