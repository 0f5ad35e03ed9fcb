"""CUDA devices that run whatever their streams allow, in an order drawn by a seed.

A stream is a queue; its head may run unless it waits for an event that has not been reached.
Nothing runs by itself, and only one at a time: streams, the lane's thread and the training
loop take turns, each until it waits for something. So a schedule is a function of the seed,
and every schedule that CUDA's promises allow can be drawn.

Device memory is host memory here. It is given back when the last tensor on it is gone, as by
torch's allocator: whoever allocates next on the stream that it was allocated on may write to
it at once, unless other streams were recorded to use it. Here it is poisoned then.

What is not played: how long anything takes, several copy engines per stream, the visibility
of bytes between processors, and everything that torch itself does with a real device.
"""

from __future__ import annotations

import bisect
import contextlib
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import pytest
import torch

from everstep.capture import cuda as cuda_module
from everstep.capture import pinned as pinned_module
from everstep.capture import stage as stage_module
from everstep.capture.batches import Batch
from everstep.capture.lane import CpuLane
from everstep.capture.stage import StagedCopy
from tests.support.world import TIMEOUT_S

__all__ = ["POISON", "Actor", "FakeCuda", "FakeHost", "FakeThreads", "Token", "cuda_device"]

POISON = 0xAA
_CPU = torch.device("cpu")


def cuda_device(index: int) -> torch.device:
    return torch.device("cuda", index)


class Token:
    """A point in a stream."""

    def __init__(self) -> None:
        self.reached = False


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: torch.device) -> None:
        self.cuda = cuda
        self.device = device
        self.queue: deque[Token | Callable[[], None]] = deque()
        cuda.streams.append(self)

    def push(self, item: Token | Callable[[], None]) -> None:
        """Something to do, or a token to wait for."""
        self.queue.append(item)
        self.cuda.pushed(self)

    def point(self) -> Token:
        token = Token()

        def reach() -> None:
            token.reached = True

        self.push(reach)
        return token

    def wait_stream(self, other: FakeStream) -> None:
        self.push(other.point())

    @property
    def may_run(self) -> bool:
        if not self.queue:
            return False
        head = self.queue[0]
        return not isinstance(head, Token) or head.reached

    def run_one(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, Token):
            head()


class FakeEvent:
    def __init__(self, cuda: FakeCuda, *, blocking: bool, timed: bool = False) -> None:
        assert blocking, "who waits for it would spin"
        self.cuda = cuda
        self.timed = timed
        self.token: Token | None = None

    def record(self, stream: FakeStream) -> None:
        self.token = stream.point()

    def wait(self, stream: FakeStream) -> None:
        if self.token is not None:
            stream.push(self.token)

    def query(self) -> bool:
        return self.token is not None and self.token.reached

    def elapsed_time(self, other: FakeEvent) -> float:
        for event in (self, other):
            assert event.timed
            assert event.token is not None
            assert event.token.reached
        return 2.0

    def synchronize(self) -> None:
        self.cuda.named_device()
        token = self.token
        if token is not None:
            self.cuda.run_until(lambda: token.reached)


class _Tracked(np.ndarray):
    """Can be watched: it goes when the last tensor on it does."""


class _Allocation:
    tracked: Any  # weak reference to what keeps the memory

    def __init__(self, base: Any, device: torch.device, stream: FakeStream) -> None:
        self.base = base  # stays, whatever becomes of the tensors
        self.device = device
        self.stream = stream
        self.users: list[FakeStream] = []


