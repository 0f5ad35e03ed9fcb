"""A keeper's server within this process, turned by hand, and trainers that say to it what a
test wants said, in the order in which the test wants it said."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.arena import Arena
from everstep.checkpointer import Checkpointer
from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, KeeperError, KeeperTimeoutError
from everstep.format.digests import digest
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.keeper.held.newest_capture import base_from_wire
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.process.connections import Registered
from everstep.keeper.process.server import Server
from everstep.keeper.replica.served_replica import ServedReplica
from everstep.link.capture import shard_offsets
from everstep.link.messages import PROTOCOL, identity_to_wire, layout_to_wire
from everstep.link.registry import keeper_files, keeper_key
from everstep.link.wire import Connection
from everstep.restore.fetch.held import HeldBase
from everstep.run.folder import open_run_folder, open_timeline
from everstep.run.scan import scan_run
from everstep.seams import Clock, FileSystem, PosixFileSystem, Seams, SystemClock
from everstep.seams.sockets import UnixStream, close_descriptors, connect_stream, listen_at
from everstep.state.layout.entries import Entry
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.world import TIMEOUT_S, Gate

__all__ = [
    "OBJECT",
    "Bench",
    "Hand",
    "Place",
    "bench",
    "connected_pair",
    "contents_of",
    "die",
    "hold_log",
    "oracle",
    "serving",
]

OBJECT = "everstep/objects/o"
_POLL_S = 0.01

Message = dict[str, Any]


def entries(scale: int = 1) -> tuple[Entry, ...]:
    """Of several widths, one without bytes; together no whole number of pages."""
    return (
        Entry.whole("a", "F64", (1000 * scale,)),
        Entry.whole("b", "F32", (513, scale)),
        Entry.whole("none", "F32", (0, 3)),
        Entry.whole("c", "U8", (7,)),
    )


def tensors_of(plan: BasePlan) -> bytes:
    """What the block of a base holds: a function of its timeline and step alone."""
    identity = plan.identity
    _, size_bytes = shard_offsets(plan)
    return random.Random(f"{identity.timeline} {identity.step}").randbytes(size_bytes)


def object_of(identity: ShardIdentity) -> bytes:
    return f"object of {identity.timeline}/{identity.step}".encode() * (1 + identity.step)


@dataclass(frozen=True)
class Place:
    """A registration that nothing happens to."""

    is_current: bool = True
    again: Callable[[], Any] = lambda: None
    release: Callable[[], None] = lambda: None
    refresh_times: Callable[[], None] = lambda: None


class Bench:
    """The server, and the run that it serves.

    Args:
        filesystem: of the server.
        rank: whose keeper it is.
        options: of the server.
    """

    def __init__(
        self,
        run: Path,
        *,
        filesystem: FileSystem | None = None,
        clock: Clock | None = None,
        linger_s: float = 600.0,
        rank: int = 0,
        registration: Registered = Place(),
        **options: Any,
    ) -> None:
        self.run = run
        self.run_id = open_run_folder(PosixFileSystem(), run).run or ""
        self.files = keeper_files(keeper_key(str(run), self.run_id, rank))
        self.listener = listen_at(self.files.socket)
        seams = Seams(filesystem=filesystem or PosixFileSystem(), clock=clock or SystemClock())
        self.server = Server(
            self.listener,
            run,
            registration,
            version="test",
            linger_s=linger_s,
            seams=seams,
            **options,
        )
        self.connections: list[Connection] = []

    @property
    def replicas(self) -> ServedReplica:
        """The replica of the attached process, if any."""
        return self.server.duties.replicas

    @property
    def log(self) -> LogStore:
        """The log of the attached process."""
        log = self.server.duties.logs.current
        assert log is not None
        return log

    def turn(self, times: int = 1) -> None:
        """Lets the server deal with what has come."""
        for _ in range(times):
            self.server.turn(0.0)

    def until(self, there: Callable[[], bool], what: str = "it") -> None:
        """Turns the server until ``there()``."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not there():
            assert time.monotonic() < deadline_s, f"{what} never came"
            self.server.turn(_POLL_S)

    def meanwhile(self, there: Callable[[], bool], connection: Connection) -> None:
        """Lets another thread turn the server until ``there()``: what it says may be more than
        a socket holds."""
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                self.server.turn(_POLL_S)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            deadline_s = time.monotonic() + TIMEOUT_S
            while not there():
                assert time.monotonic() < deadline_s, "it never came"
                select.select([connection], [], [], _POLL_S)
        finally:
            over.set()
            thread.join(TIMEOUT_S)

    def settled(self) -> None:
        """Everything that was begun is durable or has failed, and has been reported."""
        keeper = self.server.duties.writer
        self.turn(2)
        self.until(lambda: keeper is None or not keeper.waiting, "the end of all captures")
        self.turn(2)

    def guest(self) -> Connection:
        """A connection that has said nothing yet."""
        connection = Connection(connect_stream(self.files.socket), send_timeout_s=TIMEOUT_S)
        self.connections.append(connection)
        self.turn()
        return connection

    def trainer(self, pages: int = 64) -> Hand:
        """One that has attached."""
        return Hand(self, pages)

    def over(self) -> bool:
        return self.server.is_over()

    @property
    def served(self) -> int:
        """Number of the timeline that the server serves; 0 until its bases are written."""
        timeline = self.server.duties.timeline
        return 0 if timeline is None else timeline.number

    def held(self) -> int | None:
        """The step that the server has in memory."""
        return self.server.duties.newest_capture.step

    def committed(self) -> set[tuple[int, int]]:
        """Timeline and step of all bases on disk."""
        bases = scan_run(PosixFileSystem(), self.run).bases
        return {(b.id.timeline, b.id.step) for b in bases if b.status == "committed"}

    def close(self) -> None:
        if self.server.duties.writer is not None:
            for capture in self.server.duties.writer.waiting:
                capture.incoming.lose(KeeperError("the test is over"))
            self.settled()
            self.server.duties.writer.close()
        self.server.close()
        self.listener.close()  # the server may have another one by now
        for connection in self.connections:
            connection.close()
        Path(self.files.socket).unlink(missing_ok=True)


