"""What a user can choose, validated once: the method, policies and budgets.

A :class:`~everstep.config.method.Method` is a point on four independent axes (base capture, log,
apply, tiers); a preset is a name for such a point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from signal import Signals
from typing import Literal

from everstep.config.given import checked, is_int, is_number, nearest, one_of, plain
from everstep.config.intervals import Every, History, bytes_hint
from everstep.config.method import Method, presets
from everstep.errors import EverstepError, OptionError

__all__ = [
    "ANNOUNCING",
    "Budget",
    "Every",
    "FailurePolicy",
    "History",
    "KeeperOptions",
    "LogOptions",
    "Method",
    "Options",
    "Preemption",
    "presets",
    "validate_options",
]

FailurePolicy = Literal["raise", "warn"] | Callable[[EverstepError], None]

ANNOUNCING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals by which a job may be told that it is going to be killed."""

_TIMEOUT_S_MAX = 365 * 86400.0
_GRACE_S_MAX = 86400.0
_RATIO = 0.01
_BATCH_STEPS = 10
_BATCH_STEPS_MAX = 100_000


@checked
@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds (I10); None means the default, which is printed at start.

    Attributes:
        host_bytes: host memory for captured state, plain data included (default: half of what is
            available, and no more than two bases on their way to the disk, or 64 MiB of them; what
            is given here is used for as many as fit).
        disk_bytes: disk for the run folder, of several ranks for the files of each (default: what
            is free; ``every="auto"`` plans for half of it where a log goes to disk). A log on disk
            has what bases leave: with more a base is taken early, and what there is no room for
            waits for it, or is told as a gap. What was there before goes behind the first base.
        write_bytes_per_day: what bases and a log on disk write in a day (default: unlimited). A
            log that would exceed it stays in memory; ``every="auto"`` stretches the interval
            between bases. Bases at a fixed interval, and those without which a log in memory would
            lose steps, are taken all the same, and that is said. Counted anew by each training
            process.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    write_bytes_per_day: int | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "write_bytes_per_day"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value <= 0):
                raise OptionError(
                    f"Budget.{name} must be a positive number of bytes, not {value!r}",
                    hint=bytes_hint(value),
                )


@checked
@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """The process beside the trainer that makes captured bases durable.

    Attributes:
        process: a process of its own, which survives the trainer; False: a thread of the
            trainer, which shares its interpreter lock and its fate.
        cores: processor cores it may use; None: those that the trainer may use. Of a process only.
        threads: threads that write.
        linger_s: it ends by itself after so long without a trainer.
    """

    process: bool = True
    cores: tuple[int, ...] | None = None
    threads: int = 6
    linger_s: float = 600.0

    def __post_init__(self) -> None:
        if isinstance(self.cores, (set, frozenset)):  # as os.sched_getaffinity() gives
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
                f"KeeperOptions.cores={self.cores!r} are of a keeper that is a process: a thread "
                "(process=False) runs where the training process may",
                hint="leave cores= out; or process=True",
            )