class FakeCuda:
    """Takes the place of ``torch.cuda`` in the lane.

    Args:
        eager: a stream runs what it is given at once (with what it waits for), unless it is a
            side stream; for training loops of real tensors.

    Attributes:
        registered: addresses of pinned memory, and where each ends.
        strayed: threads that have used streams, or waited for events, without naming a device:
            CUDA makes a context on the first one for them.
    """

    def __init__(self, rng: random.Random, *, eager: bool = False) -> None:
        self.rng = rng
        self.eager = eager
        self.initialized = True
        self.capturing = False
        self.status = 0  # of the next cudaHostRegister
        self.free_bytes = 1 << 40  # for stages
        self.launched = 0
        self.streams: list[FakeStream] = []
        self.registered: dict[int, int] = {}
        self.strayed: set[int] = set()
        self.actors: list[Actor] = []
        self._lock = threading.RLock()
        self._current: dict[tuple[int, torch.device], FakeStream] = {}
        self._defaults: dict[torch.device, FakeStream] = {}
        self._device: dict[int, torch.device] = {}
        self._addresses: list[int] = []
        self.allocations: list[_Allocation] = []
        self._targets: list[tuple[int, int]] = []  # of copies that have not run yet

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_module, "_cuda", self)
        monkeypatch.setattr(pinned_module, "_cuda", self)
        monkeypatch.setattr(pinned_module, "_launch_something", self._launch)
        monkeypatch.setattr(stage_module, "_WIDE", torch.uint8)  # as all memory that is played
        for name in ("_allocate", "_device", "_done", "_send", "_stage", "_used_on"):
            monkeypatch.setattr(cuda_module, name, getattr(self, f"play{name}"))
        monkeypatch.setattr(cuda_module, "packed", self.play_packed)

    # --- What torch.cuda has ---

    def is_initialized(self) -> bool:
        return self.initialized

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free_bytes, self.free_bytes

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, device)

    def Event(  # noqa: N802
        self, *, enable_timing: bool = False, blocking: bool = False
    ) -> FakeEvent:
        return FakeEvent(self, blocking=blocking, timed=enable_timing)

    def current_stream(self, device: torch.device) -> FakeStream:
        found = self._current.get((self._thread, device))
        if found is None:
            found = self._defaults.get(device)
        if found is None:
            found = self._defaults[device] = FakeStream(self, device)
        return found

    def use(self, stream: FakeStream) -> None:
        """From now on it is the current one of its device in this thread."""
        self._current[self._thread, stream.device] = stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.named_device()  # or to leave means to go back to the first
        key = (self._thread, stream.device)
        before = self._current.get(key)
        self._current[key] = stream
        with self.device(stream.device):
            yield
        if before is None:
            del self._current[key]
        else:
            self._current[key] = before

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        thread = self._thread
        before = self._device.get(thread)
        self._device[thread] = device
        yield
        if before is None:
            del self._device[thread]
        else:
            self._device[thread] = before

    def named_device(self) -> None:
        """Notes a thread that has none."""
        if self._thread not in self._device:
            self.strayed.add(self._thread)

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert self._thread in self._device, "it would make a context on the first device"
        assert flags == 1, "or other devices could not copy there"
        if self.status:
            return self.status
        end = address + size_bytes
        assert size_bytes > 0
        assert all(end <= a or e <= address for a, e in self.registered.items()), "twice"
        self.registered[address] = end
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        end = self.registered.pop(address)
        assert not self.copying(address, end), "unpinned while copies go there"
        return 0

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return "out of memory"

    def _launch(self) -> None:
        assert self._thread in self._device
        self.launched += 1
        raise RuntimeError("CUDA error: out of memory")

    # --- What the lane does with tensors ---

    def play_device(self, tensor: torch.Tensor) -> torch.device:
        found = self._find(tensor)
        return _CPU if found is None else found.device

    def play_packed(self, batch: Batch) -> torch.Tensor:
        sources = batch.sources or (batch.rearranged,)
        device = self.play_device(sources[0])
        packed = self.alloc(batch.end - batch.begin, device)
        target, aliases = self._alias(packed), [self._alias(source) for source in sources]

        def run() -> None:
            flat = [alias.contiguous().reshape(-1).view(torch.uint8) for alias in aliases]
            target.copy_(torch.cat(flat))

        self.current_stream(device).push(run)
        return packed

    def play_done(self, issued: Future[Any], timeout_s: float | None) -> bool:
        if timeout_s == 0.0 or issued.done():
            return issued.done()
        if self.actor() is not None:
            self.run_until(issued.done)
        elif found := [actor for actor in self.actors if actor.name == "issue"]:
            with self._lock:
                while not issued.done():  # nothing else goes on
                    next(actor for actor in found if actor.may_go_on).go_on()
        else:  # a thread of its own
            wait([issued], timeout_s)
        return issued.done()

    def play_send(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._play_copy(source, target)

    def play_stage(self, copy: StagedCopy) -> None:
        for sources, targets in copy.groups:
            for source, target in zip(sources, targets, strict=True):
                self._play_within(source, target)
        for batch, target in copy.rearranged:
            self._play_within(self.play_packed(batch), target)

    def _play_within(self, source: torch.Tensor, target: torch.Tensor) -> None:
        one = self._alias(source)
        other = self._alias(target)
        self.current_stream(self._device[self._thread]).push(lambda: other.copy_(one))

    def play_allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor | None:
        if size_bytes > self.free_bytes:
            return None
        self.free_bytes -= size_bytes
        return self.alloc(size_bytes, device)

    def _play_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        assert any(a <= begin and end <= e for a, e in self.registered.items()), (
            "a copy to memory that is not pinned, or that goes over an edge of a registration"
        )
        self._targets.append((begin, end))
        alias = self._alias(source)

        def run() -> None:
            target.copy_(alias)
            self._targets.remove((begin, end))

        self.current_stream(self._device[self._thread]).push(run)

    def play_used_on(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        found = self._find(tensor)
        if found is not None:
            found.users.append(stream)

    # --- Memory ---

    def alloc(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Flat ``uint8``, allocated on the current stream."""
        base = np.full(size_bytes, POISON, np.uint8)
        tracked = base.view(_Tracked)
        allocation = _Allocation(base, device, self.current_stream(device))
        weakref.finalize(tracked, self._freed, allocation).atexit = False
        allocation.tracked = weakref.ref(tracked)
        tensor = torch.frombuffer(tracked, dtype=torch.uint8)
        index = bisect.bisect(self._addresses, tensor.data_ptr())
        self._addresses.insert(index, tensor.data_ptr())
        self.allocations.insert(index, allocation)
        return tensor

    def copying(self, begin: int, end: int) -> bool:
        """Whether a copy to these addresses has not run yet."""
        return any(a < end and begin < e for a, e in self._targets)

    def later(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A kernel on the current stream that writes ``value``."""
        alias = self._alias(tensor)

        def run() -> None:
            alias.copy_(value)

        self.current_stream(self.play_device(tensor)).push(run)

    def _freed(self, allocation: _Allocation) -> None:
        for user in allocation.users:
            allocation.stream.push(user.point())
        allocation.stream.push(lambda: allocation.base.fill(POISON))

    def _find(self, tensor: torch.Tensor) -> _Allocation | None:
        index = bisect.bisect(self._addresses, tensor.data_ptr()) - 1
        if index < 0:
            return None
        found = self.allocations[index]
        inside = tensor.data_ptr() < self._addresses[index] + found.base.size
        return found if inside else None

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping it from being freed: queues hold no references."""
        found = self._find(tensor)
        if found is None:
            return tensor.detach()
        whole = torch.from_numpy(found.base)
        offset = tensor.data_ptr() - whole.data_ptr()
        assert tensor.dtype == torch.uint8
        return torch.as_strided(whole, tensor.shape, tensor.stride(), offset)

    # --- Schedules ---

    def pushed(self, stream: FakeStream) -> None:
        if self.eager and stream in self._defaults.values():
            self.run_until(lambda: not stream.queue)

    def run_until(self, there: Callable[[], bool]) -> None:
        """Lets others go on until ``there()``."""
        actor = self.actor()
        if actor is not None:
            actor.give_way(there)
            return
        with self._lock:
            while not there():
                assert self.pick(), "nothing can go on: a deadlock"

    def pick(self) -> bool:
        """Lets one of those that can go on do so; False if there is none."""
        options: list[Callable[[], None]] = [s.run_one for s in self.streams if s.may_run]
        options += [actor.go_on for actor in self.actors if actor.may_go_on]
        if options:
            self.rng.choice(options)()
        return bool(options)

    def start(self, name: str, work: Callable[[], None]) -> Actor:
        """A thread that goes on only when the schedule lets it."""
        actor = Actor(name, work)
        self.actors.append(actor)
        return actor

    def stop(self) -> None:
        """Ends all threads, whatever they wait for."""
        for actor in self.actors:
            actor.stop()

    def actor(self) -> Actor | None:
        """The thread that calls, if it is one of these."""
        ident = threading.get_ident()
        return next((actor for actor in self.actors if actor.ident == ident), None)

    @property
    def _thread(self) -> int:
        return threading.get_ident()


class _Stopped(BaseException):
    pass


class Actor:
    """A thread that runs only between two calls of :meth:`go_on` and :meth:`give_way`."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.over = self._stopped = False
        self._there: Callable[[], bool] = lambda: True
        self._error: BaseException | None = None
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    @property
    def may_go_on(self) -> bool:
        return not self.over and self._there()

    def go_on(self) -> None:
        """Runs it until it waits for something; raises what it has failed with."""
        self._mine.release()
        assert self._theirs.acquire(timeout=TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def give_way(self, there: Callable[[], bool] = lambda: True) -> None:
        """Called by the thread itself: lets others go on, until ``there()`` at least."""
        self._there = there
        self._theirs.release()
        self._await_turn()

    def stop(self) -> None:
        self._stopped = True
        self._mine.release()
        self._thread.join(TIMEOUT_S)

    def _await_turn(self) -> None:
        assert self._mine.acquire(timeout=TIMEOUT_S)
        if self._stopped:
            raise _Stopped

    def _run(self) -> None:
        try:
            self._await_turn()
            self._work()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        self.over = True
        self._theirs.release()


class FakeHost(CpuLane):
    """The lane of host memory, whose thread goes on when the schedule lets it."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._threads: Any = FakeThreads(cuda)

    def thread(self, name: str) -> Any:
        """Goes on when the schedule lets it, too."""
        return FakeThreads(self._cuda, "issue")

    @property
    def ident(self) -> int | None:
        """Of its thread."""
        found: int | None = self._threads.ident
        return found

    @property
    def waiting(self) -> int:
        """Number of jobs that its thread has not begun."""
        return len(self._threads.jobs)


class FakeThreads:
    """One thread, an actor."""

    def __init__(self, cuda: FakeCuda, name: str = "lane") -> None:
        self._cuda = cuda
        self.jobs: deque[Callable[[], None] | None] = deque()
        self._actor = cuda.start(name, self._work)
        self.ident = self._actor.ident

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                result = work()
            except AssertionError:
                raise  # the test's
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.jobs.append(job)
        return future

    def close(self) -> None:
        self.jobs.append(None)
        self._cuda.run_until(lambda: self._actor.over)

    def _work(self) -> None:
        while True:
            self._actor.give_way(lambda: bool(self.jobs))
            job = self.jobs.popleft()
            if job is None:
                return
            job()
            del job  # as the real ones do
