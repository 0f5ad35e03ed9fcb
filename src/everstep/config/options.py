"""Options of a Checkpointer: intervals, budgets, keeper, log, preemption, failure policy.

Intervals and log histories are parsed from text such as ``"10min"``, ``"2h"`` or ``"50GB"``.

:func:`validate_options` turns the arguments of the constructor into :class:`Options`, once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Literal

from everstep.commit.retention import KeepRules
from everstep.config.given import (
    UNITS_S,
    amount_of,
    checked,
    did_you_mean,
    is_int,
    is_number,
    one_of,
    plain,
)
from everstep.config.keep import KeepPolicy, parse_keep
from everstep.config.method import Method, presets
from everstep.config.promise import Promise
from everstep.errors import EverstepError, OptionError
from everstep.events.stream import Listener

_UNITS_BYTES = {
    **{unit: 1000**power for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
}
_INTERVALS = 'steps as an int (every=100), time as "30s", "10min", "2h", or "auto"'


DEFAULT_EVERY = "default"
"""Interval that depends on the method: "auto" if it is chosen automatically."""


@checked
@dataclass(frozen=True, slots=True)
class Every:
    """Interval between bases: in steps, in seconds, chosen automatically, or on demand only.

    Attributes:
        steps, seconds: interval between two bases.
        auto: choose the interval that wastes the least time, from costs measured while training
            runs.
        mtbf_s: for ``auto``: mean training time between two failures, in seconds. None: estimated
            from the failures of the run, and from the time that it has trained without one.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is not None) + (self.seconds is not None) + bool(self.auto) > 1:
            raise OptionError("Every: steps, seconds and auto exclude each other")
        if self.steps is not None and (not is_int(self.steps) or self.steps < 1):
            raise OptionError(f"every={self.steps!r}: the interval must be at least one step")
        if self.seconds is not None and not (is_number(self.seconds) and 0 < self.seconds < 1e12):
            raise OptionError(
                f"Every.seconds must be more than 0, and less than 1e12, not {self.seconds!r}"
            )
        if self.mtbf_s is not None and not (
            self.auto and is_number(self.mtbf_s) and 0 < self.mtbf_s < 1e12
        ):
            raise OptionError(
                f"Every.mtbf_s must be seconds, and is for auto=True only, not {self.mtbf_s!r}"
            )

    @property
    def in_words(self) -> str:
        """The interval as text, e.g. ``"every 10 steps"``."""
        if self.steps is not None:
            return "every step" if self.steps == 1 else f"every {self.steps} steps"
        if self.seconds is not None:
            return f"every {self.seconds:g} s"
        return "every=auto" if self.auto else "on save() only"

    @classmethod
    def parse(cls, value: int | str | Every | None) -> Every:
        """Parse ``100``, ``"10min"``, ``"auto"`` or None (bases on :meth:`Checkpointer.save` only).

        Raises:
            OptionError: for any other value.
        """
        if value is None or isinstance(value, Every):
            return value or cls()
        number = plain(value)
        if is_int(number):
            return cls(steps=number)
        if isinstance(value, str):
            if value.strip() == "auto":
                return cls(auto=True)
            if seconds := amount_of(value, UNITS_S):
                return cls(seconds=seconds)
        raise OptionError(f"every={value!r} is not an interval", hint=_INTERVALS)

    def due(self, step: int, since_last_s: float) -> bool:
        """Return True if a base is due at the end of ``step``. Not used with ``auto``."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class History:
    """Log history to keep in addition to the segments that the kept bases need.

    Attributes:
        age_s: keep segments up to this age, in seconds; infinite: keep all.
        size_bytes: keep the newest segments up to this total size.
    """

    age_s: float = 0.0
    size_bytes: int = 0

    @property
    def is_more(self) -> bool:
        """True if segments are kept that no kept base needs."""
        return self.age_s > 0 or self.size_bytes > 0

    @property
    def is_by_age(self) -> bool:
        """True if the age of a segment decides."""
        return 0 < self.age_s < math.inf

    @classmethod
    def parse(cls, text: str) -> History:
        """Parse ``"last"``, ``"all"``, a time such as ``"2h"`` or a size such as ``"50GB"``.

        Raises:
            OptionError: for any other text.
        """
        if text in ("last", "all"):
            return cls(age_s=math.inf if text == "all" else 0.0)
        if age_s := amount_of(text, UNITS_S):
            return cls(age_s=age_s)
        if size_bytes := amount_of(text, _UNITS_BYTES):
            return cls(size_bytes=round(size_bytes))
        raise OptionError(
            f"history={text!r} is not a log history",
            hint='"last", "all", a time as "30min", "2h", "7d", or a size as "50GB", "20GiB"',
        )


def bytes_hint(value: object) -> str | None:
    """Suggest the number of bytes for a size given as text, if it is one."""
    size_bytes = amount_of(value, _UNITS_BYTES)
    return None if size_bytes is None else f"did you mean {round(size_bytes)}?"


FailurePolicy = Literal["raise", "warn"] | Callable[[EverstepError], None]
EventListeners = Listener | Sequence[Listener] | None

ANNOUNCING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that may announce that a job will be killed."""

