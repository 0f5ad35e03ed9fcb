# ruff: noqa: RUF009 (option() is field())
"""Options of all benches: what each verb of ``everstep bench`` takes, and what it refuses.

Their docstrings are the help of the verbs. Nothing here imports torch: ``--help`` is quick.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from everstep.config.method import HELD_STEPS_MAX
from everstep.errors import OptionError
from everstep.plan.multistep import PARTS_MAX
from everstep_bench.harness.options import (
    Options,
    option,
    parse_list,
    parse_number,
    parse_params,
    parse_share,
    parse_size,
    parse_speed,
    parse_time,
)

_MIN_PARAMS = 100_000
_MAX_PARAMS = 10_000_000_000
_SEED_MAX = 2**32 - 1
_STEPS_MAX = 1_000_000
_EVERY_MAX = 1000

IDEAL = "ideal"
"""Training that saves nothing, and that nothing happens to."""

NONE = "none"
"""The same as an arm of ``bench step``."""

COMPRESSED = "compressed"
"""Training that consumes compressed gradients, and saves nothing."""

NEIGHBOUR = "neighbour"
"""Training that saves nothing, and has another process copy and digest as much as a save does."""

WAYS = ("gockpt", "gockpt_o")
"""Bases over several steps: updates wait for copies of gradients; they do not."""

_ROUNDS = "Rounds, or saves, that count; others warm up."
_PICTURE = "Draw {} (needs matplotlib)."


def _arms(known: tuple[str, ...]) -> Any:
    words = parse_list(str)
    return option(None, "Only these, like lazy,checkfreq,torch.save.", words, choices=known)


def _params(default: str = "10M") -> Any:
    words = "Of the model, like 25M or 1G."
    return option(
        default, words, parse_params, least=_MIN_PARAMS, most=_MAX_PARAMS, hint="like 10M"
    )


def _link() -> Any:
    words = "EMULATE a link of this bandwidth, like 2GB/s, for everstep's copies."
    return option(None, words, parse_speed, flags="--link", least=1.0, hint="like 2GB/s")


def _seed(default: int = 1234) -> Any:
    words = "Of weights, data, and the order of arms."
    return option(default, words, least=0, most=_SEED_MAX)


def _folder() -> Any:
    return option(None, "Where to write [default: here]; nothing is left there.", flags="--dir")


def _free_core() -> Any:
    words = "Training on one core and everything else on the others, or all on one."
    return option(True, words, flags="--free-core/--no-free-core")


def _device() -> Any:
    return option("cpu", "cpu or cuda.", choices=("cpu", "cuda"))


def _places(text: str) -> tuple[str, ...]:
    """Return places for copies, folders with their absolute paths."""
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(w if _is_url(w) else str(Path(w).absolute()) for w in words if w))


def _is_url(place: str) -> bool:
    from everstep.tiers.options import is_url  # imports torch

    return is_url(place)


def _saves(arms: tuple[str, ...] | None, *others: str) -> None:
    if arms is not None and not set(arms) - set(others):
        raise OptionError("no arm that saves was chosen", hint="like --arms lazy,torch.save")


@dataclass(frozen=True)
class PersistOptions(Options):
    """Saves and loads one state: everstep, the raw disk, torch.save, safetensors, DCP.

    All arms take turns in rounds. Columns: GB/s, CPU seconds per GB from live tensors to
    durable, the share of what the disk gives to raw O_DIRECT transfers, and the speed next
    to torch.save with fsync. Loading is uncached, and ours verifies every byte.
    """

    size_bytes: int = option(
        "1GiB", "Of the state: parameters and moments.", parse_size,
        flags="--size", least=4 << 20, hint="at least 4MiB",
    )  # fmt: skip
    repeats: int = option(5, _ROUNDS, least=1)
    seed: int = _seed()
    folder: Path | None = _folder()


@dataclass(frozen=True)
class Training(Options):
    """Options of the benches that train one model in 32 bits."""

    params: int = _params()
    batch: int = option(4, "Sequences of a step.", least=1, most=1 << 20)
    repeats: int = option(5, _ROUNDS, least=1)
    seed: int = _seed()
    free_core: bool = _free_core()
    device: str = _device()
    folder: Path | None = _folder()

    dtype = "float32"
    layers = None

    def training(self) -> Training:
        """Return what a child process has to know of them."""
        return Training(
            self.params, self.batch, self.repeats, self.seed, self.free_core, self.device
        )


STALL_ARMS = (
    IDEAL, NEIGHBOUR, "torch.save", "dcp", "dcp-warm", "dcp-overlap", "dcp-process",
    "torchsnapshot", "torch_checkpointing", "sync", "async", "checkfreq", "lazy", *WAYS,
)  # fmt: skip
"""All arms that a plain run of ``bench stall`` has, in the order in which they are shown."""

STAGED = ("lazy-staged", "lazy-half", "gockpt_o-staged")
"""Arms of ``bench stall`` with a stage on the device, as large as the state or half of that."""

_NAMED = ("gockpt_o-held", *STAGED)  # take a device's memory


@dataclass(frozen=True)
class StallOptions(Options):
    """Trains and saves: everstep's methods, torch.save, DCP, torchsnapshot, no checkpoint.

    All arms take turns in rounds. For each save: how long the training thread is held up,
    by cause; what training loses by the clock on the wall, next to the same steps without a
    save; how long until the state is durable, and how fast the loop goes meanwhile.
    """

    params: int = _params()
    every: tuple[int, ...] = option(
        "8", "Steps of a block, each with one save: one number, or 1,10,50.",
        parse_list(parse_number), least=1,
    )  # fmt: skip
    repeats: int = option(5, _ROUNDS, least=1)
    within_s: float | None = option(
        None, "Seconds: rounds that would not be over by then are left out.",
        flags="--within", least=1e-9, hint="like 240",
    )  # fmt: skip
    seed: int = _seed()
    device: str = _device()
    dtype: str = option(
        "float32", "Of parameters, gradients and moments: float32 or bfloat16.",
        choices=("float32", "bfloat16"),
    )  # fmt: skip
    batch: int | None = option(
        None, "Sequences of a step [default: 1 on a CPU, 64 on a GPU].", least=1
    )
    layers: int | None = option(
        None, "Of the model, however wide that makes them [default: as GPT-2's].", least=1
    )
    link_bytes_per_s: float | None = _link()
    free_core: bool = _free_core()
    arms: tuple[str, ...] | None = _arms((*STALL_ARMS, *_NAMED))
    folder: Path | None = _folder()
    picture: Path | None = option(None, _PICTURE.format("a save of some arms"))

    def check(self) -> None:
        """Refuse a link beside a device's own, and arms that all save nothing."""
        if self.link_bytes_per_s is not None and self.device != "cpu":
            raise OptionError(
                "an emulated link is for machines without a device; this one has its own",
                hint="leave out --link, or --device",
            )
        if self.device == "cpu" and (staged := set(self.arms or ()) & set(STAGED)):
            raise OptionError(
                f"{min(staged)} needs a device: a stage is memory of it", hint="--device cuda"
            )
        _saves(self.arms, IDEAL, NEIGHBOUR)

    def begin(self) -> None:
        """Look whether a picture can be drawn."""
        if self.picture is not None:
            from everstep.cli.plan.schedule_output import check_picture

            check_picture(self.picture)

    def names(self) -> tuple[str, ...]:
        """Return the arms to measure, the ideal first, each once, in their order."""
        chosen = {IDEAL, *(STALL_ARMS if self.arms is None else self.arms)}
        return tuple(name for name in (*STALL_ARMS, *_NAMED) if name in chosen)


