"""Messages between trainer and keeper: plain dicts with a ``kind``, and their encoding.

Trainer to keeper:

``attach``       attach, with the size of the arena
``listen``       open a mailbox for the keepers of other ranks
``serve``        start a timeline
``layout``       layout of the files of captures to come
``begin``        a capture has begun
``object``       chunk of an encoded object
``captured``     a capture is complete
``persist``      make a capture durable that was to stay in memory only
``redo``         update that concerns a multi-step capture
``assemble``     all data of a multi-step capture was sent
``annotate``     metrics and a note for a base
``abandon``      the rest of a capture will not be sent
``ask``          request a base from the replica
``no_replica``   end the replica
``forget``       a capture held in memory is about to be overwritten
``log_layout``   number of a record layout, and numbers that are no longer used
``log``          a log record is complete
``forget_log``   the memory of records is about to be reused
``log_to_disk``  switch writing the log to disk on or off
``settle``       finish the captures of an earlier trainer
``recall``       request the contents of memory
``bye``          detach

From a process that is not attached: ``status``, ``stop``, ``look`` (request the contents of memory,
which stay there; the reply is ``looked``).

Keeper to trainer:

``welcome``          reply to ``attach``, with the descriptor of the arena
``refused``          reply to ``attach``: not possible
``listening``        reply to ``listen``, with the port
``durable``          a base is committed
``failed``           a base has failed
``error``            other failure
``notice``           condition that is no failure
``done``             a capture and its retention have ended
``rebuilt``          the rebuild of a multi-step capture has ended
``progress``         counters
``settled``          reply to ``settle``
``logged``           records are on disk
``peered``           a base or step is complete in the memory of other nodes
``copied``           a base or step is complete in a place for copies
``persisted``        a base of the replica is committed
``retained``         the retention after it has ended
``asks_refused``     reply to ``ask``: not possible
``replica_stopped``  the replica has ended
``blob``             chunk of the data that ``recalled`` refers to
``recalled``         reply to ``recall``
``replaced``         another trainer has attached

One rank's place in one start (session) of a job of several ranks.

Counters of a keeper, as it reports them to the trainer.

Records of the gradient log on their way to the keeper: numbers of layouts, memory of records.

A layout is sent once; later records refer to it by number. Both sides forget the layouts that were
unused for longest (:class:`~everstep.state.layout.shards.LRUCache`), and reuse their numbers. That
is safe, as messages of a connection arrive in order, and a record that the keeper holds refers to
its layout itself. No torch is needed here.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from everstep.arena import PAGE_BYTES
from everstep.commit import BaseId
from everstep.commit.peer_copies import peer_of
from everstep.errors import KeeperError
from everstep.format import BasePlan, ShardIdentity
from everstep.format.log import layout_from_index, layout_to_index
from everstep.link.capture import Capture
from everstep.state.layout import Entry, Placed, ShardLayout
from everstep.state.layout.shards import LRUCache

PROTOCOL = 14
"""Version of the messages. Trainer and keeper, which may come from different installations, must
have the same."""

OBJECT_PART_BYTES = 16 << 20
"""Size limit of a chunk: larger objects are sent in several messages."""


def parts_of(data: bytes) -> Iterator[bytes]:
    """Split ``data`` into chunks that fit into messages; yield at least one, which may be empty."""
    for begin in range(0, max(1, len(data)), OBJECT_PART_BYTES):
        yield data[begin : begin + OBJECT_PART_BYTES]


def to_plain(value: Any) -> Any:
    """Encode an object of typed fields for a message; :func:`from_plain` decodes it."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_plain)


