"""What a user can choose, validated once: the axes, presets, policies and budgets.

A :class:`Method` is a point on four independent axes (base capture, log, apply, tiers);
a preset is a name for such a point.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

from everstep.errors import EverstepError, OptionError

__all__ = [
    "Budget",
    "Every",
    "FailurePolicy",
    "KeeperOptions",
    "LogOptions",
    "Method",
    "Options",
    "nearest",
    "presets",
    "refuse_unknown",
    "validate_options",
]

FailurePolicy = Literal["raise", "warn"] | Callable[[EverstepError], None]

_UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_WORDS = {
    **{unit: unit for unit in _UNITS_S},
    "secs": "s",
    "second": "s",
    "seconds": "s",
    "mins": "min",
    "minute": "min",
    "minutes": "min",
    "hr": "h",
    "hrs": "h",
    "hour": "h",
    "hours": "h",
    "day": "d",
    "days": "d",
}
_TIMEOUT_S_MAX = 365 * 86400.0
_PARTS_MAX = 24
_BASES = ("sync", "async", "lazy", "checkfreq", "multistep", "scheduled")
_T = TypeVar("_T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was probably meant to be."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def refuse_unknown(who: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses an argument that ``who`` does not have, before Python does in words of its own.

    Raises:
        OptionError: with the nearest known one.
    """
    names = list(known)
    for name in given:
        if name not in names:
            guess = nearest(name, names)
            raise OptionError(
                f"{who} has no option {name!r}; there are: {', '.join(names)}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )


def _one_of(what: str, value: object, known: Iterable[str]) -> None:
    names = list(known)
    if isinstance(value, str) and value in names:
        return
    guess = nearest(value, names) if isinstance(value, str) else None
    raise OptionError(
        f"no {what} {value!r}; there are: {', '.join(names)}",
        hint=f"did you mean {guess!r}?" if guess else None,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Method:
    """How state leaves the training process.

    Attributes:
        base: base capture. ``"sync"``: training waits until the base is durable.
            ``"async"``: training waits for a copy in host memory, which is persisted behind it.
            ``"lazy"``: the copy runs behind the next forward and backward, and the next update
            waits for it; it is persisted as it arrives (DataStates-LLM section V).
            ``"checkfreq"``: the copy as in ``"lazy"``, persisted only once it is whole, one
            base at a time (CheckFreq, as the papers describe it).
            ``"multistep"``: the copy runs behind several steps, a part of the state in each, with
            the gradients that bring each part to the last of them (GoCkpt section 4).
            ``"scheduled"``: at every step, behind the next one, in an order and at places that are
            planned from how steps go (Checkflow section III); those that are due are persisted, of
            the others the keeper holds the newest whole one in memory.
        log: the gradient log. ``"none"``: a run goes back to its last base. ``"dense"``: what
            each optimizer update consumed is recorded, so that every step can be recovered.
            ``"topk"``: the same of compressed training (LowDiff section V): every optimizer has
            an :class:`everstep.compress.Compressor` in the state, whose forms are recorded.
        apply: when logged gradients are applied. ``"recovery"``: when a run is resumed.
            ``"replica"``: each step, as soon as it is whole, to a copy of the state in the memory
            of the keeper process, which then persists its bases from there (LowDiff+, section VI).
        tiers: where bytes live; ``("disk",)``.
        parts: of ``base="multistep"``: into how many the state is cut, each of which takes a step;
            ``"auto"``: as many as hold training up least, by what is measured.
        overlap_forward: of ``base="multistep"``: the copies of gradients run on behind the update
            and the next forward (GoCkpt-O); False: the update waits for them (GoCkpt).
    """

    base: str = "lazy"
    log: str = "none"
    apply: str = "recovery"
    tiers: tuple[str, ...] = ("disk",)
    parts: int | str = "auto"
    overlap_forward: bool = False

    def __post_init__(self) -> None:
        _one_of("base", self.base, _BASES)
        _one_of("log", self.log, ("none", "dense", "topk"))
        _one_of("apply", self.apply, ("recovery", "replica"))
        for tier in self.tiers:
            _one_of("tier", tier, ("disk",))
        if self.log != "none" and self.base == "sync":
            raise OptionError(
                f"log={self.log!r} needs host memory, which base='sync' has none of",
                hint="base='lazy'",
            )
        if self.apply == "replica" and self.log == "none":
            raise OptionError(
                "apply='replica' needs a log to apply", hint="log='dense', or log='topk'"
            )
        if self.base == "scheduled" and self.log != "none":
            raise OptionError(
                f"base='scheduled' captures every step: there is nothing left for log={self.log!r}",
                hint="base='lazy' with the log, or log='none'",
            )
        self._check_multistep()
        if self.tiers != ("disk",):
            raise OptionError(f"tiers must be ('disk',) in this version, not {self.tiers!r}")

    def _check_multistep(self) -> None:
        parts = self.parts
        if parts != "auto" and (not _is_int(parts) or not 1 <= int(parts) <= _PARTS_MAX):
            raise OptionError(
                f'Method.parts must be "auto" or 1 to {_PARTS_MAX}, not {parts!r}',
                hint='parts="auto" takes as many as hold training up least',
            )
        if not isinstance(self.overlap_forward, bool):
            raise OptionError(
                f"Method.overlap_forward must be True or False, not {self.overlap_forward!r}"
            )
        if self.base != "multistep":
            if parts != "auto" or self.overlap_forward:
                raise OptionError(
                    f"parts and overlap_forward are of base='multistep', not of {self.base!r}",
                    hint="base='multistep'",
                )
            return
        if self.log != "none":
            raise OptionError(
                f"base='multistep' and log={self.log!r} exclude each other in this version: a log "
                "has all gradients already",
                hint="base='lazy' with the log, or log='none'",
            )


presets: Mapping[str, Method] = MappingProxyType(
    {
        "sync": Method(base="sync"),
        "async": Method(base="async"),
        "lazy": Method(base="lazy"),
        "datastates": Method(base="lazy"),
        "checkfreq": Method(base="checkfreq"),
        "logged": Method(base="lazy", log="dense"),
        "lowdiff": Method(base="lazy", log="topk"),
        "lowdiff_plus": Method(base="lazy", log="dense", apply="replica"),
        "gockpt": Method(base="multistep"),
        "gockpt_o": Method(base="multistep", overlap_forward=True),
        "checkflow": Method(base="scheduled"),
    }
)
"""Named methods: what ``method="name"`` stands for."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper bounds that are kept (I10); None means the default, which is printed at start.

    Attributes:
        host_bytes: host memory for captured state (default: half of what is available).
        disk_bytes: disk for the run folder (default: what is free).
        write_bytes_per_day: what bases and a log on disk write in a day (default: unlimited). A
            log that would exceed it stays in memory; ``every="auto"`` stretches the interval
            between bases. Counted anew by each training process.
    """

    host_bytes: int | None = None
    disk_bytes: int | None = None
    write_bytes_per_day: int | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "write_bytes_per_day"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value <= 0):
                raise OptionError(
                    f"Budget.{name} must be a positive number of bytes, not {value!r}"
                )


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """The process beside the trainer that makes captured bases durable.

    Attributes:
        process: a process of its own, which survives the trainer; False: a thread of the
            trainer, which shares its interpreter lock and its fate.
        cores: processor cores it may use; None: those that the trainer may use.
        threads: threads that write.
        linger_s: it ends by itself after so long without a trainer.
    """

    process: bool = True
    cores: tuple[int, ...] | None = None
    threads: int = 2
    linger_s: float = 600.0

    def __post_init__(self) -> None:
        if not _is_int(self.threads) or not 1 <= self.threads <= 64:
            raise OptionError(f"KeeperOptions.threads must be 1 to 64, not {self.threads!r}")
        if not isinstance(self.linger_s, (int, float)) or not 0 <= self.linger_s <= _TIMEOUT_S_MAX:
            raise OptionError(
                f"KeeperOptions.linger_s must be seconds, at most a year, not {self.linger_s!r}"
            )
        if self.cores is not None and (
            not self.cores or not all(_is_int(core) and core >= 0 for core in self.cores)
        ):
            raise OptionError(f"KeeperOptions.cores must be core numbers, not {self.cores!r}")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Where the gradient log is kept, and how it is written.

    Attributes:
        to: ``"memory"``: of the keeper, until a newer base is durable; a killed training process
            comes back to its last step. ``"disk"``: in segments, too, so that a lost machine or
            keeper does not lose it, and every step that was logged can be gone back to. A dense
            log writes as much each step as there are gradients: mind what the disk endures.
        batch_steps: steps of one segment.
        history: which segments stay: ``"last"``: those behind the oldest base that is kept.
            ``"all"``: for reading. A step is restored from a base before it: mind ``keep``.
        watch: look for NaN and infinity in the gradients that are recorded, behind training; found
            ones are reported as :class:`~everstep.errors.NonFiniteError`.
        lag_steps: how many steps the log on disk may be behind: training waits for it. 0: each
            step is on disk before the next begins, so that a lost machine costs no more than
            the step in flight. None: it does not wait; what is in memory survives anything but
            the keeper's death.
        audit: the keeper compares each new base, bit for bit, with what the base before it and
            the log give (I9), in a process that yields to everything else and takes a twentieth
            of a core on average. It needs the log on disk, a keeper that is a process, and two
            bases. None: where it has these.
    """

    to: str = "memory"
    batch_steps: int = 10
    history: str = "last"
    watch: bool = False
    lag_steps: int | None = None
    audit: bool | None = None

    def __post_init__(self) -> None:
        _one_of("place for the log", self.to, ("memory", "disk"))
        _one_of("history", self.history, ("last", "all"))
        if not _is_int(self.batch_steps) or not 1 <= self.batch_steps <= 100_000:
            raise OptionError(
                f"LogOptions.batch_steps must be 1 to 100000, not {self.batch_steps!r}"
            )
        if self.audit not in (None, True, False):
            raise OptionError(f"LogOptions.audit must be True, False or None, not {self.audit!r}")
        if self.lag_steps is not None:
            if not _is_int(self.lag_steps) or self.lag_steps < 0 or self.to != "disk":
                raise OptionError(
                    f"LogOptions.lag_steps={self.lag_steps!r} is for a log to disk, and from 0"
                )
            if self.batch_steps > self.lag_steps + 1:
                raise OptionError(
                    f"a log that may be {self.lag_steps} step(s) behind cannot be written "
                    f"{self.batch_steps} steps at a time",
                    hint=f"LogOptions(batch_steps={self.lag_steps + 1})",
                )

    @property
    def on_disk(self) -> bool:
        """Whether it is written to disk."""
        return self.to == "disk"


@dataclass(frozen=True, slots=True)
class Every:
    """When a base is taken: every so many steps or seconds, as measured costs say, or only on
    demand.

    Attributes:
        steps, seconds: from base to base.
        auto: as often as wastes the least time, re-estimated while training goes on.
        mtbf_s: for ``auto``: seconds of training between two failures. None: one in a day, until
            those of the run say otherwise.
    """

    steps: int | None = None
    seconds: float | None = None
    auto: bool = False
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is not None) + (self.seconds is not None) + self.auto > 1:
            raise OptionError("Every: steps, seconds and auto exclude each other")
        if self.steps is not None and (not _is_int(self.steps) or self.steps < 1):
            raise OptionError(f"every={self.steps!r}: bases are at least one step apart")
        if self.seconds is not None and not 0 < self.seconds < 1e12:
            raise OptionError(f"Every.seconds must be more than 0, not {self.seconds!r}")
        if self.mtbf_s is not None and (
            not self.auto or not isinstance(self.mtbf_s, (int, float)) or not 0 < self.mtbf_s < 1e12
        ):
            raise OptionError(
                f"Every.mtbf_s must be seconds, and is for auto=True only, not {self.mtbf_s!r}"
            )

    @classmethod
    def parse(cls, value: int | str | Every | None) -> Every:
        """Reads ``100``, ``"10min"``, ``"auto"`` or None (only :meth:`Checkpointer.save` takes
        bases).

        Raises:
            OptionError: for anything else.
        """
        if value is None or isinstance(value, Every):
            return value or cls()
        if _is_int(value) and not isinstance(value, str):
            return cls(steps=value)
        if isinstance(value, str):
            if value.strip() == "auto":
                return cls(auto=True)
            match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", value)
            if match and match[2] in _UNITS_S and float(match[1]) > 0:
                return cls(seconds=float(match[1]) * _UNITS_S[match[2]])
        raise OptionError(f"every={value!r} is not an interval", hint=_interval_hint(value))

    def due(self, step: int, since_last_s: float) -> bool:
        """Whether a base is due at the end of ``step``; not for ``auto``."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and since_last_s >= self.seconds


def _interval_hint(value: object) -> str:
    """What was probably meant by what is no interval, and what would be one."""
    known = 'steps as an int (every=100), time as "30s", "10min", "2h", or "auto"'
    if not isinstance(value, str):
        return known
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)?\s*([A-Za-z]+)\.?\s*", value)
    if match is None:
        return known
    words = ["auto"] if match[1] is None else list(_UNIT_WORDS)
    found = difflib.get_close_matches(match[2].lower(), words, n=1, cutoff=0.75)
    if not found:
        return known
    guess = "auto" if match[1] is None else match[1] + _UNIT_WORDS[found[0]]
    return f'did you mean "{guess}"? {known}'


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
    def is_scheduled(self) -> bool:
        """Whether every step is captured, by a plan."""
        return self.method.base == "scheduled"

    @property
    def logs(self) -> bool:
        """Whether there is a gradient log."""
        return self.method.log != "none"

    @property
    def log_on_disk(self) -> bool:
        """Whether there is a gradient log that is written to disk."""
        return self.logs and self.log.on_disk

    @property
    def audits(self) -> bool:
        """Whether the keeper audits bases in the background."""
        return self.log.audit is not False and self.logs and self._no_audit is None

    @property
    def _no_audit(self) -> str | None:
        """Why bases cannot be audited in the background, if they cannot."""
        if not self.log.on_disk:
            return "the log is in memory only"
        if not self.keeper.process:
            return "the keeper is a thread of the training process"
        return "no base before the newest one is kept" if self.keep < 2 else None

    def __post_init__(self) -> None:
        if self.log.audit and (why := self._no_audit):
            raise OptionError(
                f"LogOptions(audit=True) cannot be: {why}",
                hint="everstep verify --replay makes the same comparison from what is on disk",
            )


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
        _one_of("method", method, presets)
        name, method = method, presets[method]
    elif isinstance(method, Method):
        name = next((key for key, value in presets.items() if value == method), "custom")
    else:
        raise OptionError(f"method must be a preset's name or a Method, not {method!r}")
    if not _is_int(keep) or keep < 1:
        raise OptionError(f"keep={keep!r}: at least one base must be kept")
    if not callable(on_failure):
        _one_of("on_failure", on_failure, ("raise", "warn"))
    if not isinstance(budget, (Budget, type(None))):
        raise OptionError(f"budget must be an everstep.Budget, not {budget!r}")
    if not isinstance(keeper, (KeeperOptions, type(None))):
        raise OptionError(f"keeper must be everstep.KeeperOptions, not {keeper!r}")
    if not isinstance(log, (LogOptions, type(None))):
        raise OptionError(f"log must be everstep.LogOptions, not {log!r}")
    seconds = isinstance(progress_timeout_s, (int, float)) and progress_timeout_s
    if not 0 < seconds <= _TIMEOUT_S_MAX:
        raise OptionError(
            f"progress_timeout_s={progress_timeout_s!r} must be a number of seconds, at most "
            f"{_TIMEOUT_S_MAX:g}"
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
