"""The keeper's server, turned by hand: whatever a trainer says, in whatever order, and wherever
it dies, what comes back from memory is the state of the step that it claims, or nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import operator
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.commit.lineage import BaseId
from everstep.errors import AuditError, DamageError, KeeperError, OutOfSpaceError
from everstep.link.capture import Incoming
from everstep.link.messages import PROTOCOL, JobSession
from everstep.link.wire import Connection, error_from_wire, error_to_wire
from everstep.run.folder import open_timeline
from everstep.run.scan import scan_run
from everstep.seams import ManualClock, PosixFileSystem, Seams, failpoints
from everstep.seams.sockets import PeerProcess, close_descriptors, connect_stream
from tests.support.serving import OBJECT, Bench, Hand, Place, bench, contents_of, oracle
from tests.support.world import Gate, HookedFileSystem

PAGE = 4096
BASE = 3 * PAGE  # what a base takes in the arena


@pytest.fixture
def b(run_folder: Path) -> Iterator[Bench]:
    """A server on a good disk."""
    with bench(run_folder) as made:
        yield made


@pytest.fixture
def disk() -> HookedFileSystem:
    """The server's disk, where there is one to be broken."""
    return HookedFileSystem()


@pytest.fixture
def d(run_folder: Path, disk: HookedFileSystem) -> Iterator[Bench]:
    """A server on ``disk``."""
    with bench(run_folder, filesystem=disk) as made:
        yield made
        disk.hook = lambda op, path: None