_TIMEOUT_S_MAX = 365 * 86400.0
_GRACE_S_MAX = 86400.0
_RATIO = 0.01
_BATCH_STEPS = 10
_BATCH_STEPS_MAX = 100_000


@checked
@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds on memory and disk (I10). None: the default, which is printed at start.

    ``device_bytes`` is memory that is taken, not a bound on what is needed: see there.

    Attributes:
        host_bytes: host memory for captured state, plain data included. Default: half of the
            available memory, at most the size of two bases (at least 64 MiB). A given budget is
            used for as many bases as fit.
        disk_bytes: disk space of the run folder; with several ranks, of the files of each rank.
            Default: the free space (``every="auto"`` with a log on disk plans for half of it). A
            log on disk gets the space that bases leave: when it is used up a base is taken early,
            and records without space wait for it or are reported as a gap. Files from earlier
            timelines are deleted after the first base.
        write_bytes_per_day: bytes that bases and a log on disk write in a day. Default: unlimited.
            A log that would exceed it stays in memory, and ``every="auto"`` takes bases less often.
            Bases at a fixed interval, and bases without which a log in memory would lose steps, are
            taken anyway, with a warning. Each training process counts from zero.
        device_bytes: memory on each CUDA device of this process that takes a copy of captured
            state, so that updates wait for a copy within the device and not for the link. If the
            state is larger, updates wait for the rest. ``"auto"``: what a capture needs, or what is
            free at the first one, less a tenth of the device's memory: later steps may need it.
            0: none.
        overhead: share of the training time that bases may take while nothing fails, like 0.01.
            Only for ``every="auto"``, which takes bases less often if they would take more, and
            for ``method="auto"``, which uses no log that would take more. Default: unlimited.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    write_bytes_per_day: int | None = None
    device_bytes: int | str = 0
    overhead: float | None = None

    def __post_init__(self) -> None:
        stage: object = self.device_bytes
        if stage != "auto" and (not is_int(stage) or not isinstance(stage, int) or stage < 0):
            raise OptionError(
                f'Budget.device_bytes must be a number of bytes, or "auto", not {stage!r}',
                hint=bytes_hint(stage),
            )
        for name in ("host_bytes", "disk_bytes", "write_bytes_per_day"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value <= 0):
                raise OptionError(
                    f"Budget.{name} must be a positive number of bytes, not {value!r}",
                    hint=bytes_hint(value),
                )
        share = self.overhead
        if share is not None and not (is_number(share) and 0 < share < 1):
            raise OptionError(
                f"Budget.overhead must be a share of the time, more than 0 and less than 1, "
                f"not {share!r}",
                hint="0.01 is one percent",
            )


