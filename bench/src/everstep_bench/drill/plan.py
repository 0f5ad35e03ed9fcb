"""Plan of a drill: the training and its kills, validated before anything begins.

Ways to be recoverable that a drill compares, all on the same engine.

What each arm comes back from is what its system has (TierCheck section 5.1). CheckFreq and
DataStates-LLM write to a durable tier that all hosts share, from threads of the training process,
so nothing of them outlives it. GEMINI keeps states in the host memory of two machines, in a
process beside the trainer, and seldom writes one to the durable tier. everstep's own methods have a
keeper beside every trainer: where that survives, its memory is a source, too. With a run folder on
the hosts' own disks a method needs tiers or peers; without them what only a lost host had is lost.

The durable tier is a folder that all hosts see, on this machine's disk: no link is in between, in
no arm. That is kinder to the arms which read all their state from it than the paper's testbed is.
With a store (:mod:`everstep_bench.drill.network`) it is a real object store behind the same link of
each host for all arms. What arms would write to a shared folder then goes to the host's disk and,
by a keeper process, on from there. Of systems that write to the durable tier alone (TierCheck,
Table 1: "full remote checkpoint fetch") disks and keepers go before a restart.
"""

# ruff: noqa: RUF009 (option() is field())

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from everstep.config.given import one_of
from everstep.errors import OptionError
from everstep_bench.harness.options import Options, from_words, option, parse_list, parse_params

if TYPE_CHECKING:
    from everstep.workloads import GPTConfig