SCALE_ARMS = (IDEAL, "torch.save", "dcp-warm", "torchsnapshot", "async", "lazy")
"""All arms of ``bench scale``, in the order in which they are shown."""


@dataclass(frozen=True)
class ScaleOptions(Options):
    """Saves models of several sizes by several data-parallel ranks (DataStates-LLM, section VI).

    The ranks train with DDP on this machine and exchange gradients over gloo; all of them save
    together, and arms take turns. For each size and number of ranks: what a step takes, what a
    save takes from training, how fast it is as training sees it, and when it is durable. Ranks
    share the cores of the machine: with more ranks than cores everything slows down.
    """

    params: tuple[int, ...] = option(
        "1M,4M", "Of the models, like 1M,10M.", parse_list(parse_params),
        least=_MIN_PARAMS, most=_MAX_PARAMS, hint="like 1M,10M",
    )  # fmt: skip
    ranks: tuple[int, ...] = option(
        "1,2", "Numbers of ranks, like 1,2,4,8.", parse_list(parse_number), least=1, most=64
    )
    every: int = option(8, "Steps of a block, each with one save.", least=1, most=_EVERY_MAX)
    batch: int = option(4, "Sequences of a step, on each rank.", least=1, most=1 << 20)
    repeats: int = option(5, _ROUNDS, least=1)
    seed: int = _seed()
    arms: tuple[str, ...] | None = _arms(SCALE_ARMS)
    folder: Path | None = _folder()

    def check(self) -> None:
        """Refuse arms that all save nothing."""
        _saves(self.arms, IDEAL)

    def names(self) -> tuple[str, ...]:
        """Return the arms to measure, the ideal first."""
        chosen = {IDEAL, *(SCALE_ARMS if self.arms is None else self.arms)}
        return tuple(name for name in SCALE_ARMS if name in chosen)