@checked
@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """Options of the keeper, the process that makes captured bases durable.

    Attributes:
        process: True: a separate process, which survives the training process. False: a thread
            of the training process, which shares its interpreter lock and dies with it.
        cores: processor cores that the keeper process may use; None: those of the trainer.
        threads: number of threads that write files.
        linger_s: seconds after which a keeper without a trainer exits.
    """

    process: bool = True
    cores: tuple[int, ...] | None = None
    threads: int = 6
    linger_s: float = 600.0

    def __post_init__(self) -> None:
        if isinstance(self.cores, (set, frozenset)):  # the type of os.sched_getaffinity()
            object.__setattr__(self, "cores", plain(sorted(self.cores)))
        if not is_int(self.threads) or not 1 <= self.threads <= 64:
            raise OptionError(f"KeeperOptions.threads must be 1 to 64, not {self.threads!r}")
        if not is_number(self.linger_s) or not 0 <= self.linger_s <= _TIMEOUT_S_MAX:
            raise OptionError(
                f"KeeperOptions.linger_s must be seconds, at most a year, not {self.linger_s!r}"
            )
        if self.cores is not None and (
            not self.cores or not all(is_int(core) and core >= 0 for core in self.cores)
        ):
            raise OptionError(
                f"KeeperOptions.cores must be a list of core numbers, not {self.cores!r}"
            )
        if self.cores is not None and self.process is False:
            raise OptionError(
                f"KeeperOptions.cores={self.cores!r} needs a keeper process: a keeper thread "
                "(process=False) runs on the cores of the training process",
                hint="omit cores=, or use process=True",
            )


