"""Plan of a drill: the training and its kills, validated before anything begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, cast

from everstep.config.given import one_of
from everstep.errors import OptionError
from everstep.seams.failpoints import FAILPOINTS
from everstep.workloads import GPTConfig, gpt_of
from everstep_bench.drill.arms import ARMS, parse_arms

__all__ = [
    "KILLS",
    "DrillPlan",
    "Kill",
    "Links",
    "Parallel",
    "drill_plan",
    "parse_at",
    "parse_checks",
    "parse_every",
    "parse_rate",
]

Kill = Literal["process", "node", "rack"]
Links = Literal["auto", "namespaces", "groups"]
Parallel = Literal["ddp", "fsdp2"]
StoreKind = Literal["folder", "seaweedfs"]

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
class DrillPlan:
    """Everything that a drill does.

    Attributes:
        hosts: of the job, one rank each.
        kills: which failures, one after the other.
        arms: names of :data:`~everstep_bench.drill.arms.ARMS`.
        model: what is trained.
        batch: sequences of each rank in a step.
        parallel: ``"ddp"``: the state is replicated; ``"fsdp2"``: spread over the ranks (as with
            ZeRO-3, TierCheck section 5.1).
        steps: of the training.
        every: steps between two bases.
        at_step: the kill falls after this step.
        at_point: failpoint at which a process of the victim dies first; None: none.
        victim: host that is killed; of a rack, the first one.
        seed: of everything.
        links: namespaces, process groups, or whatever the machine allows.
        link_bits_per_s: of each host, both ways; of namespaces only.
        cut: the links of dead nodes are cut first: no connection is closed, survivors have to
            find out.
        timeout_s: after which a rank is given up by the others, and a start of the job by the
            drill if nothing happens in it.
        store: the durable tier: a folder of this machine, or a real object store behind links.
        store_bits_per_s: of each host's link to that, both ways.
        restore_steps: so many steps of the undisturbed run is what a host reads at a restart on
            its way from the store; rates are set so when that run is over. None: as they are.
        intervals: steps between two bases of arms that have their own; each of them is killed half
            of that after a base of its own, and ends soon after.
        checks: how many times faster than the best other arm ``everstep`` has to be, by kill.
        into: part of a step that is under way when the kill falls, from 0 to 1; it is lost, too.
    """

    hosts: int
    kills: tuple[Kill, ...]
    arms: tuple[str, ...]
    model: GPTConfig
    batch: int
    parallel: Parallel
    steps: int
    every: int
    at_step: int
    at_point: str | None
    victim: int
    seed: int
    links: Links
    link_bits_per_s: int
    cut: bool
    timeout_s: float
    store: StoreKind = "folder"
    store_bits_per_s: int = 10**9
    restore_steps: float | None = None
    intervals: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    checks: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    into: float = 0.0

    def every_of(self, arm: str) -> int:
        """Steps between two bases of an arm."""
        return self.intervals.get(arm, self.every)

    def kill_step(self, arm: str) -> int:
        """The step after which an arm is killed: of those with intervals of their own half an
        interval, rounded down, after the first base that is not among the first steps. What is
        lost of the step under way counts: with that it is never more than half an interval."""
        if arm not in self.intervals:
            return self.at_step
        every = self.intervals[arm]
        half = int(max(0.0, every / 2 - self.into))
        return -(-_WARM_STEPS // every) * every + half

    def end_step(self, arm: str) -> int:
        """The last step of an arm's run."""
        if arm not in self.intervals:
            return self.steps
        return min(self.steps, self.kill_step(arm) + _TAIL_STEPS)

    @property
    def host_bytes(self) -> int:
        """Return the bytes that a host reads at a restart: its share of the state, or all of it."""
        whole = _STATE_BYTES * self.model.params
        return whole if self.parallel == "ddp" else whole // self.hosts

    def rates_for(self, step_s: float) -> tuple[int, int]:
        """Bits in a second between hosts, and of each to the store, with which a host's state takes
        ``restore_steps`` steps on its way from the store."""
        assert self.restore_steps is not None
        store = max(10**6, round(8 * self.host_bytes / (self.restore_steps * step_s)))
        return round(_PEER_LINK * store), store

    def dead_hosts(self, kill: Kill) -> tuple[int, ...]:
        """Hosts that a kill takes with all that is on them; none for a process. A rack is half
        of the hosts, at least two, side by side: of a ring of peers it takes neighbours."""
        count = {"process": 0, "node": 1, "rack": max(2, self.hosts // 2)}[kill]
        return tuple((self.victim + index) % self.hosts for index in range(count))


def drill_plan(
    *,
    hosts: int = 4,
    kills: str = "process,node,rack",
    arms: str | None = None,
    params: int = 1_000_000,
    batch: int = 8,
    parallel: str = "ddp",
    steps: int = 40,
    every: int | str = _EVERY,
    at: str | None = None,
    victim: int = 1,
    seed: int = 1234,
    links: str = "auto",
    link: str = "1gbit",
    cut: bool = False,
    timeout_s: float = 60.0,
    store: str = "folder",
    store_link: str | None = None,
    restore_steps: float | None = None,
    check: str | None = None,
    into: float = 0.0,
) -> DrillPlan:
    """Fills in what the user left open.

    Args:
        kills: names of :data:`KILLS`, with commas.
        arms: names of arms, with commas; None: all.
        every: see :func:`parse_every`.
        at: see :func:`parse_at`.
        link: like ``"1gbit"``.
        store_link: the same; None: half of that.
        check: see :func:`parse_checks`.

    Raises:
        OptionError: for what cannot be.
    """
    if not 2 <= hosts <= _HOSTS_MAX:
        raise OptionError(f"--hosts must be 2 to {_HOSTS_MAX}, not {hosts}")
    wanted = [word.strip() for word in kills.split(",") if word.strip()]
    for word in wanted or [kills]:
        one_of("kill", word, KILLS)
    one_of("links", links, ("auto", "namespaces", "groups"))
    one_of("parallel", parallel, ("ddp", "fsdp2"))
    one_of("store", store, ("folder", "seaweedfs"))
    every, intervals = parse_every(every)
    names = parse_arms(arms)
    if not set(names) <= set(intervals) and (every < 1 or steps < 3 * every):
        raise OptionError(
            f"{steps} steps with a base every {every} leave no room for a kill",
            hint="take at least three times as many steps as there are between bases",
        )
    if not 0 <= victim < hosts:
        raise OptionError(f"--victim must be one of the hosts 0 to {hosts - 1}, not {victim}")
    if not 0 <= seed < 2**32 - _HOSTS_MAX:
        raise OptionError(f"--seed must be from 0 to {2**32 - _HOSTS_MAX - 1}, not {seed}")
    if batch < 1 or not 1 <= timeout_s <= 3600:
        raise OptionError("--batch must be at least 1, --timeout 1 to 3600 seconds")
    at_step, at_point = parse_at(at, steps=steps, every=every)
    if at_point is not None and at_point.split(".")[0] == "retain" and at_step < 4 * every:
        raise OptionError(f"{at_point} is not reached before more than three bases are kept")
    if links == "groups" and (cut or store != "folder"):
        raise OptionError(
            "--cut and --store are for network namespaces: process groups have no links"
        )
    if restore_steps is not None and (store == "folder" or not 0.01 <= restore_steps <= 1000):
        raise OptionError(
            "--restore-steps must be from 0.01 to 1000, and is of a store behind links",
            hint="--store seaweedfs",
        )
    if not 0 <= into < 1 or (into and at_point is not None):
        raise OptionError("--into must be from 0 to below 1, and is for kills after a step")
    if at is not None and intervals:
        raise OptionError("arms with intervals of their own are killed after bases of their own")
    rate = parse_rate(link)
    plan = DrillPlan(
        hosts,
        cast(tuple[Kill, ...], tuple(dict.fromkeys(wanted))),
        names,
        gpt_of(params, context=_CONTEXT),
        batch,
        cast(Parallel, parallel),
        steps,
        every,
        at_step,
        at_point,
        victim,
        seed,
        cast(Links, links),
        rate,
        cut,
        timeout_s,
        cast(StoreKind, store),
        rate // 2 if store_link is None else parse_rate(store_link),
        restore_steps,
        MappingProxyType(intervals),
        MappingProxyType(parse_checks(check, wanted)),
        into,
    )
    for arm in plan.arms:
        if plan.kill_step(arm) + 1 > steps:
            raise OptionError(
                f"arm {arm} would be killed after step {plan.kill_step(arm)} of {steps}",
                hint=f"--steps {plan.kill_step(arm) + _TAIL_STEPS}",
            )
    return plan


def parse_every(value: int | str) -> tuple[int, dict[str, int]]:
    """Steps between two bases: ``10``, or ``"gemini=11,checkfreq=21"`` with arms' own.

    Returns:
        Of all arms that are not named, and of those that are.

    Raises:
        OptionError: for what is none.
    """
    every = _EVERY
    found = {}
    for word in str(value).split(","):
        name, _, number = word.strip().rpartition("=")
        if not re.fullmatch(r"[0-9]{1,6}", number) or int(number) < 1:
            raise OptionError(
                f"--every {value!r}: {number!r} is no number of steps",
                hint='like 10, or "gemini=11,checkfreq=21"',
            )
        if name:
            one_of("arm", name, ARMS)
            found[name] = int(number)
        else:
            every = int(number)
    return every, found


def parse_checks(text: str | None, kills: Sequence[str]) -> dict[str, float]:
    """Ratios that are asked for: ``"process=3.6,node=1.8"``; none for None.

    Args:
        kills: of the drill.

    Raises:
        OptionError: for what is none.
    """
    found: dict[str, float] = {}
    for word in (text or "").split(",") if text is not None else ():
        kill, _, number = word.strip().partition("=")
        one_of("kill", kill, KILLS)
        if kill not in kills or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", number):
            raise OptionError(
                f"--check {text!r}: {word.strip()!r} is no ratio of a kill that is drilled",
                hint='like "process=3.6,node=1.8"',
            )
        found[kill] = float(number)
    return found


def parse_at(text: str | None, *, steps: int, every: int) -> tuple[int, str | None]:
    """When the kill falls: ``"27"``, ``"save.before_manifest"``, or ``"save.before_manifest@30"``.

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
        one_of("failpoint", point, _failpoints())
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


def parse_rate(text: str) -> int:
    """Bits in a second of ``"1gbit"``, ``"200mbit"``.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(kbit|mbit|gbit)\s*", text.lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 10**6 <= rate <= 10**12:
        raise OptionError(f"--link {text!r} is no rate", hint='like "1gbit" or "200mbit"')
    return rate


def _failpoints() -> Sequence[str]:
    return [name for name in FAILPOINTS if name.split(".")[0] in _FAILPOINT_GROUPS]