ADAPTIVE = "adaptive"
"""A lossy log of dense training: eight bits an element, or the largest elements."""

IN_FLIGHT = "logged-in-flight"
"""A dense log whose last step may be on its way when training goes on."""

STEP_ARMS = (
    NONE, COMPRESSED, "torch.save", "checkfreq", "lazy", "logged", IN_FLIGHT, ADAPTIVE, "lowdiff",
    "lowdiff_plus",
)  # fmt: skip
"""All arms of ``bench step``, in the order in which they are shown."""


@dataclass(frozen=True)
class StepOptions(Training):
    """Trains so that every step can be gone back to: logs, or a base each step.

    All arms take turns in rounds, next to dense and to compressed training without a log. Then
    each is killed with SIGKILL and resumed: steps lost, seconds, and whether every bit is that
    of an uninterrupted training. Of several values the first is the usual one: every other is
    tried with the usual ones of the rest, in the arms that it means anything to.
    """

    every: tuple[int, ...] = option(
        "10", "Steps between whole states, and of a block: 10, or 10,50.",
        parse_list(parse_number), least=2, most=_EVERY_MAX,
    )  # fmt: skip
    ratio: tuple[float, ...] = option(
        "0.01", "Share of a gradient that is kept: 0.01, or 0.001,0.01,0.1.",
        parse_list(parse_share), least=1e-9, most=1,
    )  # fmt: skip
    batch_steps: tuple[int, ...] = option(
        "5", "Steps of the log that are written at a time: 5, or 1,5,20.",
        parse_list(parse_number), least=1, most=_EVERY_MAX,
    )  # fmt: skip
    kills: int = option(1, "SIGKILLs of each arm; 0 leaves them out.", least=0, most=_EVERY_MAX)
    replay: bool = option(True, "Time replay of the log, too.", flags="--replay/--no-replay")
    arms: tuple[str, ...] | None = _arms(STEP_ARMS)

    def check(self) -> None:
        """Refuse arms that all save nothing."""
        _saves(self.arms, NONE, COMPRESSED)