@checked
@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of the gradient log: where it is kept and how it is written.

    Attributes:
        to: ``"memory"``: in the memory of the keeper until a newer base is durable; a killed
            training process resumes at its last step. ``"disk"``: also in segments on disk, so that
            the log survives the machine and the keeper and every logged step can be restored. A
            dense log writes the size of all gradients at each step: mind the endurance of the
            disk.
        batch_steps: steps in one segment; fewer if they fill a quarter of the log's memory.
            ``"auto"``: as few as the disk sustains, from measurements; 10 until there are any.
            None: 10, but at most ``lag_steps + 1``; or ``"auto"`` with ``every="auto"``.
        history: steps that can be restored. ``"last"``: steps after the oldest kept base.
            ``"all"``, a time such as ``"2h"`` or a log size such as ``"50GB"``: older steps, too;
            the bases that they are replayed from are then kept beyond ``keep``. Times count
            training time, without pauses between processes. Steps may be kept about twice as
            long, never shorter.
        watch: check recorded gradients for NaN and infinity, off the training thread, and report
            them as :class:`~everstep.errors.NonFiniteError`. With several ranks all ranks report
            what one has found, at the end of the step.
        lag_steps: number of steps that may be missing in the log on disk; training waits for it.
            0: each step is on disk before the next begins, so that a lost machine costs at most
            the current step. Where a log begins (first step of a run, or after a change that it
            cannot replay) training also waits for a complete base. None: training does not wait;
            the steps in memory survive everything but the death of the keeper.
        in_flight_steps: number of steps whose records may still be on their way to the keeper when
            training goes on; a killed training process loses as many more. 0: the keeper has each
            step before the next begins. On a device with a stage (``Budget(device_bytes=)``), 1
            lets gradients be copied to host memory during the next forward and backward. For bases
            of one step that are captured by training, without ``lag_steps``.
        audit: the keeper compares each new base, bit for bit, with the base before it plus the log
            (I9), in a low-priority process that uses a twentieth of a core on average. Needs a log
            on disk, a keeper process and two kept bases. None: on if these are given.
        ratio: for ``log="adaptive"``: fraction of the elements of a large gradient that is kept.
    """

    to: str = "memory"
    batch_steps: int | str | None = None
    history: str = "last"
    watch: bool = False
    lag_steps: int | None = None
    in_flight_steps: int = 0
    audit: bool | None = None
    ratio: float = _RATIO

    def __post_init__(self) -> None:
        one_of("place for the log", self.to, ("memory", "disk"))
        if History.parse(self.history).is_more and self.to != "disk":
            raise OptionError(
                f"LogOptions.history={self.history!r} needs a log on disk; a log in memory reaches "
                "back to the newest base only",
                hint=f'LogOptions(to="disk", history={self.history!r})',
            )
        steps = self.batch_steps
        number = steps if isinstance(steps, int) and is_int(steps) else 0
        if steps not in (None, "auto") and not 1 <= number <= _BATCH_STEPS_MAX:
            raise OptionError(
                f'LogOptions.batch_steps must be 1 to {_BATCH_STEPS_MAX}, or "auto", not {steps!r}'
            )
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise OptionError(f"LogOptions.ratio must be in (0, 1], not {self.ratio!r}")
        self._check_lag()

    def _check_lag(self) -> None:
        if not is_int(self.in_flight_steps) or self.in_flight_steps < 0:
            raise OptionError(
                f"LogOptions.in_flight_steps={self.in_flight_steps!r}: must be a number of "
                "steps, at least 0"
            )
        if self.in_flight_steps and self.lag_steps is not None:
            raise OptionError(
                f"LogOptions.in_flight_steps={self.in_flight_steps} and lag_steps= exclude each "
                "other: the disk has a step only after the keeper",
                hint="omit one of them",
            )
        if self.lag_steps is not None:
            if not is_int(self.lag_steps) or self.lag_steps < 0 or self.to != "disk":
                raise OptionError(
                    f"LogOptions.lag_steps={self.lag_steps!r}: must be at least 0, with to='disk'"
                )
            if self.batch_first > self.lag_steps + 1:
                raise OptionError(
                    f"a log that may lag by {self.lag_steps} step(s) cannot be written "
                    f"{self.batch_first} steps at a time",
                    hint=f'LogOptions(batch_steps={self.lag_steps + 1}), or "auto"',
                )

    @property
    def batch_first(self) -> int:
        """Steps of the first segment; of every segment unless chosen while training runs."""
        if isinstance(self.batch_steps, int):
            return self.batch_steps
        return _BATCH_STEPS if self.lag_steps is None else min(_BATCH_STEPS, self.lag_steps + 1)

    @property
    def on_disk(self) -> bool:
        """True if the log is written to disk."""
        return self.to == "disk"


@checked
@dataclass(frozen=True, slots=True)
class Preemption:
    """Signals that announce that a job will be killed, and the time it has left.

    Attributes:
        signals: names of the signals.
        grace_s: seconds from the signal to the kill; the current step and the last base have to
            fit. Kubernetes, torchrun and SLURM allow 30 seconds by default.
        agree_steps: with several ranks: number of steps between two checks whether any rank has
            received a signal, each an all-reduce of one number.
    """

    signals: tuple[str, ...] = ("SIGTERM",)
    grace_s: float = 25.0
    agree_steps: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.signals, tuple):  # accept signal.SIGTERM as well
            names = [one.name if isinstance(one, Signals) else one for one in self.signals]
            object.__setattr__(self, "signals", tuple(names))
        if not isinstance(self.signals, tuple) or not self.signals:
            one = isinstance(self.signals, str) and self.signals
            raise OptionError(
                f"Preemption.signals must be a list of names of signals, not {self.signals!r}",
                hint=f"signals=({one!r},)" if one else 'for example signals=["SIGTERM"]',
            )
        for name in self.signals:
            if name in ("SIGKILL", "SIGSTOP"):
                raise OptionError(
                    f"Preemption.signals: {name!r} cannot be caught by a process",
                    hint="name the signal that is sent before it, usually SIGTERM",
                )
            if name not in ANNOUNCING:
                raise OptionError(
                    f"Preemption.signals: {name!r} does not announce the end of a job; these may: "
                    f"{', '.join(ANNOUNCING)}",
                    hint=did_you_mean(str(name).upper(), ANNOUNCING),
                )
        if not is_number(self.grace_s) or not 0 < self.grace_s <= _GRACE_S_MAX:
            raise OptionError(
                f"Preemption.grace_s must be seconds, more than 0 and at most a day, not "
                f"{self.grace_s!r}"
            )
        steps = self.agree_steps
        if not is_int(steps) or steps < 1:
            raise OptionError(f"Preemption.agree_steps must be a number from 1, not {steps!r}")

    @classmethod
    def parse(cls, value: bool | Preemption) -> Preemption | None:
        """Parse ``True``, ``False`` or a :class:`Preemption`; return None for no signals.

        Raises:
            OptionError: for any other value.
        """
        if isinstance(value, bool):
            return cls() if value else None
        if not isinstance(value, cls):
            raise OptionError(f"preempt must be True, False or a Preemption, not {value!r}")
        return value


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expectations of ``method="auto"`` for one start; None before anything was measured.

    Attributes:
        wasted: share of the time that the chosen method wastes, failures included.
        interval_steps: best number of steps between two bases.
        base_cost_s: seconds of training that a base costs, as earlier starts have measured.
        base_write_s: seconds until a base is on disk, as they have measured.
        why_not_logged: why updates of this run cannot be logged, as an earlier start has found;
            empty if none has.
    """

    wasted: float | None = None
    interval_steps: int | None = None
    base_cost_s: float | None = None
    base_write_s: float | None = None
    why_not_logged: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """Validated options of a :class:`Checkpointer`."""

    method: Method
    method_name: str
    every: Every
    keep: KeepRules
    budget: Budget
    on_failure: FailurePolicy
    progress_timeout_s: float = 120.0
    keeper: KeeperOptions = field(default_factory=KeeperOptions)
    log: LogOptions = field(default_factory=LogOptions)
    promise: Promise | None = None
    on_event: tuple[Listener, ...] = ()
    auto: Prediction | None = None

    @property
    def has_replica(self) -> bool:
        """True if the keeper applies the log to a replica of the state."""
        return self.method.apply == "replica"

    @property
    def is_multistep(self) -> bool:
        """True if bases are captured over several steps."""
        return self.method.base == "multistep"

    @property
    def leaves_bases_fuzzy(self) -> bool:
        """True if multi-step bases are brought to one step only when they are restored."""
        return self.is_multistep and self.method.rebuild == "recovery"

    @property
    def is_scheduled(self) -> bool:
        """True if every step is captured, by a plan."""
        return self.method.base == "scheduled"

    def stays_in_memory(self, step: int) -> bool:
        """Return True if the base due at ``step`` is kept in memory only."""
        every = self.every.steps
        return (
            self.method.in_memory
            and every is not None
            and step // every % self.method.disk_every != 0
        )

    @property
    def logs(self) -> bool:
        """True if there is a gradient log."""
        return self.method.log != "none"

    @property
    def log_on_disk(self) -> bool:
        """True if there is a gradient log and it is written to disk."""
        return self.logs and self.log.on_disk

    @property
    def batch_auto(self) -> bool:
        """True if the number of steps in a segment is chosen while training runs."""
        steps = self.log.batch_steps
        return steps == "auto" or (steps is None and self.every.auto)

    @property
    def audits(self) -> bool:
        """True if the keeper audits bases in the background."""
        return self.log.audit is not False and self.logs and self._no_audit is None

    @property
    def _no_audit(self) -> str | None:
        """Reason why bases cannot be audited in the background, or None if they can."""
        if not self.log.on_disk:
            return "the log is in memory only"
        if self.method.log == "adaptive":
            return "replay of a lossy log does not give the same base"
        if not self.keeper.process:
            return "the keeper is a thread of the training process"
        return "no base before the newest one is kept" if self.keep.newest < 2 else None

    def __post_init__(self) -> None:
        if self.log.ratio != _RATIO and self.method.log != "adaptive":
            raise OptionError(
                f"LogOptions.ratio needs log='adaptive', not log={self.method.log!r}",
                hint="Method(base='lazy', log='adaptive')",
            )
        if self.promise is not None and self.promise.holder == "keeper" and not self.keeper.process:
            raise OptionError(
                f"it cannot be promised that {self.promise.in_words}: KeeperOptions(process=False) "
                "is a thread of the training process, which dies with it",
                hint="omit process=False",
            )
        if self.log.in_flight_steps and (self.is_multistep or self.method.apply == "replica"):
            raise OptionError(
                f"LogOptions.in_flight_steps={self.log.in_flight_steps} is not possible with "
                f"method={self.method_name!r}, whose bases are made of the records of each step",
                hint='method="logged"',
            )
        if self.method.in_memory and (self.every.auto or self.every.seconds is not None):
            raise OptionError(
                f"method={self.method_name!r} writes every {self.method.disk_every}th base to "
                "disk: every= must be a number of steps",
                hint="every=10 (steps)",
            )
        self._check_budget()
        if self.log.audit and (why := self._no_audit):
            raise OptionError(
                f"LogOptions(audit=True) is not possible: {why}",
                hint="everstep verify --replay makes the same comparison from the files on disk",
            )

    def _check_budget(self) -> None:
        if self.budget.overhead is not None and not self.every.auto:
            raise OptionError(
                f"Budget(overhead=) needs every='auto': bases {self.every.in_words} are taken "
                "whatever they cost",
                hint='every="auto"',
            )
        if self.budget.disk_bytes is not None and History.parse(self.log.history).is_more:
            raise OptionError(
                f"Budget(disk_bytes=) cannot be guaranteed with history={self.log.history!r}: the "
                "bases that its steps are replayed from are kept beyond keep=, without a limit",
                hint='history="last" with a larger keep=; or no disk_bytes=',
            )
        if self.budget.disk_bytes is not None and self.keep.every_steps:
            raise OptionError(
                "Budget(disk_bytes=) cannot be guaranteed with KeepEvery, which keeps bases for "
                "ever, without a limit",
                hint="KeepBest, or a larger KeepNewest; or no disk_bytes=",
            )