def full(op: str, path: object) -> None:
    """A disk that is full."""
    if op == "create" and str(path).endswith(".safetensors.tmp"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def recalled(b: Bench, *, pages: int = 16) -> tuple[Hand, dict[str, bytes] | None, bool]:
    """What the next trainer gets: itself, the contents, and whether they are durable."""
    next_one = b.trainer(pages)
    held = next_one.recall()
    if held is None:
        return next_one, None, False
    return next_one, contents_of(held), held.durable


# --- What comes back from memory --------------------------------------------------------


def test_a_capture_is_durable_and_comes_back(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    assert one.await_("done")["number"] == 1
    one.die()
    assert recalled(b)[1:] == (oracle(one.plans[1]), True)
    assert b.committed() == {(1, 5)}


def test_what_the_disk_refused_comes_back_from_memory(d: Bench, disk: HookedFileSystem) -> None:
    one = d.trainer()
    one.serve()
    gate = Gate()
    disk.hook = lambda op, path: (gate.wait_at(), full(op, path))[0] if op == "create" else None
    one.take(1, 5)
    one.die()
    gate.open()
    assert recalled(d)[1:] == (oracle(one.plans[1]), False)
    assert d.committed() == set()


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_not_whole_is_gone(b: Bench, stream: bool) -> None:
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.begin(2, 6, offset=BASE, word=1, stream=stream)
    one.fill(2)  # all of it is there, but nobody has said so
    one.die()
    assert recalled(b)[1:] == (oracle(one.plans[1]), True)
    assert b.committed() == {(1, 5)}


def test_a_last_word_that_is_cut_off_is_not_heard(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.begin(1, 5)
    one.fill(1)
    one.say("object", number=1, name="everstep/objects/o", part=b"x")
    os.write(one.connection.fileno(), b"\x40\x00\x00\x00\x82")  # of "captured", say
    one.die()
    assert recalled(b)[1] is None
    assert b.committed() == set()


def test_the_newest_whole_capture_comes_back(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.begin(1, 5)
    one.begin(2, 6, offset=BASE, word=1)
    one.fill(2)
    one.fill(1)
    one.captured(1)
    one.captured(2)
    one.die()
    assert recalled(b)[1] == oracle(one.plans[2])
    assert b.committed() == {(1, 5), (1, 6)}


@pytest.mark.parametrize("last_words", ["forget", "begin", "both"])
def test_memory_that_is_going_to_be_written_over_holds_nothing(b: Bench, last_words: str) -> None:
    """The trainer dies right after it has said so: the words are still in the socket."""
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.await_("done")
    if last_words != "begin":
        one.say("forget", number=1)
    if last_words != "forget":
        one.begin(2, 6, word=1)
        one.fill(2, 100)
    one.die()
    assert recalled(b)[1] is None


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [
        (0, BASE, True),
        (BASE, 0, True),
        (0, BASE - PAGE, False),
        (BASE, PAGE, False),
        (0, 0, False),
    ],
)
def test_a_new_capture_beside_it_leaves_it_alone(
    b: Bench, first: int, second: int, stays: bool
) -> None:
    one = b.trainer()
    one.serve()
    one.take(1, 5, offset=first)
    one.await_("done")
    one.begin(2, 6, offset=second, word=1)
    b.turn(4)
    assert b.held() == (5 if stays else None)
    one.die()
    assert (recalled(b)[1] == oracle(one.plans[1])) is stays


def test_forgetting_another_one_forgets_nothing(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.await_("done")
    one.say("forget", number=2)
    one.say("forget", number=None)  # "what earlier trainers left"
    b.turn(4)
    assert b.held() == 5


def test_numbers_of_another_trainer_are_other_numbers(b: Bench) -> None:
    """Each trainer counts from 1."""
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.await_("done")
    one.die()
    two = b.trainer()
    two.say("forget", number=1)
    assert two.recall() is not None
    two.serve(parent=(1, 5))
    two.begin(1, 6)  # in an arena of its own: at the same place, and of no consequence
    b.turn(4)
    assert b.held() == 5
    two.die()
    assert recalled(b)[1] == oracle(one.plans[1])


def test_a_capture_that_failed_is_not_held_while_its_trainer_lives(
    d: Bench, disk: HookedFileSystem
) -> None:
    """Its memory is used again, by a trainer that may not even say so before it dies."""
    one = d.trainer()
    one.serve()
    one.begin(1, 5)
    one.fill(1)
    disk.hook = full
    one.captured(1)
    one.await_("done")
    assert [m["number"] for m in one.hear("failed")] == [1]
    assert d.held() is None
    one.die()
    assert recalled(d)[1] is None


def test_a_word_that_comes_too_late_holds_nothing(d: Bench, disk: HookedFileSystem) -> None:
    """It has failed while it was streamed; then the trainer says that it is whole."""
    disk.hook = full
    one = d.trainer()
    one.serve()
    one.begin(1, 5)
    one.await_("done")
    one.fill(1)
    one.captured(1)
    d.turn(4)
    assert d.held() is None
    one.die()
    assert recalled(d)[1] is None


def test_what_the_audit_refused_never_comes_back(b: Bench) -> None:
    """It fails after its trainer has died: its memory is as it was, but it is wrong."""
    one = b.trainer()
    one.serve()
    kinds = {"a": "static"}
    one.take(1, 5, kinds=kinds)
    one.await_("done")
    gate = Gate()
    assert b.server.duties.writer is not None
    b.server.duties.writer.queue(gate.wait_at)
    one.take(2, 6, offset=BASE, word=1, kinds=kinds)  # "a" is another one than at step 5
    one.die()
    gate.open()
    contents = recalled(b)[1]
    assert b.committed() == {(1, 5)}
    assert contents is None, "refused by the audit, and restored from memory all the same"


@pytest.mark.parametrize("at", [0, 8003, 10058, 10059])
def test_a_flipped_bit_in_memory_is_noticed(b: Bench, at: int) -> None:
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.await_("done")
    one.die()
    two = b.trainer()
    held = two.recall()
    assert held is not None
    one.arena.view[at] ^= 4
    if at < 10059:
        with pytest.raises(DamageError):
            contents_of(held)
    else:  # behind the last tensor there is nothing
        assert contents_of(held) == oracle(one.plans[1])


def test_what_the_audit_never_saw_is_audited_when_it_is_asked_for(
    d: Bench, disk: HookedFileSystem
) -> None:
    """The disk failed before there were digests to compare."""
    one = d.trainer()
    one.serve()
    kinds = {"a": "static"}
    one.take(1, 5, kinds=kinds)
    one.await_("done")
    gate = Gate()
    assert d.server.duties.writer is not None
    d.server.duties.writer.queue(gate.wait_at)
    disk.hook = full
    one.take(2, 6, offset=BASE, word=1, kinds=kinds)
    one.die()
    gate.open()
    assert recalled(d)[1] is None


def test_memory_is_no_reason_to_lose_the_only_copy(d: Bench, disk: HookedFileSystem) -> None:
    """The disk has failed: what is in memory is all there is, until the next one is there."""
    one = d.trainer()
    one.serve()
    gate = Gate()
    disk.hook = lambda op, path: (gate.wait_at(), full(op, path))[0] if op == "create" else None
    one.take(1, 5)
    one.die()
    gate.open()
    two, contents, _ = recalled(d)
    assert contents == oracle(one.plans[1])
    two.say("forget", number=None)
    two.serve(parent=(1, 5))
    two.begin(1, 6)
    d.turn(4)
    two.die()  # before it had anything of its own
    three, contents, durable = recalled(d)
    assert (contents, durable) == (oracle(one.plans[1]), False)
    disk.hook = lambda op, path: None
    three.say("forget", number=None)
    three.serve(parent=(1, 5))
    three.take(1, 7)
    three.await_("done")
    three.die()
    assert recalled(d)[1:] == (oracle(three.plans[1]), True)


def test_a_goodbye_does_not_take_the_only_copy_along(d: Bench, disk: HookedFileSystem) -> None:
    """A trainer of another model, say: it restores nothing, and closes its Checkpointer."""
    one = d.trainer()
    one.serve()
    gate = Gate()
    disk.hook = lambda op, path: (gate.wait_at(), full(op, path))[0] if op == "create" else None
    one.take(1, 5)
    one.die()
    gate.open()
    two, contents, _ = recalled(d)
    two.say("bye")
    two.die()
    assert not d.over()
    assert recalled(d)[1] == contents == oracle(one.plans[1])


def test_nobody_stays_for_a_base_that_was_passed_over(d: Bench, disk: HookedFileSystem) -> None:
    """Another rank of the job has lost its part of it, say: all go on from one before."""
    one = d.trainer()
    one.serve()
    one.take(1, 4)
    one.await_("done")
    gate = Gate()
    disk.hook = lambda op, path: (gate.wait_at(), full(op, path))[0] if op == "create" else None
    one.take(2, 5, offset=BASE)
    one.die()
    gate.open()
    two, contents, _ = recalled(d)
    assert contents == oracle(one.plans[2])
    two.say("forget", number=None)
    two.serve(parent=(1, 4), verified=(1, 4))
    two.say("bye")
    two.die()
    assert d.over()


@pytest.mark.parametrize("recovered", [BaseId(1, 5), BaseId(1, 4), None], ids=str)
def test_nobody_stays_for_a_base_that_a_start_has_completed_on_disk(
    d: Bench, disk: HookedFileSystem, recovered: BaseId | None
) -> None:
    """A start lets go of what waits for other ranks, and then finds that all parts are there and
    commits the base: what is in memory is not its only copy."""
    one = d.trainer()
    one.serve()
    gate = Gate()
    disk.hook = lambda op, path: (gate.wait_at(), full(op, path))[0] if op == "create" else None
    one.take(1, 5)
    one.die()
    gate.open()
    two, contents, _ = recalled(d)
    assert contents == oracle(one.plans[1])
    disk.hook = lambda op, path: None
    two.say("listen", host="127.0.0.1", port=0)
    port = two.await_("listening")["port"]
    peers = (("127.0.0.1", port), ("127.0.0.1", 1))
    job_session = JobSession("session", 0, ("a", "a"), peers, recovered=recovered).to_wire()
    inventory = scan_run(PosixFileSystem(), d.run)
    two.timeline = open_timeline(Seams(), d.run, inventory, parent=None, exact=True)
    two.say("serve", timeline=two.timeline, keep={"newest": 3}, verified=None, seat=job_session)
    two.say("bye")
    two.die()
    assert d.over() == (recovered == BaseId(1, 5))


def test_objects_may_be_larger_than_a_message(b: Bench) -> None:
    data = bytes(range(256)) * (70 << 12)  # 70 MiB
    one = b.trainer()
    one.serve()
    one.begin(1, 5)
    one.fill(1)
    thread = threading.Thread(target=lambda: one.captured(1, data=data))
    thread.start()
    b.until(lambda: not thread.is_alive(), "the last part")
    b.until(lambda: bool(one.hear("done")))
    one.die()
    assert recalled(b)[1:] == (oracle(one.plans[1]) | {OBJECT: data}, True)


# --- Trainers come and go ---------------------------------------------------------------


def test_the_newest_trainer_is_served(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.begin(1, 5)
    one.fill(1)
    one.captured(1)
    one.begin(2, 6, offset=BASE, word=1)
    two = b.trainer()
    assert [m["pid"] for m in one.hear("replaced")] == [os.getpid()]
    assert two.recall() is not None
    assert b.committed() == {(1, 5)}
    with contextlib.suppress(KeeperError):
        one.captured(2)  # nobody listens any more
    b.turn(4)
    assert b.held() == 5


def test_settled_is_said_when_earlier_captures_are_over(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    b.turn(2)
    gate = Gate()
    assert b.server.duties.writer is not None
    b.server.duties.writer.queue(gate.wait_at)
    one.take(1, 5)
    one.die()
    two = b.trainer()
    two.say("settle")
    b.turn(4)
    assert two.hear("settled") == []
    three = b.trainer()  # two is replaced while it waits
    assert two.hear("replaced")
    three.say("settle")
    b.turn(4)
    assert three.hear("settled") == []
    gate.open()
    three.await_("settled")
    assert b.committed() == {(1, 5)}
    assert two.hear("settled") == []


def test_nobody_is_served_before_earlier_captures_are_over(b: Bench) -> None:
    """Two that write to one run at once would write over each other's files."""
    one = b.trainer()
    one.serve()
    b.turn(2)
    gate = Gate()
    assert b.server.duties.writer is not None
    b.server.duties.writer.queue(gate.wait_at)
    one.take(1, 5)
    one.die()
    two = b.trainer()
    two.serve(parent=None)
    b.turn(4)
    assert b.server.trainer is None, "it was to settle first"
    gate.open()
    b.settled()


def test_goodbye_and_a_newcomer_at_once(b: Bench) -> None:
    """The next trainer attaches before the goodbye of the one before has been read."""
    one = b.trainer()
    one.serve()
    b.turn(2)
    waiting = b.guest()
    b.connections.append(waiting)
    waiting.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": PAGE, "timeout_s": 1.0})
    one.say("bye")
    one.connection.close()
    b.turn(4)
    received = waiting.receive(0.0)
    assert received is not None
    assert received[0]["kind"] == "welcome"
    close_descriptors(received[1])
    assert not b.over(), "the keeper ends, and a trainer is attached"
    waiting.send({"kind": "bye"})
    b.turn(2)
    assert b.over()


def test_a_descriptor_that_is_somebody_elses_by_now(b: Bench) -> None:
    """Of several events at once the first closes what the second is about."""
    one = b.trainer()
    one.serve()
    b.turn(2)
    waiting = b.guest()
    waiting.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": PAGE, "timeout_s": 1.0})
    one.say("forget", number=7)
    late = Connection(connect_stream(b.files.socket))
    b.connections.append(late)
    one.say("forget", number=8)
    b.turn(6)
    late.send({"kind": "status"})
    b.turn(4)
    answer = late.receive(0.0)
    assert answer is not None
    assert answer[0]["trainer"] == os.getpid()


def test_attaching_twice_is_no_way_out(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.say("attach", protocol=PROTOCOL, arena_bytes=PAGE, timeout_s=1.0)
    b.turn(6)
    assert b.server.trainer is None
    assert recalled(b)[1] == oracle(one.plans[1])


def test_a_trainer_that_cannot_be_watched_stays_attached(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows process id 0 for a trainer in another PID namespace."""
    monkeypatch.setattr(Connection, "peer", lambda self: PeerProcess(0, os.getuid()))
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.await_("done")
    b.guest().send({"kind": "look", "protocol": PROTOCOL})
    other = b.guest()
    other.send({"kind": "attach", "protocol": PROTOCOL, "idle": True})
    b.turn(4)
    answer = other.receive(0.0)
    assert answer is not None
    assert answer[0]["kind"] == "refused"
    assert b.server.status()["trainer"] == 0
    one.take(2, 6, offset=BASE, word=1)
    b.until(lambda: b.held() == 6, "the next base")
    one.die()
    assert b.server.status()["trainer"] is None


def test_another_protocol_is_refused_and_may_ask_to_stop(b: Bench) -> None:
    guest = b.guest()
    guest.send({"kind": "attach", "protocol": PROTOCOL + 1, "something": "new"})
    b.turn(2)
    answer = guest.receive(0.0)
    assert answer is not None
    assert (answer[0]["kind"], answer[0]["protocol"]) == ("refused", PROTOCOL)
    guest.send({"kind": "stop"})
    b.turn(2)
    assert b.over()


def test_an_arena_that_cannot_be_made_is_refused_in_words(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    guest = b.guest()
    guest.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": 1 << 62, "timeout_s": 1.0})
    b.turn(2)
    answer = guest.receive(0.0)
    assert answer is not None
    assert answer[0]["kind"] == "refused"
    assert isinstance(error_from_wire(answer[0]["error"]), OutOfSpaceError)
    assert one.hear("replaced") == []
    assert not b.over()
    one.die()
    b.turn(2)
    late = b.guest()
    late.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": 1 << 62, "timeout_s": 1.0})
    b.turn(2)
    assert not b.over(), "it has served somebody, who may come back"


def test_a_keeper_that_never_served_ends_when_it_has_no_memory(b: Bench) -> None:
    """It would wait for a trainer with the limits that it was started with, and whoever comes
    with other ones would hear the same."""
    guest = b.guest()
    guest.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": 1 << 62, "timeout_s": 1.0})
    b.turn(2)
    answer = guest.receive(0.0)
    assert answer is not None
    assert isinstance(error_from_wire(answer[0]["error"]), OutOfSpaceError)
    assert b.over()


def test_a_keeper_that_is_attached_to_stays_when_another_asks_too_much(b: Bench) -> None:
    one = b.trainer()
    guest = b.guest()
    guest.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": 1 << 62, "timeout_s": 1.0})
    b.turn(2)
    assert not b.over()
    one.serve()


def test_whoever_has_started_it_finds_it_there(run_folder: Path) -> None:
    clock = ManualClock()
    with bench(run_folder, clock=clock, linger_s=0.0) as b:
        clock.advance(30.0)
        assert not b.over(), "no trainer has had the time to attach"
        one = b.trainer()
        one.die()
        b.turn(2)
        clock.advance(0.1)
        assert b.over()
    for linger_s in (0.0, 600.0):
        with bench(run_folder, clock=clock, linger_s=linger_s) as b:
            clock.advance(59.0)
            assert not b.over()
            clock.advance(2.0)
            assert b.over(), "nobody comes: whoever has started it was interrupted"


def test_its_files_are_kept_from_whoever_cleans_up(run_folder: Path) -> None:
    """Of those it was found by nobody any more, and the log in its memory was lost."""
    clock, hours = ManualClock(), list[float]()
    with bench(
        run_folder,
        clock=clock,
        registration=Place(refresh_times=lambda: hours.append(clock.monotonic_s())),
    ) as b:
        b.trainer()
        for _ in range(5):
            clock.advance(1800.0)
            b.turn()
        assert len(hours) == 2
        assert hours[1] - hours[0] == 3600.0


def test_linger(run_folder: Path) -> None:
    clock = ManualClock()
    with bench(run_folder, clock=clock, linger_s=10.0) as b:
        assert not b.over()
        clock.advance(9.0)
        assert not b.over()
        one = b.trainer()
        clock.advance(100.0)
        assert not b.over(), "a trainer is attached"
        one.serve()
        b.turn(2)
        gate = Gate()
        assert b.server.duties.writer is not None
        b.server.duties.writer.queue(gate.wait_at)
        one.take(1, 5)
        one.die()
        clock.advance(100.0)
        assert not b.over(), "it has something to write"
        gate.open()
        b.settled()
        assert b.over()
        assert b.committed() == {(1, 5)}


def test_stop_ends_it_when_all_is_written(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    b.turn(2)
    gate = Gate()
    assert b.server.duties.writer is not None
    b.server.duties.writer.queue(gate.wait_at)
    one.take(1, 5)
    guest = b.guest()
    guest.send({"kind": "stop"})
    b.turn(2)
    assert not b.over()
    late = b.guest()
    late.send({"kind": "attach", "protocol": PROTOCOL, "arena_bytes": PAGE, "timeout_s": 1.0})
    b.turn(2)
    assert late.receive(0.0) is None, "nobody can attach any more"
    one.begin(2, 6, offset=BASE, word=1)  # nor take more, or it would never end
    b.turn(4)
    gate.open()
    b.settled()
    assert b.over()
    assert b.committed() == {(1, 5)}


def test_its_status_counts_the_memory_that_is_taken(b: Bench) -> None:
    """An arena is reserved as large as the budget; half of the memory of the machine, mostly."""
    one = b.trainer(pages=(1 << 40) // PAGE)
    one.serve()
    before = b.server.status()["arena_bytes"]
    one.take(1, 5)
    one.await_("done")
    assert BASE <= b.server.status()["arena_bytes"] - before < 1 << 30


# --- Guests -----------------------------------------------------------------------------


def test_half_a_message_holds_nobody_up(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    guest = b.guest()
    os.write(guest.fileno(), b"\x40\x00")
    one.take(1, 5)
    one.await_("done")
    os.write(guest.fileno(), b"\x00\x00")
    b.turn(2)
    assert b.server.trainer is not None


def test_guests_that_say_nothing_do_not_fill_the_house(run_folder: Path) -> None:
    clock = ManualClock()
    with bench(run_folder, clock=clock) as b:
        guests = [b.guest() for _ in range(100)]
        os.write(guests[-1].fileno(), b"\x40\x00")
        one = b.trainer()
        one.serve()
        asking = b.guest()
        asking.send({"kind": "status"})
        b.turn(2)
        answer = asking.receive(0.0)
        assert answer is not None
        assert answer[0]["trainer"] == os.getpid()
        clock.advance(60.0)
        b.turn(2)
        assert b.server.connections.count <= 3, "listener, trainer, its death"
        assert one.hear("replaced") == []


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing; what is open works."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_it_lives_on_and_takes_connections_later(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has in memory would end with it."""
    clock = ManualClock()
    with bench(run_folder, clock=clock) as b:
        one = b.trainer()
        one.serve()
        one.take(1, 5)
        one.await_("done")
        silent = b.guest()
        asking = Connection(connect_stream(b.files.socket))
        asking.send({"kind": "status"})
        with no_descriptors():
            b.turn(5)
        refused = [line for line in caplog.messages if "Too many open files" in line]
        assert len(refused) == 1, "it is not asked again at once"
        assert silent.receive(0.0) is None, "its place becomes free"
        clock.advance(1.0)
        b.turn(3)
        answer = asking.receive(0.0)
        asking.close()
        assert answer is not None
        assert answer[0]["trainer"] == os.getpid()
        one.take(2, 6)
        b.settled()
        assert (one.timeline, 6) in b.committed()


def test_guests_leave_most_descriptors_to_the_keeper(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.keeper.process.connections.limit_of", lambda _: 32)
    server = Bench(run_folder)
    try:
        guests = [server.guest() for _ in range(20)]
        server.turn(3)
        assert server.server.connections.count == 1 + 32 // 4, "the listener, and guests"
        assert len(guests) == 20
    finally:
        server.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 8, b"\x01\x00\x00\x00\x90"],
)
def test_garbage_on_the_socket_is_hung_up_on(b: Bench, garbage: bytes) -> None:
    one = b.trainer()
    one.serve()
    guest = b.guest()
    os.write(guest.fileno(), garbage)
    b.turn(4)
    assert guest.receive(0.0) is None
    one.take(1, 5)
    one.await_("done")


KINDS = [
    *("status", "attach", "serve", "layout", "begin", "object", "captured", "abandon", "forget"),
    *("settle", "recall", "end", "readable", "death", "message", "", None, 3, [1]),
]
FIELDS = ["protocol", "arena_bytes", "timeout_s", "timeline", "keep", "verified", "number"]
FIELDS += ["layout", "identity", "offset", "word", "stream", "name", "part", "error"]
VALUES = st.one_of(
    st.none(),
    st.integers(-2, 70000),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["shards", "kinds", "run", "error"]), st.none(), max_size=2),
)
MESSAGES = st.builds(
    lambda kind, fields: {"kind": kind, **fields},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=15),
)


@pytest.mark.slow
def test_no_message_ends_the_keeper(run_folder: Path) -> None:
    """Neither from a guest nor from the trainer; what was whole before is still there."""
    with bench(run_folder) as b:

        @given(st.lists(MESSAGES, min_size=1, max_size=4), st.booleans())
        def check(messages: list[dict[str, Any]], attached: bool) -> None:
            guest = b.trainer(2) if attached else b.guest()
            connection = guest.connection if isinstance(guest, Hand) else guest
            for message in messages:
                with contextlib.suppress(KeeperError):
                    connection.send(message)
                b.turn(2)
            connection.close()
            b.turn(2)
            b.settled()

        check()
        assert not b.over()
        good = b.trainer()
        assert good.recall() is None
        good.serve()
        good.take(1, 5)
        good.await_("done")


# --- Errors -----------------------------------------------------------------------------


def test_an_error_is_told_once_with_its_step_and_before_the_end(
    d: Bench, disk: HookedFileSystem
) -> None:
    """Who waits for the end, and then closes, must have heard of it by then."""
    one = d.trainer()
    one.serve()
    d.turn(2)
    disk.hook = full
    for number in range(1, 6):
        one.take(number, number, offset=0, word=number)

        def heard(count: int = number) -> bool:
            return len(one.hear("done")) == count

        d.until(heard)
        kinds = [m["kind"] for m in one.listen() if m["kind"] in ("failed", "error", "done")]
        assert kinds[2::3] == ["done"] * number
        for told in range(0, len(kinds), 3):  # by different threads: whichever comes first
            assert sorted(kinds[told : told + 2]) == ["error", "failed"]
        error = error_from_wire(one.hear("error")[-1]["error"])
        assert isinstance(error, OutOfSpaceError)
        assert error.step == number


def test_the_errors_of_one_trainer_are_not_told_to_the_next(
    d: Bench, disk: HookedFileSystem
) -> None:
    one = d.trainer()
    one.serve()
    d.turn(2)
    gate = Gate()
    assert d.server.duties.writer is not None
    d.server.duties.writer.queue(gate.wait_at)
    one.take(1, 5)
    one.begin(2, 6, offset=BASE, word=1)
    disk.hook = full
    one.die()
    two = d.trainer()
    gate.open()
    assert two.recall() is not None
    d.settled()
    assert two.hear("error") == []


def test_what_was_withdrawn_is_no_error(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.begin(1, 5)
    one.fill(1, 5000)
    one.say("abandon", number=1, error=None)
    one.await_("done")
    b.settled()
    assert len(one.hear("failed")) == 1
    assert one.hear("error") == []
    assert b.committed() == set()


@pytest.mark.parametrize("stream", [True, False])
def test_abandoned_twice_is_abandoned(b: Bench, stream: bool) -> None:
    """By its trainer, which then dies while the keeper is busy with another one."""
    one = b.trainer()
    one.serve()
    b.turn(2)
    gate = Gate()
    assert b.server.duties.writer is not None
    b.server.duties.writer.queue(gate.wait_at)
    one.begin(1, 5, stream=stream)
    one.fill(1)
    one.say("abandon", number=1, error=error_to_wire(AuditError("torn", step=5)))
    one.die()
    gate.open()
    b.settled()
    two, contents, _ = recalled(b)
    assert contents is None
    two.serve()
    two.take(1, 6)
    two.await_("done")


def test_a_bug_in_the_writer_ends_one_base_only(b: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    one = b.trainer()
    one.serve()
    failpoints.arm("keeper.before_persist", "raise")
    one.take(1, 5)
    one.await_("done")
    (failed,) = one.hear("failed")
    assert "FailpointError" in failed["error"]["message"]
    assert len(one.hear("error")) == 1
    one.take(2, 6)
    b.until(lambda: len(one.hear("done")) == 2)
    assert b.committed() == {(1, 6)}


def test_a_base_that_is_there_already_ends_when_its_capture_is_whole(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that was killed behind its commit, say: whoever goes on from the capture, as a
    replica does, would begin with half of it, and wait for what nobody brings any more."""
    waits, whole = threading.Event(), list[bool]()

    def objects(incoming: Incoming) -> Any:
        waits.set()
        return asked(incoming)

    asked = Incoming.objects
    one = b.trainer()
    one.serve()
    one.take(1, 5)
    one.await_("done")
    replicas = b.replicas
    monkeypatch.setattr(
        replicas, "base_durable", lambda base, arena: whole.append(base.incoming.complete)
    )
    monkeypatch.setattr(Incoming, "objects", objects)
    one.begin(2, 5, offset=BASE, word=1)
    b.until(lambda: waits.is_set() or len(one.hear("durable")) == 2)
    assert not whole
    one.fill(2)
    one.captured(2)
    b.until(lambda: len(one.hear("done")) == 2)
    assert whole == [True]


def test_a_bug_behind_a_save_does_not_end_the_writer(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would write the next base, and who waits for it would wait for ever."""

    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    one = b.trainer()
    one.serve()
    with monkeypatch.context() as patched:
        patched.setattr(b.replicas, "base_durable", fails)
        one.take(1, 5)
        one.await_("done")
    assert len(one.hear("durable")) == 1
    b.until(lambda: bool(one.hear("error")))
    assert "internal error after a save" in one.hear("error")[0]["error"]["message"]
    one.take(2, 6)
    b.until(lambda: len(one.hear("done")) == 2)
    assert b.committed() == {(1, 5), (1, 6)}


# --- Resources --------------------------------------------------------------------------


def footprint() -> tuple[int, int, int]:
    """Open descriptors, threads, and mappings of arenas."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps.count("everstep-arena")


@pytest.mark.parametrize("rounds", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_trainers_that_come_and_go_leave_nothing_behind(b: Bench, rounds: int) -> None:
    before = (0, 0, 0)
    timeline: tuple[int, int] | None = None
    for number in range(rounds):
        one = b.trainer(8)
        held = one.recall()
        assert (held is None) == (timeline is None)
        del held
        one.say("forget", number=None)
        one.serve(parent=timeline, keep=1)
        one.take(1, number + 1)
        one.await_("durable")
        if number % 3 == 0:
            one.begin(2, number + 2, offset=BASE, word=1)
        timeline = one.timeline, number + 1
        one.die()
        one.arena.close()
        b.settled()
        b.connections.clear()
        if number == 4:
            before = footprint()
    now = footprint()
    assert all(map(operator.le, now, before)), (now, before)  # what other tests left may go


# --- Several ranks ----------------------------------------------------------------------


def test_who_comes_back_to_a_keeper_finds_its_port_free(b: Bench) -> None:
    """A training process that lost the connection, and not the keeper, asks for the mailbox where
    the other ranks know it; there the keeper itself still listened."""
    host, port = "127.0.0.1", 0
    for again in (False, True):
        one = b.trainer()
        one.say("settle")
        one.await_("settled")
        one.say("listen", host=host, port=port)
        found = one.await_("listening")
        assert found["error"] is None
        assert port in (0, found["port"])
        port = found["port"]
        others = ((host, port), (host, 1))
        job_session = JobSession("session", 0, ("a", "a"), others, again=again).to_wire()
        inventory = scan_run(PosixFileSystem(), b.run)
        one.timeline = open_timeline(Seams(), b.run, inventory, parent=None, exact=True)
        one.say("serve", timeline=one.timeline, keep={"newest": 3}, verified=None, seat=job_session)
        b.turn(2)
        one.die()
    b.until(lambda: b.server.trainer is None)
    b.server.duties.settle()