@checked
@dataclass(frozen=True, slots=True)
class LogOptions:
    """Where the gradient log is kept, and how it is written.

    Attributes:
        to: ``"memory"``: of the keeper, until a newer base is durable; a killed training process
            comes back to its last step. ``"disk"``: in segments, too, so that a lost machine or
            keeper does not lose it, and every step that was logged can be gone back to. A dense
            log writes as much each step as there are gradients: mind what the disk endures.
        batch_steps: steps of one segment; fewer where they fill a quarter of the log's memory.
            ``"auto"``: as few as the disk carries with ease, by what it takes; 10 until that is
            known. None: 10, or ``"auto"`` with ``every="auto"``.
        history: which steps can be gone back to: ``"last"``: those behind the oldest base that
            is kept. ``"all"``, those of the last ``"2h"``, or of the last ``"50GB"`` of the log:
            then the bases that they are replayed from stay, too, beyond ``keep``. A time is one of
            training: no clock that jumps is asked, pauses do not count (between processes, or
            far longer than segments usually take). Steps may stay longer, about twice, but go no
            earlier.
        watch: look for NaN and infinity in the gradients that are recorded, behind training; found
            ones are reported as :class:`~everstep.errors.NonFiniteError`. Several ranks ask each
            other at the end of each step, and all report what one has seen.
        lag_steps: how many steps the log on disk may be behind: training waits for it. 0: each
            step is on disk before the next begins, so that a lost machine costs no more than
            the step in flight. Where the log begins (the first step of a run; behind a change
            that it cannot repeat) that takes a whole base, which is waited for, too. None: it
            does not wait; what is in memory survives anything but the keeper's death.
        audit: the keeper compares each new base, bit for bit, with what the base before it and
            the log give (I9), in a process that yields to everything else and takes a twentieth
            of a core on average. It needs the log on disk, a keeper that is a process, and two
            bases. None: where it has these.
        ratio: of ``log="adaptive"``: the share of a large gradient's elements that is kept.
        replay: ``"exact"``: as training computed. ``"fast"``: on a CUDA device, where triton is
            installed, by kernels that keep the state in registers, even if their last bits are
            not those of training; then :attr:`Recovery.exact` is False.
    """

    to: str = "memory"
    batch_steps: int | str | None = None
    history: str = "last"
    watch: bool = False
    lag_steps: int | None = None
    audit: bool | None = None
    ratio: float = _RATIO
    replay: str = "exact"

    def __post_init__(self) -> None:
        one_of("place for the log", self.to, ("memory", "disk"))
        one_of("way to replay", self.replay, ("exact", "fast"))
        if History.parse(self.history).is_more and self.to != "disk":
            raise OptionError(
                f"LogOptions.history={self.history!r} is of a log on disk; in memory it goes back "
                "to the newest base",
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
        if self.lag_steps is not None:
            if not is_int(self.lag_steps) or self.lag_steps < 0 or self.to != "disk":
                raise OptionError(
                    f"LogOptions.lag_steps={self.lag_steps!r} is for a log to disk, and from 0"
                )
            if self.batch_first > self.lag_steps + 1:
                raise OptionError(
                    f"a log that may be {self.lag_steps} step(s) behind cannot be written "
                    f"{self.batch_first} steps at a time",
                    hint=f'LogOptions(batch_steps={self.lag_steps + 1}), or "auto"',
                )

    @property
    def batch_first(self) -> int:
        """Steps of the first segment; of each, where that is not chosen while training runs."""
        if isinstance(self.batch_steps, int):
            return self.batch_steps
        lag_steps = self.lag_steps if self.batch_steps == "auto" else None
        return _BATCH_STEPS if lag_steps is None else min(_BATCH_STEPS, lag_steps + 1)

    @property
    def on_disk(self) -> bool:
        """Whether it is written to disk."""
        return self.to == "disk"


@checked
@dataclass(frozen=True, slots=True)
class Preemption:
    """How a job is told that it is going to be killed.

    Attributes:
        signals: names of the signals that announce it.
        grace_s: from the signal to the kill; the step under way and the last base have to fit.
            Kubernetes, torchrun and SLURM give 30 seconds if nothing else is said.
        agree_steps: of a job of several ranks: every so many steps they ask each other whether
            one of them has got a signal, which is an all-reduce of one number.
    """

    signals: tuple[str, ...] = ("SIGTERM",)
    grace_s: float = 25.0
    agree_steps: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.signals, tuple):  # signal.SIGTERM means the same
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
                    f"Preemption.signals: {name!r} cannot be caught: a process hears nothing of it",
                    hint="name the one that comes before it, SIGTERM mostly",
                )
            if name not in ANNOUNCING:
                guess = nearest(str(name).upper(), ANNOUNCING)
                raise OptionError(
                    f"Preemption.signals: {name!r} announces no end; these may: "
                    f"{', '.join(ANNOUNCING)}",
                    hint=f"did you mean {guess!r}?" if guess else None,
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
        """Reads ``True``, ``False`` or a :class:`Preemption`; None: nothing is watched.

        Raises:
            OptionError: for anything else.
        """
        if isinstance(value, bool):
            return cls() if value else None
        if not isinstance(value, cls):
            raise OptionError(f"preempt must be True, False or a Preemption, not {value!r}")
        return value


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a :class:`Checkpointer` was told, validated."""

    method: Method
    method_name: str
    every: Every
    keep: int
    budget: Budget
    on_failure: FailurePolicy
    progress_timeout_s: float = 120.0
    keeper: KeeperOptions = field(default_factory=KeeperOptions)
    log: LogOptions = field(default_factory=LogOptions)

    @property
    def has_replica(self) -> bool:
        """Whether the log is applied as it comes."""
        return self.method.apply == "replica"

    @property
    def is_multistep(self) -> bool:
        """Whether bases are captured over several steps."""
        return self.method.base == "multistep"

    @property
    def leaves_bases_fuzzy(self) -> bool:
        """Whether bases over several steps are brought to one step only when they are restored."""
        return self.is_multistep and self.method.rebuild == "recovery"

    @property
    def is_scheduled(self) -> bool:
        """Whether every step is captured, by a plan."""
        return self.method.base == "scheduled"

    def stays_in_memory(self, step: int) -> bool:
        """Whether the base that is due at ``step`` is not written to disk."""
        every = self.every.steps
        return (
            self.method.in_memory
            and every is not None
            and step // every % self.method.disk_every != 0
        )

    @property
    def logs(self) -> bool:
        """Whether there is a gradient log."""
        return self.method.log != "none"

    @property
    def log_on_disk(self) -> bool:
        """Whether there is a gradient log that is written to disk."""
        return self.logs and self.log.on_disk

    @property
    def batch_auto(self) -> bool:
        """Whether the steps of a segment on disk are chosen while training runs."""
        steps = self.log.batch_steps
        return steps == "auto" or (steps is None and self.every.auto)

    @property
    def audits(self) -> bool:
        """Whether the keeper audits bases in the background."""
        return self.log.audit is not False and self.logs and self._no_audit is None

    @property
    def _no_audit(self) -> str | None:
        """Why bases cannot be audited in the background, if they cannot."""
        if not self.log.on_disk:
            return "the log is in memory only"
        if self.method.log == "adaptive":
            return "a log of lossy gradients gives no base again"
        if not self.keeper.process:
            return "the keeper is a thread of the training process"
        return "no base before the newest one is kept" if self.keep < 2 else None

    def __post_init__(self) -> None:
        if self.log.ratio != _RATIO and self.method.log != "adaptive":
            raise OptionError(
                f"LogOptions.ratio is of log='adaptive', not of log={self.method.log!r}",
                hint="Method(base='lazy', log='adaptive')",
            )
        if self.method.in_memory and (self.every.auto or self.every.seconds is not None):
            raise OptionError(
                f"method={self.method_name!r} counts bases, of which each "
                f"{self.method.disk_every}th goes to disk: every= must be a number of steps",
                hint="every=10 (steps)",
            )
        if self.budget.disk_bytes is not None and History.parse(self.log.history).is_more:
            raise OptionError(
                f"Budget(disk_bytes=) cannot be kept with history={self.log.history!r}: bases that "
                "its steps are replayed from stay beyond keep=, and nobody knows how many",
                hint='history="last" with a larger keep=; or no disk_bytes=',
            )
        if self.log.audit and (why := self._no_audit):
            raise OptionError(
                f"LogOptions(audit=True) cannot be: {why}",
                hint="everstep verify --replay makes the same comparison from what is on disk",
            )


_KEEP_MAX = 1 << 31


def validate_options(
    *,
    method: str | Method,
    every: int | str | Every | None,
    keep: int,
    budget: Budget | None,
    on_failure: FailurePolicy,
    progress_timeout_s: float,
    keeper: KeeperOptions | None = None,
    log: LogOptions | None = None,
) -> Options:
    """Turns constructor arguments into :class:`Options`.

    Raises:
        OptionError: naming the argument and, for names, the nearest known one.
    """
    if isinstance(method, str):
        one_of("method", method, presets)
        name = method
        method = presets[method]
    elif isinstance(method, Method):
        name = next((key for key, value in presets.items() if value == method), "custom")
    else:
        raise OptionError(f"method must be a preset's name or a Method, not {method!r}")
    if not is_int(keep) or keep < 1:
        raise OptionError(f"keep must be a whole number of bases, from 1, not {keep!r}")
    if keep > _KEEP_MAX:
        raise OptionError(f"keep={keep!r}: at most {_KEEP_MAX} bases can be kept")
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
            f"log= is of methods that keep a gradient log, and {shown} keeps none",
            hint="method='logged' keeps one; or leave log= out",
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
        keep,
        budget or Budget(),
        on_failure,
        progress_timeout_s,
        keeper or KeeperOptions(),
        log or LogOptions(),
    )