@dataclass(frozen=True)
class FrequencyOptions(Training):
    """Looks for the smallest interval that slows training down by no more than so much.

    For each arm 1, 2, 4, ... steps, then bisection; each interval in paired rounds, whose median
    counts (LowDiff, experiment 4).
    """

    repeats: int = option(3, "Paired rounds for each interval.", least=1)
    within: float = option("3.5%", "Slow-down at most, like 3.5%.", parse_share, least=1e-9, most=1)
    every_max: int = option(64, "No interval above is tried.", least=1, most=_EVERY_MAX)
    ratio: float = option(
        "0.01", "Share of a gradient that is kept.", parse_share, least=1e-9, most=1
    )
    batch_steps: int = option(
        5, "Steps of the log that are written at a time.", least=1, most=_EVERY_MAX
    )
    arms: tuple[str, ...] | None = _arms(STEP_ARMS)
    tiers: tuple[str, ...] = option(
        "", "Everstep's arms copy bases there, too: folders, URLs, with commas.",
        _places,
    )  # fmt: skip

    def check(self) -> None:
        """Refuse arms that all save nothing, and places that are not there."""
        _saves(self.arms, NONE, COMPRESSED)
        for place in self.tiers:
            if not _is_url(place) and not os.path.isdir(place):
                raise OptionError(
                    f"there is no folder {place}", hint="make it first, or name a URL"
                )

    def names(self) -> tuple[str, ...]:
        """Return the arms that save, in their order."""
        chosen = STEP_ARMS if self.arms is None else self.arms
        return tuple(name for name in STEP_ARMS if name in set(chosen) - {NONE, COMPRESSED})


AUTO = "auto"
CRASH_ARMS = (
    NONE, "torch.save", "dcp-warm", "sync", "async", "checkfreq", "lazy", *WAYS, "logged", AUTO
)  # fmt: skip
"""All arms that are killed, in the order in which they are shown."""

_JITTER = 0.5


