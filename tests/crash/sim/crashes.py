"""Crashes and errors at every operation of an act, enumerated (after SQLite and RocksDB).

A :class:`Scenario` says what the world looks like, what is done in it, and what must hold
whatever happens meanwhile. :func:`enumerate_crashes` kills the process before, within and
after every operation and looks at what the next process may find: all that was issued
(SIGKILL), and what a power loss may leave of it. :func:`enumerate_errors` lets every
operation fail instead. Both return a :class:`Report`; every violation in it can be
replayed from its seed.
"""

from __future__ import annotations

import abc
import errno as errnos
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.errors import EverstepError
from tests.crash.sim.faults import Fault, Moment, Operation, SimulatedCrash
from tests.crash.sim.filesystem import SimFileSystem

__all__ = [
    "Report",
    "Scenario",
    "Violation",
    "enumerate_crashes",
    "enumerate_errors",
    "replay",
    "watch_crashes",
]

_LOG_TAIL = 12
_ORIGIN_CHARS = 600
_PROCESS_KILL = -1

When = Literal["crash_before", "crash_partly", "crash_after", "ended", "error"]


class Scenario(abc.ABC):
    """Actions under test, and conditions that must hold after any crash."""

    def prepare(self, fs: SimFileSystem) -> None:  # noqa: B027 - most need none, some do
        """Prepare the disk; runs once, without faults."""

    @abc.abstractmethod
    def act(self, fs: SimFileSystem) -> None:
        """The act under test: a process of its own, disturbed in every possible way.

        Runs many times, each time on a fresh copy of what :meth:`prepare` left, and must
        then begin anew.

        Raises:
            EverstepError: the only errors that are in order.
        """

    @abc.abstractmethod
    def check(self, fs: SimFileSystem, promised: Any) -> None:
        """Check that the next process can work with the remaining disk; may change ``fs``.

        Args:
            promised: what :meth:`promised` said when the act was ended.

        Raises:
            AssertionError: saying what is wrong. Any other exception is a violation too.
        """

    def promised(self) -> Hashable:
        """Return the results that the current or last :meth:`act` has reported as safe so far."""
        return None

    def posted(self) -> Sequence[EverstepError]:
        """Errors that the last :meth:`act` reported without raising them."""
        return ()

    def go_on(self, fs: SimFileSystem) -> None:  # noqa: B027 - most need none, some do
        """Continue in the same process after an error; no more faults are injected."""

    def tolerates(self, operation: Operation) -> bool:
        """Return True if an error at ``operation`` may go unreported: nothing depends on it."""
        return operation.op == "reuse"


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a promise was broken.

    Attributes:
        operation: number of the disturbed operation.
        when: how it was disturbed; ``"ended"``: not at all, the power failed afterwards.
        errno: for an error, which.
        seed: seed of the crash images.
        images: how many random ones of them there were.
        image: which of them; -1 after a mere end of the process.
        problem: what is wrong.
        origin: what had survived.
        log: the last operations before.
    """

    operation: int
    when: When
    errno: int
    seed: int
    images: int
    image: int
    problem: str
    origin: str
    log: tuple[Operation, ...]

    def __str__(self) -> str:
        how = self.when.replace("_", " ")
        how += f" {errnos.errorcode.get(self.errno, self.errno)}" if self.when == "error" else ""
        tail = "\n".join(f"    {operation}" for operation in self.log)
        where = f"operation {self.operation}, {how}, image {self.image} of seed {self.seed}"
        return f"{where}: {self.problem}\n  {self.origin:.{_ORIGIN_CHARS}}\n{tail}"


@dataclass(slots=True)
class Report:
    """Result of an enumeration.

    Attributes:
        operations: operations that the undisturbed act issues.
        points: disturbances tried.
        images: states of the disk looked at.
        checked: those of them that differed from all before; only these were checked.
        violations: broken promises.
    """

    operations: int = 0
    points: int = 0
    images: int = 0
    checked: int = 0
    violations: list[Violation] = field(default_factory=list)

    def raise_if_any(self) -> None:
        """Raises if a promise was broken.

        Raises:
            AssertionError: with the first violations, how to see each again, and the counts.
        """
        if self.violations:
            shown = "\n".join(str(violation) for violation in self.violations[:3])
            raise AssertionError(f"{len(self.violations)} violation(s); {self}\n{shown}")

    def __str__(self) -> str:
        return (
            f"{self.operations} operations, {self.points} points, {self.images} images "
            f"({self.checked} distinct)"
        )


@dataclass(frozen=True, slots=True)
class _Point:
    operation: int
    when: When
    errno: int
    seed: int
    images: int

    @property
    def faults(self) -> list[Fault]:
        """Faults that reproduce it; none if the act ended by itself."""
        if self.when == "ended":
            return []
        return [Fault(self.when, at=self.operation, errno=self.errno)]


def enumerate_crashes(
    scenario: Scenario, *, images_per_point: int = 4, seed: int = 0, violations_max: int = 10
) -> Report:
    """Ends the process at every operation of ``scenario.act`` and checks what is left.

    Args:
        images_per_point: states after a power loss per point, besides the two extremes.
        violations_max: stops after so many.
    """
    base, log = _rehearse(scenario)
    run = _Run(scenario, base, Report(operations=len(log)), violations_max)
    for operation in log:
        # Before this operation is after the one before it: the same seed, so that states
        # that are the same are looked at once.
        n = operation.number
        run.try_crash(_Point(n, "crash_before", 0, seed + n - 1, images_per_point))
        if operation.op == "write":
            run.try_crash(_Point(n, "crash_partly", 0, seed + n, images_per_point))
        run.try_crash(_Point(n, "crash_after", 0, seed + n, images_per_point))
    # The power may also fail when all has been done and promised.
    run.try_crash(_Point(len(log), "ended", 0, seed + len(log), images_per_point))
    return run.report


def watch_crashes(
    scenario: Scenario, *, images_per_point: int = 4, seed: int = 0, violations_max: int = 10
) -> Report:
    """Like :func:`enumerate_crashes`, from one undisturbed act that is watched.

    For acts with threads of their own, whose operations come in another order each time.
    """
    base, log = _rehearse(scenario)
    run = _Run(scenario, base, Report(operations=len(log)), violations_max)
    fs = base.clone()
    seen: list[tuple[int, When, SimFileSystem, Hashable]] = []

    def watch(operation: Operation, moment: Moment) -> None:
        when: When = "crash_before" if moment == "before" else "crash_after"
        seen.append((operation.number, when, fs.survive_all(), scenario.promised()))

    fs.watch(watch)
    scenario.act(fs)
    seen.append((len(fs.log), "ended", fs.survive_all(), scenario.promised()))
    for number, when, state, promised in seen:
        run.report.points += 1
        point_seed = seed + number - (when == "crash_before")
        point = _Point(number, when, 0, point_seed, images_per_point)
        run.check_state(state, point, promised, tuple(fs.log))
    return run.report


def enumerate_errors(
    scenario: Scenario,
    *,
    errnos_injected: Sequence[int] = (errnos.EIO, errnos.ENOSPC),
    images_per_point: int = 2,
    seed: int = 0,
    violations_max: int = 10,
) -> Report:
    """Lets every operation of ``scenario.act`` fail, once each, and checks what is left.

    The act must raise an :class:`EverstepError` or post one; then the process goes on, and
    both what it leaves and what a power loss right after the error leaves must pass.
    """
    base, log = _rehearse(scenario)
    run = _Run(scenario, base, Report(operations=len(log)), violations_max)
    for operation in log:
        for code in errnos_injected:
            run.try_error(
                _Point(operation.number, "error", code, seed + operation.number, images_per_point)
            )
    return run.report


def replay(scenario: Scenario, violation: Violation) -> SimFileSystem:
    """The state of the disk at which ``violation`` was found, for a debugger to look at.

    For acts that issue the same operations every time, as those without threads do.
    """
    v = violation
    base, _ = _rehearse(scenario)
    fs, _ = _disturb(scenario, base, _Point(v.operation, v.when, v.errno, v.seed, v.images))
    return next(image for number, image in _images(fs, v.seed, v.images) if number == v.image)


class _Run:
    """An enumeration under way."""

    def __init__(
        self, scenario: Scenario, base: SimFileSystem, report: Report, violations_max: int
    ) -> None:
        self.report = report
        self._scenario = scenario
        self._base = base
        self._violations_max = violations_max
        self._seen: set[tuple[str, Hashable]] = set()

    def try_crash(self, point: _Point) -> None:
        if self._enough():
            return
        self.report.points += 1
        fs, _ = _disturb(self._scenario, self._base, point)
        if fs.crashed or point.when == "ended":
            self.check_state(fs, point, self._scenario.promised(), tuple(fs.log))
        else:
            self._note(point, fs.log, "the operation was not reached this time")

    def try_error(self, point: _Point) -> None:
        if self._enough():
            return
        self.report.points += 1
        fs, error = _disturb(self._scenario, self._base, point)
        if len(fs.log) < point.operation:
            self._note(point, fs.log, "the operation was not reached this time")
            return
        failed = fs.log[point.operation - 1]
        if error is not None and not isinstance(error, EverstepError):
            self._note(point, fs.log, f"{failed} failed, and out came {error!r}")
        unreported = error is None and not self._scenario.posted()
        if unreported and not self._scenario.tolerates(failed):
            self._note(point, fs.log, f"{failed} failed, and nobody was told")
        states = [(fs.survive_all(), self._scenario.promised())]
        try:  # first, as the process that goes on must not find itself replaced by a check's
            self._scenario.go_on(fs)
        except Exception as later:
            self._note(point, fs.log, f"going on after the error: {_words(later)}")
        else:
            states.append((fs.survive_all(), self._scenario.promised()))
        for state, promised in states:
            self.check_state(state, point, promised, tuple(fs.log))

    def check_state(
        self, fs: SimFileSystem, point: _Point, promised: Hashable, log: Sequence[Operation]
    ) -> None:
        """Checks everything that the next process may find after ``fs``."""
        for number, image in _images(fs, point.seed, point.images):
            self.report.images += 1
            key = (image.fingerprint(), promised)
            if key in self._seen or self._enough():
                continue
            self._seen.add(key)
            self.report.checked += 1
            origin = image.origin
            try:
                self._scenario.check(image, promised)
            except Exception as problem:
                self._note(point, log, _words(problem), number, origin)

    def _enough(self) -> bool:
        return len(self.report.violations) >= self._violations_max

    def _note(
        self,
        point: _Point,
        log: Sequence[Operation],
        problem: str,
        image: int = _PROCESS_KILL,
        origin: str = "",
    ) -> None:
        tail = tuple(log[max(0, point.operation - _LOG_TAIL) : point.operation])
        p = point
        self.report.violations.append(
            Violation(p.operation, p.when, p.errno, p.seed, p.images, image, problem, origin, tail)
        )


def _rehearse(scenario: Scenario) -> tuple[SimFileSystem, tuple[Operation, ...]]:
    """The prepared disk, and the operations of an undisturbed act, which must pass the check."""
    base = SimFileSystem()
    scenario.prepare(base)
    base = base.clone()
    fs = base.clone()
    scenario.act(fs)
    log = tuple(fs.log)
    assert log, "the act did nothing"
    scenario.check(fs.survive_all(), scenario.promised())
    return base, log


def _disturb(
    scenario: Scenario, base: SimFileSystem, point: _Point
) -> tuple[SimFileSystem, Exception | None]:
    fs = base.clone()
    for fault in point.faults:
        fs.inject(fault)
    try:
        scenario.act(fs)
    except SimulatedCrash:
        pass
    except Exception as error:
        return fs, error
    return fs, None


def _images(fs: SimFileSystem, seed: int, count: int) -> Iterator[tuple[int, SimFileSystem]]:
    yield _PROCESS_KILL, fs.survive_all()
    yield from enumerate(fs.crash_images(seed, count))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else repr(error)