Consumes = Literal["whole", "int8"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to be recoverable.

    Attributes:
        method: preset of the Checkpointer.
        keeper: ``"process"`` beside the trainer, which survives it; ``"thread"`` of it.
        folder: where the run folder is: ``"shared"``: the durable tier itself; ``"own"``: the
            disk of each host, which is lost with it.
        tiers: of the Checkpointer; ``{durable}`` stands for the durable tier, and each host is
            another node to ``"peer"``.
        log: arguments of ``LogOptions``.
        consumes: what its optimizer consumes: whole gradients, or ``"int8"``. It is compared with
            a run that nobody disturbed and that consumes the same.
        copied: what of the log the durable tier gets, as ``TierOptions(log=)`` has it;
            ``"adaptive"`` goes to peers, too, who otherwise get the log as it is.
        copied_steps: of a segment there.
        at_once: what goes to peers is sent as fast as the link goes where links have rates to
            scale, and not in four fifths of the interval; GEMINI always does.
        words: what it is, for people.
    """

    method: str
    words: str
    keeper: Literal["process", "thread"] = "process"
    folder: Literal["shared", "own"] = "shared"
    tiers: tuple[str, ...] = ()
    log: Mapping[str, Any] = field(default_factory=dict)
    consumes: Consumes = "whole"
    copied: Literal["none", "whole", "adaptive"] = "none"
    copied_steps: int = 2
    at_once: bool = False

    @property
    def staged(self) -> bool:
        """True if its system has nothing but the durable tier after training has died."""
        return self.folder == "shared" and self.keeper == "thread"


_SYSTEM = "nothing outlives a training process"

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "sync": Arm("sync", "training waits until a base is durable", keeper="thread"),
        "async": Arm("async", "training waits for a copy, which the keeper process persists"),
        "lazy": Arm("lazy", "copied during the next step, persisted by the keeper process"),
        "checkfreq": Arm(
            "checkfreq",
            f"CheckFreq: a copy during the next step, then written, one at a time; {_SYSTEM}",
            keeper="thread",
        ),
        "datastates": Arm("datastates", f"DataStates-LLM: {_SYSTEM}", keeper="thread"),
        "gemini": Arm(
            "gemini",
            "GEMINI: whole states in the memory of keeper and next node; one base of 10 on disk",
            tiers=("peer",),
        ),
        "everstep": Arm(
            "logged",
            "every step logged; bases on the hosts' disks, with peers, and in the durable tier",
            folder="own",
            tiers=("peer", "{durable}/copies"),
            log={"to": "disk", "batch_steps": 1},
            at_once=True,
        ),
        "everstep_lossy": Arm(
            "logged",
            "every step logged in the hosts' memory; peers and the durable tier get the log with "
            "lossy gradients, as TierCheck's: from these a run goes on near where it was",
            folder="own",
            tiers=("peer", "{durable}/copies"),
            copied="adaptive",
            at_once=True,
        ),
        "everstep_int8": Arm(
            "lowdiff",
            "training consumes int8 gradients, so the log that memory, peers and the durable tier "
            "get is a quarter of a dense one and has every bit that was consumed",
            folder="own",
            tiers=("peer", "{durable}/copies"),
            log={"to": "memory"},
            consumes="int8",
            copied="whole",
            at_once=True,
        ),
    }
)
"""The arms by name."""

OURS = ("everstep", "everstep_lossy", "everstep_int8")
"""Arms that are compared with others."""

OTHERS = ("gemini", "checkfreq", "datastates")
"""These (TierCheck, section 5.1)."""


Kill = Literal["process", "node", "rack"]
Links = Literal["auto", "namespaces", "groups"]

KILLS: tuple[Kill, ...] = ("process", "node", "rack")
_FAILPOINT_GROUPS = ("save", "capture", "keeper", "log", "retain")
_HOSTS_MAX = 16
_CONTEXT = 64
_EVERY = 10
_WARM_STEPS = 10  # before the base after which an arm with an interval of its own is killed
_TAIL_STEPS = 3  # that it takes after the step of the kill
_STATE_BYTES = 12  # of each parameter: itself and two moments, in four bytes each
_PEER_LINK = 2.0  # times the link to the store: 200 to 100 Gbit/s per node (TierCheck section 5.1)
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True, slots=True)
class Intervals:
    """Steps between two bases.

    Attributes:
        own: of arms that have their own; each of them is killed half of that after a base of its
            own, and ends soon after.
    """

    every: int
    own: Mapping[str, int]


def parse_every(text: str) -> Intervals:
    """Parse steps between two bases: ``10``, or ``"gemini=11,checkfreq=21"`` with arms' own.

    Raises:
        OptionError: for what is none.
    """
    every = _EVERY
    own = {}
    for word in text.split(","):
        name, _, number = word.strip().rpartition("=")
        if not re.fullmatch(r"[0-9]{1,6}", number) or int(number) < 1:
            raise OptionError(
                f"--every {text!r}: {number!r} is no number of steps",
                hint='like 10, or "gemini=11,checkfreq=21"',
            )
        if name:
            one_of("arm", name, ARMS)
            own[name] = int(number)
        else:
            every = int(number)
    return Intervals(every, MappingProxyType(own))


def parse_checks(text: str) -> Mapping[str, float]:
    """Parse ratios that are asked for: ``"process=3.6,node=1.8"``.

    Raises:
        OptionError: for what is none.
    """
    found: dict[str, float] = {}
    for word in text.split(",") if text else ():
        kill, _, number = word.strip().partition("=")
        one_of("kill", kill, KILLS)
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number):
            raise OptionError(
                f"--check {text!r}: {word.strip()!r} is no ratio", hint='like "process=3.6"'
            )
        found[kill] = float(number)
    return MappingProxyType(found)


def parse_rate(text: str) -> int:
    """Parse bits in a second: ``"1gbit"``, ``"200mbit"``.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(kbit|mbit|gbit)\s*", text.lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 10**6 <= rate <= 10**12:
        raise OptionError(f"--link {text!r} is no rate", hint='like "1gbit" or "200mbit"')
    return rate


@dataclass(frozen=True)
class DrillPlan(Options):
    """Kills hosts that train together, replaces them, compares every bit.

    A job of real torchrun agents trains a small GPT over gloo on several hosts of this machine:
    network namespaces with links of a stated rate where the machine allows it, else process
    groups. A trainer, a node with its keeper and its disk, or half of the nodes are killed with
    SIGKILL; the job starts again with empty hosts in their place and resumes. Printed is what that
    costs (TierCheck's Table 3) for each way to be recoverable. Exit status: 0 if every rank ends in
    the bits of a run that nobody disturbed, 1 if one bit differs, 3 if a ratio of --check is not
    reached or every arm was refused.
    """

    hosts: int = option(4, "Of the job, one rank each.", least=2, most=_HOSTS_MAX)
    kills: tuple[Kill, ...] = option(
        "process,node,rack", "What dies: process, node or rack, or several with commas.",
        parse_list(str), flags="--kill", choices=KILLS,
    )  # fmt: skip
    at: str | None = option(
        None,
        "When: after a step (27), at a failpoint (save.before_rename), or at that of the base of a "
        "step (save.before_rename@20).",
    )
    arms: tuple[str, ...] = option(
        ",".join(ARMS), "Only these, like lazy,datastates.", parse_list(str), choices=tuple(ARMS)
    )
    victim: int = option(1, "Host that is hit; of a rack the first one.", least=0)
    params: int = option("1M", "Of the model, like 1M or 25M.", parse_params, least=1)
    batch: int = option(8, "Sequences of 64 bytes of each rank in a step.", least=1)
    parallel: str = option("ddp", "ddp, or fsdp2 (every rank its part).", choices=("ddp", "fsdp2"))
    steps: int = option(40, "Of the training.", least=1)
    intervals: Intervals = option(
        "10",
        "Steps between two bases: 10, or of some arms their own: gemini=11,checkfreq=21. Those are "
        "killed half an interval after a base of their own.",
        parse_every,
        flags="--every",
    )
    links: Links = option(
        "auto", "auto, namespaces (needs root and iproute2), or groups.",
        choices=("auto", "namespaces", "groups"),
    )  # fmt: skip
    link: int = option("1gbit", "Rate of each host's link, like 200mbit.", parse_rate)
    store: str = option(
        "folder",
        "The durable tier: folder (on this machine, without a link), or seaweedfs (a real object "
        "store, over a link of each host; needs namespaces and weed).",
        choices=("folder", "seaweedfs"),
    )
    store_link: int | None = option(
        None, "Rate of each host's link to it [default: half of --link].", parse_rate
    )
    restore_steps: float | None = option(
        None,
        "Set links when the undisturbed run is over, so that a host's state takes so many of its "
        "steps from the store, and half as many from another host.",
        least=0.01, most=1000,
    )  # fmt: skip
    checks: Mapping[str, float] = option(
        "",
        "How many times faster than the best of gemini, checkfreq and datastates everstep has to "
        "recover, like process=3.6,node=1.8,rack=1.3.",
        parse_checks,
        flags="--check",
    )
    into: float = option(
        0.0,
        "How much of the next step is taken when the kill falls, from 0 to below 1. It is lost in "
        "all arms.",
        least=0, most=0.999,
    )  # fmt: skip
    cut: bool = option(
        False, "Cut a dead node's link first, so that no connection is closed.", flags="--cut"
    )
    timeout_s: float = option(
        60.0, "Seconds after which a rank is given up.", flags="--timeout", least=1, most=3600
    )
    seed: int = option(1234, "Of weights, data and noise.", least=0, most=2**32 - 1 - _HOSTS_MAX)
    folder: Path | None = option(
        None, "Keep orders, journals and logs in this new folder.", flags="--dir"
    )

    def check(self) -> None:
        """Refuse what cannot be together."""
        every = self.every
        if not set(self.arms) <= set(self.intervals.own) and self.steps < 3 * every:
            raise OptionError(
                f"{self.steps} steps with a base every {every} leave no room for a kill",
                hint="take at least three times as many steps as there are between bases",
            )
        if self.victim >= self.hosts:
            raise OptionError(
                f"--victim must be one of the hosts 0 to {self.hosts - 1}, not {self.victim}"
            )
        if self.links == "groups" and (self.cut or self.store != "folder"):
            raise OptionError(
                "--cut and --store are for network namespaces: process groups have no links"
            )
        if self.restore_steps is not None and self.store == "folder":
            raise OptionError("--restore-steps is of a store", hint="--store seaweedfs")
        if not set(self.checks) <= set(self.kills):
            raise OptionError("--check: a kill that is not drilled has no ratio")
        self._check_kill()

    def _check_kill(self) -> None:
        """Refuse a kill that cannot fall when it is to."""
        point = self.at_point
        if point is not None and point.split(".")[0] == "retain" and self.at_step < 4 * self.every:
            raise OptionError(f"{point} is not reached before more than three bases are kept")
        if self.into and point is not None:
            raise OptionError("--into is for kills after a step")
        if self.at is not None and self.intervals.own:
            raise OptionError(
                "arms with intervals of their own are killed after bases of their own"
            )
        for arm in self.arms:
            if self.kill_step(arm) + 1 > self.steps:
                raise OptionError(
                    f"arm {arm} would be killed after step {self.kill_step(arm)} of {self.steps}",
                    hint=f"--steps {self.kill_step(arm) + _TAIL_STEPS}",
                )

    @property
    def every(self) -> int:
        """Steps between two bases of arms that have no interval of their own."""
        return self.intervals.every

    @property
    def at_step(self) -> int:
        """The kill falls after this step."""
        return parse_at(self.at, steps=self.steps, every=self.every)[0]

    @property
    def at_point(self) -> str | None:
        """Failpoint at which a process of the victim dies first; None: none."""
        return parse_at(self.at, steps=self.steps, every=self.every)[1]

    @property
    def store_bits_per_s(self) -> int:
        """Rate of each host's link to the store, both ways."""
        return self.link // 2 if self.store_link is None else self.store_link

    @cached_property
    def model(self) -> GPTConfig:
        """Return what is trained."""
        from everstep.workloads import gpt_of

        return gpt_of(self.params, context=_CONTEXT)

    def every_of(self, arm: str) -> int:
        """Return the steps between two bases of an arm."""
        return self.intervals.own.get(arm, self.every)

    def kill_step(self, arm: str) -> int:
        """Return the step after which an arm is killed.

        Of those with intervals of their own half an interval, rounded down, after the first base
        that is not among the first steps. What is lost of the step under way counts: with that it
        is never more than half an interval.
        """
        if arm not in self.intervals.own:
            return self.at_step
        every = self.every_of(arm)
        half = int(max(0.0, every / 2 - self.into))
        return -(-_WARM_STEPS // every) * every + half

    def end_step(self, arm: str) -> int:
        """Return the last step of an arm's run."""
        if arm not in self.intervals.own:
            return self.steps
        return min(self.steps, self.kill_step(arm) + _TAIL_STEPS)

    @property
    def host_bytes(self) -> int:
        """Bytes that a host reads at a restart: its share of the state, or all of it."""
        whole = _STATE_BYTES * self.model.params
        return whole if self.parallel == "ddp" else whole // self.hosts

    def rates_for(self, step_s: float) -> tuple[int, int]:
        """Return bits in a second between hosts, and of each to the store, with which a host's
        state takes ``restore_steps`` steps on its way from the store."""
        assert self.restore_steps is not None
        store = max(10**6, round(8 * self.host_bytes / (self.restore_steps * step_s)))
        return round(_PEER_LINK * store), store

    def dead_hosts(self, kill: Kill) -> tuple[int, ...]:
        """Return the hosts that a kill takes with all that is on them; none for a process.

        A rack is half of the hosts, at least two, side by side: of a ring of peers it takes
        neighbours.
        """
        count = {"process": 0, "node": 1, "rack": max(2, self.hosts // 2)}[kill]
        return tuple((self.victim + index) % self.hosts for index in range(count))


def drill_plan(*, every: int | str = _EVERY, check: str = "", **words: object) -> DrillPlan:
    """Return a plan of words as on the command line.

    Raises:
        OptionError: for what cannot be.
    """
    return from_words(DrillPlan, intervals=str(every), checks=check, **words)


def parse_at(text: str | None, *, steps: int, every: int) -> tuple[int, str | None]:
    """Parse when the kill falls: ``"27"``, ``"save.before_manifest"``, or
    ``"save.before_manifest@30"``.

    A number is the step that it comes after. At a failpoint a process of the victim kills itself
    there, in the base that is due at the step that is named or implied, and the rest that is to die
    follows at once. None: half an interval after a base in the last part of the run, which makes
    the steps lost the mean of the best and the worst case, as TierCheck counts them.

    Returns:
        Step and failpoint.

    Raises:
        OptionError: for what is none, or comes too early or too late.
    """
    base = max(1, (steps // every) * 2 // 3) * every
    if text is None:
        return min(base + every // 2, steps - 1), None
    point, _, step_text = text.partition("@")
    if not step_text and re.fullmatch(r"[0-9]+", point):
        point, step_text = "", point
    if point:
        from everstep.seams.failpoints import FAILPOINTS

        known = [name for name in FAILPOINTS if name.split(".")[0] in _FAILPOINT_GROUPS]
        one_of("failpoint", point, known)
    step = base
    if step_text:
        if not re.fullmatch(r"[0-9]+", step_text):
            raise OptionError(f"--at {text!r}: {step_text!r} is no step")
        step = int(step_text)
    if point and step % every:
        raise OptionError(
            f"--at {text!r}: no base is due at step {step}", hint=f"every {every} steps one is"
        )
    if not every <= step <= steps - (every if point else 1):
        raise OptionError(
            f"--at {text!r}: a kill after step {step} of {steps} is too early or too late",
            hint="after the first base, and with a base's steps left",
        )
    return step, point or None