@dataclass(frozen=True)
class CrashOptions(Training):
    """Trains, is killed every so many seconds, and resumes: GoCkpt's Table 1.

    Each arm saves at its own best interval, which follows from what a save of it costs. Counted
    are the steps that are there in the end, for each second of training and resuming.
    """

    crash_every_s: tuple[float, ...] = option(
        "10s", "Seconds from failure to failure: 10s, or 10s,30s,60s.",
        parse_list(parse_time),
        flags="--crash-every", least=0.5, most=86_400,
    )  # fmt: skip
    crashes: int = option(3, "Failures of each arm.", least=1, most=1000)
    link_bytes_per_s: float | None = _link()
    host_bytes: int | None = option(
        None, "Budget(host_bytes=) of everstep's arms, like 300MB.", parse_size,
        least=1, most=10**12,
    )  # fmt: skip
    arms: tuple[str, ...] | None = _arms(CRASH_ARMS)

    def check(self) -> None:
        """Refuse arms that all save nothing."""
        _saves(self.arms, NONE)

    def names(self) -> tuple[str, ...]:
        """Return the arms to kill, in their order."""
        return tuple(name for name in CRASH_ARMS if self.arms is None or name in self.arms)

    def lifetimes(self, crash_every_s: float) -> tuple[float, ...]:
        """Return the seconds of training until each failure, the same for all arms; then, without
        one, until the end.

        Uniform around the mean: at a fixed distance, each failure could happen right after a save
        of one arm and right before a save of another.
        """
        drawn = random.Random(self.seed)
        lives = [
            crash_every_s * drawn.uniform(1 - _JITTER, 1 + _JITTER) for _ in range(self.crashes)
        ]
        return (*lives, crash_every_s)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Bytes of gradients, and of the state that they belong to: ``2/14``."""

    gradients: int
    state: int

    @property
    def value(self) -> float:
        """As a number."""
        return self.gradients / self.state

    @classmethod
    def parse(cls, word: str) -> Ratio:
        """Parse ``"2/14"``.

        Raises:
            OptionError: for anything else.
        """
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*/\s*([0-9]{1,6})\s*", word)
        if match is None or not int(match[2]):
            raise OptionError(f"{word!r} is no ratio of gradients to state", hint="like 2/14")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.gradients}/{self.state}"


def _copy(word: str) -> float:
    """Parse the length of a copy in steps: ``"4"``, ``"0.5"``.

    Raises:
        OptionError: for anything else.
    """
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", word):
        raise OptionError(f"{word!r} is no number of steps", hint="like 4, or 4,8")
    return float(word)


def _parts(text: str) -> tuple[int, ...]:
    """Parse numbers and ranges of them: ``"1-24"``, ``"1,4,8-12"``.

    Raises:
        OptionError: for anything else.
    """
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise OptionError(f"{word!r} is no number of parts", hint="like 1-24, or 1,4,8")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


@dataclass(frozen=True)
class MultistepOptions(Options):
    """Bases over several steps: how long each number of parts holds training up, and the model.

    Steps are as long as is asked for; copies go through an EMULATED link that takes so many of
    them for the whole state. The model is that of everstep plan multistep. How long all of it
    takes is said before it begins.
    """

    copies: tuple[float, ...] = option(
        "4,8", "Steps that a copy of the whole state takes: 4, or 4,8.", parse_list(_copy),
        least=0.1, most=64, hint="like 4,8",
    )  # fmt: skip
    ratios: tuple[Ratio, ...] = option(
        "2/14,4/12", "Bytes of gradients to bytes of state: 2/14, or 2/14,4/12.",
        parse_list(Ratio.parse), hint="like 2/14,4/12",
    )  # fmt: skip
    parts: tuple[int, ...] = option(
        "1-24", "Numbers of parts: 1-24, or 1,2,4,7,12,24.", _parts,
        flags="--parts --k", least=1, most=PARTS_MAX,
    )  # fmt: skip
    step_s: float = option(
        "100", "Milliseconds of a step.", lambda text: parse_time(f"{text}ms"),
        flags="--step-ms", least=0.005, most=60,
    )  # fmt: skip
    state_bytes: int = option(
        "48MB", "Of parameters and moments.",
        parse_size, least=1_000_000, most=10**12,
    )  # fmt: skip
    layers: int = option(48, "Parameters that are trained.", least=PARTS_MAX, most=100_000)
    held_steps: int = option(
        1, "Steps for which gockpt_o keeps gradients, in device memory.",
        least=1, most=HELD_STEPS_MAX,
    )  # fmt: skip
    repeats: int = option(3, _ROUNDS, least=1)
    seed: int = _seed()
    free_core: bool = _free_core()
    folder: Path | None = _folder()

    def begin(self) -> None:
        """Say how long all of it takes."""
        from everstep_bench.multistep.run import about_s

        typer.echo(f"this takes about {about_s(self) / 60:.1f} minutes", err=True)

    def check(self) -> None:
        """Refuse more gradients than a state can have."""
        for ratio in self.ratios:
            if not 0 < ratio.value <= 1 / 3:
                raise OptionError(
                    f"gradients of {ratio} of the state: AdamW with float32 has 4/12, and "
                    "parameters that are not trained make it less",
                    hint="like 4/12, or 2/14",
                )


@dataclass(frozen=True)
class ScheduleOptions(Options):
    """Plans a checkpoint of every step for eight networks: Checkflow's Table I and Figure 2.

    Nothing runs on a device: steps are traced without one, and times of operators come from a
    data sheet. The paper's figures stand beside. With --executed a small model is trained here
    with method="checkflow", over emulated links: how long steps wait, next to the prediction.
    """

    gpu: str = option("rtx3090", "Whose data sheet gives the times.")
    adam: bool = option(False, "Adam in place of plain SGD.", flags="--adam")
    exact: bool = option(
        False, "Solve integer programs, too, 2 minutes each at most.", flags="--exact"
    )
    executed: bool = option(
        False, "Carry plans out here, and compare, instead.", flags="--executed"
    )
    peaks: bool = option(
        False, "Execute a plan for each network on the CPU, and compare peaks of memory, instead.",
        flags="--peaks",
    )  # fmt: skip
    compute: bool = option(False, "With --executed: layers that are not paced.", flags="--compute")
    disk_bytes_per_s: float = option(
        "3GB/s", "Bandwidth of the disk, like 3GB/s.", parse_speed, flags="--disk"
    )
    folder: Path | None = _folder()
    batches: tuple[int, ...] = (1, 32)

    @property
    def as_in_the_paper(self) -> bool:
        """True if the paper's figures are comparable: its GPU, and plain SGD."""
        return self.gpu == "rtx3090" and not self.adam