class Hand:
    """A training process, as far as the keeper can tell.

    Attributes:
        said: all that the keeper has said to it, descriptors left out.
    """

    def __init__(self, bench: Bench, pages: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.bench = bench
        self.connection = bench.guest()
        self.said: list[Message] = []
        self.plans: dict[int, BasePlan] = {}
        self.offsets: dict[int, tuple[int, int]] = {}
        self.timeline = 0
        self._fds: list[int] = []
        self._blobs: dict[int, bytearray] = {}
        self.say("attach", protocol=PROTOCOL, arena_bytes=pages * 4096, timeout_s=timeout_s)
        bench.turn()
        assert self.hear("welcome")
        self.arena = Arena.attach(self._fds[0])
        close_descriptors(self._fds)
        self._fds.clear()

    def say(self, kind: str, **fields: Any) -> None:
        self.connection.send({"kind": kind, **fields})

    def listen(self) -> list[Message]:
        """Everything that the keeper has said by now."""
        with contextlib.suppress(KeeperTimeoutError, KeeperError):
            while (received := self.connection.receive(0.0)) is not None:
                message, fds = received
                if message["kind"] == "blob":
                    self._blobs.setdefault(message["number"], bytearray()).extend(message["part"])
                    continue
                self.said.append(message)
                self._fds += fds
        return self.said

    def hear(self, kind: str) -> list[Message]:
        """Messages of one kind."""
        return [message for message in self.listen() if message["kind"] == kind]

    def await_(self, kind: str) -> Message:
        """The newest message of a kind; waits for the first."""
        self.bench.until(lambda: bool(self.hear(kind)), kind)
        return self.hear(kind)[-1]

    def serve(
        self,
        *,
        parent: tuple[int, int] | None = None,
        keep: int = 3,
        verified: tuple[int, int] | None = None,
    ) -> None:
        """Takes the run over with a new timeline.

        Args:
            verified: timeline and step of the base on disk that it goes on from.
        """
        inventory = scan_run(PosixFileSystem(), self.bench.run)
        base = None if parent is None else BaseId(*parent)
        self.timeline = open_timeline(Seams(), self.bench.run, inventory, parent=base, exact=True)
        self.say("serve", timeline=self.timeline, keep={"newest": keep}, verified=verified)

    def begin(
        self,
        number: int,
        step: int,
        *,
        offset: int = 0,
        word: int = 0,
        stream: bool = True,
        lsn: int | None = None,
        kinds: Mapping[str, str] | None = None,
        scale: int = 1,
    ) -> None:
        """Announces a capture."""
        identity = ShardIdentity(
            self.bench.run_id, self.timeline, step, step if lsn is None else lsn, 0, 1, True
        )
        shards = plan_files(identity, entries(scale), {}, {OBJECT: 100})
        plan = self.plans[number] = BasePlan(identity, shards, kinds or {})
        self.offsets[number] = offset, word
        self.arena.set_progress(word, 0)
        self.say("layout", number=number, layout=layout_to_wire(plan))
        self.say(
            "begin",
            number=number,
            layout=number,
            identity=identity_to_wire(identity),
            offset=offset,
            word=word,
            stream=stream,
        )

    def fill(self, number: int, upto: int | None = None) -> None:
        """Copies the first bytes of a capture (all of them) into the arena, and says so there."""
        offset, word = self.offsets[number]
        whole = tensors_of(self.plans[number])
        part = whole[:upto]
        self.arena.view[offset : offset + len(part)] = part
        self.arena.set_progress(word, len(part))

    def captured(self, number: int, *, data: bytes | None = None) -> None:
        """Says that all of a capture is there."""
        data = object_of(self.plans[number].identity) if data is None else data
        for at in range(0, max(1, len(data)), 16 << 20):
            self.say("object", number=number, name=OBJECT, part=data[at : at + (16 << 20)])
        self.say("captured", number=number)

    def take(self, number: int, step: int, **options: Any) -> None:
        """A capture from its beginning to its end."""
        self.begin(number, step, **options)
        self.fill(number)
        self.captured(number)

    def die(self) -> None:
        """Ends without a word."""
        self.connection.close()
        self.bench.turn(20)  # what it said before is read first

    def recall(self) -> HeldBase | None:
        """What the keeper has in memory, settled before."""
        self.say("settle")
        self.await_("settled")
        before = len(self.hear("recalled"))
        self._blobs = {}
        self.say("recall")
        self.bench.meanwhile(lambda: len(self.hear("recalled")) > before, self.connection)
        reply = self.hear("recalled")[-1]
        if not self._fds:
            return None
        try:
            return base_from_wire(reply["base"], self._blobs, Arena.attach(self._fds[0]))
        finally:
            close_descriptors(self._fds)
            self._fds.clear()


def contents_of(held: HeldBase) -> dict[str, bytes]:
    """The bytes of all entries, each compared with its digest.

    Raises:
        DamageError: one does not match.
    """
    opened = held.open()
    found = {}
    try:
        for file, _, header, path in opened.shards:
            for place, expected in zip(header.placed, header.digests, strict=True):
                data = bytearray(place.end - place.begin)
                assert file.read_into(memoryview(data), header.room_bytes + place.begin) == len(
                    data
                )
                if digest(memoryview(data)) != expected:
                    raise DamageError(f"{place.entry.name} is damaged", path=path)
                found[place.entry.name] = bytes(data)
    finally:
        opened.close()
    return found


def oracle(plan: BasePlan) -> dict[str, bytes]:
    """What :func:`contents_of` must find."""
    whole = tensors_of(plan)
    offsets, _ = shard_offsets(plan)
    found = {
        place.entry.name: whole[offset + place.begin : offset + place.end]
        for shard, offset in zip(plan.shards, offsets, strict=True)
        for place in shard.layout.placed
    }
    return found | {OBJECT: object_of(plan.identity)}


@contextlib.contextmanager
def bench(run: Path, **options: Any) -> Iterator[Bench]:
    """A bench, cleared at the end."""
    made = Bench(run, **options)
    try:
        yield made
    finally:
        made.close()


# --- Real trainers ----------------------------------------------------------------------


@contextlib.contextmanager
def serving(run: Path, **options: Any) -> Iterator[Bench]:
    """A keeper of ``run`` that serves, in a thread: Checkpointers find it and start none."""
    made = Bench(run, **options)

    def work() -> None:
        made.server.run()
        made.listener.close()
        Path(made.files.socket).unlink()

    thread = threading.Thread(target=work, name="keeper under test")
    thread.start()
    try:
        yield made
    finally:
        made.server.end()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the keeper does not end"
        made.close()


def die(ckpt: Checkpointer) -> None:
    """Ends a Checkpointer as its process's death would, as far as its keeper can tell."""
    remote = inspect(ckpt).keepers.pool.keeper
    assert isinstance(remote, RemoteKeeper)
    remote.disconnect(TIMEOUT_S)
    inspect(ckpt).release()


def hold_log(log: LogStore, gate: Gate) -> None:
    """The thread that writes the log waits at the gate."""
    log._thread.submit(gate.wait_at)


def connected_pair(**options: Any) -> tuple[Connection, Connection]:
    """Two connected sides within this process.

    Args:
        options: arguments of :class:`Connection`, for both sides.
    """
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Connection(UnixStream(one), **options), Connection(UnixStream(other), **options)