def from_plain(fields: Any, kind: Any) -> Any:
    """Decode an object of this type from a message.

    Raises:
        KeeperError: the fields are of another type; names the field.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise KeeperError(f"invalid fields in a message: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    # A subclass of str or int would silently become something else.
    if isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def identity_to_wire(identity: ShardIdentity) -> dict[str, Any]:
    """Encode the identity of a base."""
    found: dict[str, Any] = to_plain(identity)
    return found


def identity_from_wire(fields: Mapping[str, Any]) -> ShardIdentity:
    """Decode the identity of a base."""
    found: ShardIdentity = from_plain(fields, ShardIdentity)
    return found


def begin_to_wire(capture: Capture) -> dict[str, Any]:
    """Encode the start of a capture, whose layout was sent before."""
    return {
        "kind": "begin",
        "number": capture.number,
        "layout": capture.layout,
        "identity": identity_to_wire(capture.plan.identity),
        "offset": capture.offset,
        "word": capture.word,
        "stream": capture.stream,
        "parked": capture.parked,
        "in_memory": capture.save.in_memory,
    }


_fields_of = attrgetter(*(field.name for field in fields(Entry)))

_Shape: TypeAlias = tuple[int, ...]
_Row: TypeAlias = tuple[
    str, str, _Shape, _Shape, _Shape, str, _Shape | None, str | None, int, int, int
]
"""Fields of an entry, and its range of bytes."""


def layout_to_wire(plan: BasePlan) -> dict[str, Any]:
    """Encode the fields of a plan that are the same for all bases of a layout."""
    return {
        "shards": to_plain([replace(shard, layout=ShardLayout(())) for shard in plan.shards]),
        # Rows, as the names of the fields would double the size of the largest message.
        "rows": [
            [[*_fields_of(place.entry), place.begin, place.end] for place in shard.layout.placed]
            for shard in plan.shards
        ],
        "kinds": dict(plan.kinds),
    }


def plan_from_wire(layout: Mapping[str, Any], identity: Mapping[str, Any]) -> BasePlan:
    """Return the plan of one base of a layout.

    Raises:
        KeeperError: the fields are of other types, or there are rows of another number of files.
    """
    plan: BasePlan = from_plain({**layout, "identity": identity}, BasePlan)
    rows: list[list[_Row]] = from_plain(layout.get("rows"), list[list[_Row]])
    if len(rows) != len(plan.shards):
        raise KeeperError(f"invalid fields in a message: {len(rows)} rows of {len(plan.shards)}")
    shards = (
        replace(shard, layout=ShardLayout(tuple(Placed(Entry(*r[:-2]), *r[-2:]) for r in found)))
        for shard, found in zip(plan.shards, rows, strict=True)
    )
    return replace(plan, shards=tuple(shards))


@dataclass(frozen=True, slots=True)
class JobSession:
    """One rank's place in one start of a job.

    Attributes:
        session: unique name of the start.
        rank: this rank.
        disks: by rank, name of the disk that it writes to.
        peers: by rank, address of its keeper's mailbox.
        recovered: base that the timeline started from, if durable on all ranks.
        spare: the same base, if it is not durable on all ranks.
        unreadable: bases with a manifest that the ranks cannot read completely.
        again: True if this keeper replaces one that was lost during this start.
        lost: steps of the bases that were lost with that keeper.
        nodes: by rank, name of its node; empty if no rank sends copies to peers.
        unread: True if the base was not completely read from disks, so that its copies there are
            unverified.
    """

    session: str
    rank: int
    disks: tuple[str, ...]
    peers: tuple[tuple[str, int], ...]
    recovered: BaseId | None = None
    spare: BaseId | None = None
    unreadable: tuple[BaseId, ...] = ()
    again: bool = False
    lost: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    unread: bool = False

    @property
    def peer(self) -> int | None:
        """Rank whose keeper holds copies of this rank's bases; None without one."""
        return peer_of(self.nodes, self.rank) if self.nodes else None

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose copies this rank's keeper holds."""
        return tuple(r for r in range(len(self.nodes)) if peer_of(self.nodes, r) == self.rank)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields for a message."""
        found: dict[str, Any] = to_plain(self)
        return found

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> JobSession:
        """Decode the fields of :meth:`to_wire`."""
        found: JobSession = from_plain(fields, cls)
        return found


def mailbox_error(host: str, port: int, error: OSError) -> KeeperError:
    """Return the error for a mailbox that cannot be opened."""
    return KeeperError(
        f"the mailbox for the other ranks cannot be opened at {host}, port {port}: "
        f"{error.strerror or error}",
        hint="MASTER_ADDR must be an address that this machine can reach",
    )


@dataclass(slots=True)
class KeeperStats:
    """Counters of a keeper since its start.

    Attributes:
        committed: number of bases committed.
        failed: number of bases that failed.
        written_bytes: bytes of bases written.
        linked_bytes: bytes of static entries in files that were linked instead of written.
        persist_s: seconds from the start of writing to the commit, summed over bases.
        log_bytes: bytes of log segments written.
        log_batch_steps: steps of the next segment.
        cpu_s: processor time of the keeper process in seconds; 0 for a keeper thread.
        copied: number of copies of bases in other tiers.
        copied_bytes: bytes of these copies.
        copied_steps: steps of the log copied to other tiers.
        copied_log_bytes: bytes of these steps.
        copy_missed: steps of the log that will not be copied.
        peered: number of bases sent to the memory of another node.
        peered_bytes: bytes of these bases.
        peers_passed_over: number of bases not sent, as newer ones came too fast.
        held: number of bases that live in memory and were complete there.
        peer_missed: steps of the log that will not be sent.
        durable_step: step of the newest durable base; None without one.
    """

    committed: int = 0
    failed: int = 0
    written_bytes: int = 0
    linked_bytes: int = 0
    persist_s: float = 0.0
    log_bytes: int = 0
    log_batch_steps: int = 0
    cpu_s: float = 0.0
    copied: int = 0
    copied_bytes: int = 0
    copied_steps: int = 0
    copied_log_bytes: int = 0
    copy_missed: int = 0
    peered: int = 0
    peered_bytes: int = 0
    peers_passed_over: int = 0
    held: int = 0
    peer_missed: int = 0
    durable_step: int | None = None


# Values of the newer keeper instead of counters: they are not summed.
_NEWEST = ("durable_step", "log_batch_steps")
_COUNTS = [one.name for one in dataclasses.fields(KeeperStats) if one.name not in _NEWEST]


def add_stats(one: KeeperStats, other: KeeperStats) -> KeeperStats:
    """Return the sum of the counters of two keepers; ``other`` is the newer one."""
    both = KeeperStats(**{name: getattr(one, name) + getattr(other, name) for name in _COUNTS})
    both.durable_step = one.durable_step if other.durable_step is None else other.durable_step
    both.log_batch_steps = other.log_batch_steps or one.log_batch_steps
    return both


ENDED = 1 << 62
"""Sent instead of the number of the last record on disk: a segment failed, none will follow."""


class LogLayouts:
    """Layouts that one keeper has received.

    Args:
        send: sends a message to the keeper.
        numbers: layouts with a number; None for none.

    Attributes:
        lock: to be held from the call of :meth:`number` until the message with that number was
            sent:
            otherwise another thread could give the number to another layout first.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        numbers: LRUCache[int, tuple[ShardLayout, int]] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self._send = send
        self._numbers = LRUCache() if numbers is None else numbers
        self._free: list[int] = []

    def number(self, layout: ShardLayout) -> int:
        """Return the number of a layout, after sending the layout if the keeper does not have
        it."""
        # id() is a safe key only because the cached value refers to the layout: while the entry
        # exists, no other object can get the same id.
        known = self._numbers.get(id(layout))
        if known is not None:
            return known[1]
        self._free += [other for _, other in self._numbers.evict_for(len(layout.placed))]
        number = self._free[-1] if self._free else len(self._numbers)
        self._send(
            {
                "kind": "log_layout",
                "number": number,
                "layout": layout_to_index(layout),
                "gone": self._free[:-1],
            }
        )
        # After the send: if that fails, the keeper does not have the layout; the number stays free.
        del self._free[-1:]
        self._numbers.add(id(layout), (layout, number), len(layout.placed))
        return number


def receive_layout(known: dict[int, ShardLayout], message: dict[str, Any]) -> None:
    """Store a layout that the trainer has sent (keeper side).

    Raises:
        FormatError: the message holds an invalid layout.
    """
    # Before the new layout is stored: it may reuse one of these numbers.
    for number in message.get("gone", ()):
        known.pop(number, None)
    known[message["number"]] = layout_from_index(message["layout"])


RECORD_BYTES = 2048
"""Python objects of one record, in bytes: measured (CPython 3.11) about 1250 in the keeper and 400
in the training process."""


def record_memory_bytes(tensors_bytes: int, objects: Mapping[str, bytes]) -> int:
    """Return the memory of a record in bytes: whole pages of the arena, and Python objects."""
    pages = -(-max(1, tensors_bytes) // PAGE_BYTES)
    return pages * PAGE_BYTES + sum(map(len, objects.values())) + RECORD_BYTES