@dataclass(frozen=True)
class TiersOptions(Options):
    """Trains with bases in memory, peers, disks and copies, and looks how many bytes are where.

    In each step, and between, against what was announced at the start (TierCheck, experiment 9);
    and what tiers add to the training thread and to the processors, next to the same training
    without them. Nodes are EMULATED: processes and folders of this machine.
    """

    steps: int = option(200, "Of each of the two trainings.", least=1, most=_STEPS_MAX)
    ranks: int = option(2, "Processes that train together.", least=1, most=16)
    every: int = option(10, "Steps from base to base.", least=1)
    keep: int = option(2, "Bases, and copies.", least=2)
    params: int = _params("500k")
    batch: int = option(4, "Sequences of 64 bytes in a step.", least=1)
    seed: int = _seed()
    place: str | None = option(
        None, "Where copies go: a URL or an empty folder [default: one of its own].", flags="--tier"
    )
    log: str = option(
        "none", "Copies of a dense log in peers and there: none, whole (exact), adaptive (lossy).",
        choices=("none", "whole", "adaptive"),
    )  # fmt: skip
    folder: Path | None = _folder()
    picture: Path | None = option(None, _PICTURE.format("bytes over steps"))

    def check(self) -> None:
        """Refuse too few steps, and a place that is none."""
        least = (self.keep + 2) * self.every
        if self.steps < least:
            raise OptionError(
                f"steps={self.steps}: nothing is deleted before base {self.keep + 1}",
                hint=f"at least {least}",
            )
        if self.place is not None and not _is_url(self.place) and not os.path.isabs(self.place):
            raise OptionError(
                f"{self.place!r} is no place for copies",
                hint="a URL like s3://bucket/prefix, or the absolute path of a directory",
            )

    def begin(self) -> None:
        """Look whether a picture can be drawn."""
        if self.picture is not None:
            from everstep.cli.plan.schedule_output import check_picture

            check_picture(self.picture)


@dataclass(frozen=True)
class ConvergenceOptions(Options):
    """Trains the demo's model on compressed gradients, next to dense training.

    AdamW and SGD; top-k, sampled threshold and int8, with and without error feedback. Losses at
    the end and on unseen text, and what a step's gradients take in a log.
    """

    steps: int = option(400, "Of each training.", least=1)
    seeds: tuple[int, ...] = option(
        "2", "Trainings of each arm.", lambda text: tuple(range(parse_number(text))), least=0
    )
    batch: int = 16
    optimizers: tuple[str, ...] = ("AdamW", "SGD")
    model: Any = None


@dataclass(frozen=True)
class LossyOptions(Options):
    """Trains on through failures that are recovered from a log of lossy gradients.

    Loss at the end and on unseen text, next to a training without failures and to one with a dense
    log; and how far each recovered state is from the one that was lost (TierCheck, experiment 8).
    """

    steps: int = option(300, "Of each training.", least=1)
    every: int = option(25, "Steps from base to base.", least=1)
    fail_every: int = option(24, "Steps from failure to failure.", least=1)
    seed: int = _seed(0)
    folder: Path | None = _folder()
    batch: int = 8
    model: Any = None

    def check(self) -> None:
        """Refuse failures right after bases."""
        if self.fail_every % self.every == 0:
            raise OptionError(
                f"failures every {self.fail_every} steps come right after bases, every "
                f"{self.every}: nothing would be replayed",
                hint=f"failures every {self.fail_every - 1 or 2} steps",
            )