_PRESET_LOGS: Mapping[str, LogOptions] = {
    "lowdiff": LogOptions(to="disk", batch_steps=1, lag_steps=1)
}
"""Logs of presets that differ from the default.

LowDiff persists its differentials (section V). A step is written during the next one; training
waits only if that takes longer.
"""

DISABLE_VARIABLE = "EVERSTEP_DISABLE"
"""Variable of the environment with which a program runs without checkpoints."""

_ANSWERS: Mapping[str, bool] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}


def is_disabled() -> bool:
    """Return True if the environment disables checkpointing.

    Raises:
        OptionError: the variable has a value that means neither yes nor no.
    """
    value = os.environ.get(DISABLE_VARIABLE, "")
    if (answer := _ANSWERS.get(value.strip().lower())) is None:
        raise OptionError(
            f"{DISABLE_VARIABLE}={value!r} in the environment means neither yes nor no",
            hint="1 disables checkpointing; with 0, or if it is unset, nothing is disabled",
        )
    return answer


def validate_options(
    *,
    method: str | Method,
    every: int | str | Every | None,
    keep: int | KeepPolicy | Sequence[KeepPolicy],
    budget: Budget | None,
    on_failure: FailurePolicy,
    progress_timeout_s: float,
    keeper: KeeperOptions | None = None,
    log: LogOptions | None = None,
) -> Options:
    """Validate constructor arguments and return them as :class:`Options`.

    Raises:
        OptionError: names the argument and, for names, the closest known one.
    """
    if isinstance(method, str):
        one_of("method", method, presets)
        name = method
        method = presets[method]
    elif isinstance(method, Method):
        name = next((key for key, value in presets.items() if value == method), "custom")
    else:
        raise OptionError(f"method must be a preset's name or a Method, not {method!r}")
    if not callable(on_failure):
        one_of("on_failure", on_failure, ("raise", "warn"), beside="; or a function of the error")
    parts = (
        ("budget", budget, Budget),
        ("keeper", keeper, KeeperOptions),
        ("log", log, LogOptions),
    )
    for what, given, kind in parts:
        if not isinstance(given, (kind, type(None))):
            raise OptionError(f"{what} must be an everstep.{kind.__name__}, not {given!r}")
    if log is not None and method.log == "none":
        shown = "a Method with log='none'" if name == "custom" else f"method={name!r}"
        raise OptionError(
            f"log= needs a method with a gradient log, and {shown} has none",
            hint="method='logged' has one; or omit log=",
        )
    if not is_number(progress_timeout_s) or not 0 < progress_timeout_s <= _TIMEOUT_S_MAX:
        raise OptionError(
            f"progress_timeout_s={progress_timeout_s!r} must be a number of seconds, more than 0 "
            "and at most a year"
        )
    return Options(
        method,
        name,
        Every.parse(every),
        parse_keep(keep),
        budget or Budget(),
        on_failure,
        progress_timeout_s,
        keeper or KeeperOptions(),
        log or _PRESET_LOGS.get(name, LogOptions()),
    )
