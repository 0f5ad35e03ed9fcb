"""One start of the job: a torchrun agent on every host, its trainers followed through journals."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from everstep.seams.processes.processes import PidWatch
from everstep.workloads.comparison import Event, JournalReader
from everstep_bench.drill.hosts import Hosts
from everstep_bench.drill.plan import ARMS, Arm, Consumes, DrillPlan
from everstep_bench.drill.processes import DrillError

CHILD: tuple[str, ...] = ("-m", "everstep_bench.drill.child")
"""Arguments with which torchrun starts a training process."""

TEXT = "text.bin"
"""Name of the file with the training text."""

_POLL_S = 0.01
_TAIL_BYTES = 3000
_SILENCE_FACTOR = 2.0
_REAP_S = 10.0
_CULPRIT_S = 2.0


def order_of(
    plan: DrillPlan,
    hosts: Hosts,
    name: str,
    arm: str | None,
    place: Path,
    *,
    consumes: Consumes = "whole",
    scenario: str = "run",
) -> dict[str, Any]:
    """Return the order for the training processes; the same for all ranks.

    Args:
        name: of this start.
        arm: none for the run that nobody disturbs, whose states at the ends of all arms are
            described.
        place: for the journals; it holds the text.
        consumes: what the optimizer consumes where there is no arm.
        scenario: what it is a start of; has a part of the durable tier for itself.
    """
    way = None if arm is None else ARMS[arm]
    if (way is None or way.folder == "shared") and hosts.store is None:
        runs = [hosts.durable / "run"] * plan.hosts
    else:
        runs = [hosts.disk(host) / "run" for host in range(plan.hosts)]
    return {
        "name": name,
        "journals": str(place),
        "text": str(place / TEXT),
        "drill": os.getpid(),
        "arm": None if way is None else _told(plan, hosts, way, hosts.durable_tier(scenario)),
        "consumes": consumes if way is None else way.consumes,
        "runs": [str(run) for run in runs],
        "steps": plan.steps,
        "until": plan.steps if arm is None else plan.end_step(arm),
        "describe": [] if arm else sorted({plan.end_step(one) for one in plan.arms}),
        "every": plan.every if arm is None else plan.every_of(arm),
        "seed": plan.seed,
        "batch": plan.batch,
        "model": asdict(plan.model),
        "parallel": plan.parallel,
        "timeout_s": plan.timeout_s,
    }


def _told(plan: DrillPlan, hosts: Hosts, way: Arm, durable: str) -> dict[str, Any]:
    """Return what of an order is an arm's."""
    durable_store = hosts.store is not None
    # An object store is no folder: what is meant for it is written to the disk first.
    tiers = (*way.tiers, "{durable}") if way.folder == "shared" and durable_store else way.tiers
    return {
        "method": way.method,
        "keeper": "process" if durable_store else way.keeper,  # it makes the copies
        "log": dict(way.log),
        "copied": way.copied,
        "copied_steps": way.copied_steps,
        "tiers": [tier.replace("{durable}", durable) for tier in tiers],
        "peer_bytes_per_s": plan.link / 8 if way.at_once and durable_store else None,
    }


class Start:
    """The job, from one launch to its end.

    Args:
        order: from :func:`order_of`.
        folder: for its order, and for logs; journals are where the order says.
        failpoints: for the processes of a host, by host.
        child: arguments for torchrun that name the program.
        progress: is told the highest step so far.

    Attributes:
        events: what each rank has reported so far.
        launched_s: when, by the machine's monotonic clock.
    """

    def __init__(
        self,
        hosts: Hosts,
        order: Mapping[str, Any],
        folder: Path,
        *,
        failpoints: Mapping[int, str] | None = None,
        child: Sequence[str] = CHILD,
        progress: Callable[[str, int], None] = lambda name, step: None,
    ) -> None:
        self.name = str(order["name"])
        self._hosts = hosts
        self._folder = folder
        self._progress = progress
        self._silence_s = _SILENCE_FACTOR * float(order["timeout_s"])
        self._order = path = folder / f"{self.name}.json"
        path.write_text(json.dumps(order))
        journals = Path(order["journals"])
        self._readers = [
            JournalReader(journals / f"{self.name}-{rank}.jsonl") for rank in range(hosts.count)
        ]
        self.events: list[list[Event]] = [[] for _ in range(hosts.count)]
        self.launched_s = self._heard_s = time.monotonic()
        self.agents: list[subprocess.Popen[bytes]] = []
        port = hosts.network.port()
        try:
            for host in range(hosts.count):
                extra = {"EVERSTEP_FAILPOINTS": (failpoints or {}).get(host, "")}
                command = [*self._agent(host, port), *child, str(path)]
                self.agents.append(hosts.start(host, command, self._log(host), extra))
        except BaseException:
            self.end()
            raise

    def _agent(self, host: int, port: int) -> list[str]:
        network = self._hosts.network
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={self._hosts.count}", f"--node-rank={host}", "--nproc-per-node=1"),
            *(f"--master-addr={network.address(0)}", f"--master-port={port}"),
            *(f"--local-addr={network.address(host)}", "--max-restarts=0"),
            "--monitor-interval=0.1",
        ]

    # --- What is known ------------------------------------------------------------------

    def found(self, rank: int, event: str) -> Event | None:
        """The first report of this kind from a rank; None: there is none yet."""
        return next((item for item in self.events[rank] if item["event"] == event), None)

    def all_found(self, event: str) -> bool:
        """Return True if every rank has reported it."""
        return all(self.found(rank, event) for rank in range(self._hosts.count))

    def step(self, rank: int) -> int:
        """The last step that a rank has finished, resumed ones included."""
        return max((item["step"] for item in self.events[rank] if "step" in item), default=0)

    @property
    def reached(self) -> int:
        """The last step that any rank has finished."""
        return max(map(self.step, range(self._hosts.count)))

    def losses(self, rank: int) -> list[tuple[int, str]]:
        """``(step, loss in hexadecimal)`` of every step that a rank has taken."""
        return [
            (item["number"], item["loss"]) for item in self.events[rank] if item["event"] == "taken"
        ]

    def pid(self, rank: int) -> int:
        """Of a rank's trainer, which has begun."""
        begun = self.found(rank, "started")
        assert begun is not None
        return int(begun["pid"])

    # --- Following ----------------------------------------------------------------------

    def poll(self) -> None:
        """Reads what is new in the journals."""
        for rank, reader in enumerate(self._readers):
            new = reader.read_new()
            if new:
                self._heard_s = time.monotonic()
                self.events[rank] += new
        self._progress(self.name, self.reached)

    def follow(self, until: Callable[[], bool]) -> None:
        """Returns when the condition holds.

        Raises:
            DrillError: a rank is lost, an agent ends otherwise than well, or nothing is heard
                for twice the timeout.
        """
        while True:
            ended = [agent.poll() for agent in self.agents]
            self.poll()
            if until():
                return
            self._refuse_lost(ended)
            if all(status == 0 for status in ended):
                raise self._failed(0, "and all others have ended before their time")
            if self.silent():
                raise self._failed(0, f"and all others said nothing for {self._silence_s:g} s")
            time.sleep(_POLL_S)

    def _refuse_lost(self, ended: Sequence[int | None]) -> None:
        """Raises if a rank is lost or an agent has failed; names the one that began, if it can be
        told: those that are lost because of it say so first, and its agent is a little later."""
        lost = [rank for rank in range(self._hosts.count) if self.found(rank, "lost")]
        failed = [host for host, status in enumerate(ended) if status]
        if not lost and not failed:
            return
        culprits = [host for host in failed if host not in lost]
        deadline_s = time.monotonic() + _CULPRIT_S
        while lost and not culprits and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self.poll()
            failed = [host for host, agent in enumerate(self.agents) if agent.poll()]
            culprits = [host for host in failed if not self.found(host, "lost")]
        if culprits:
            status = self.agents[culprits[0]].poll()
            raise self._failed(culprits[0], f"has ended with status {status}")
        what = self.found(lost[0], "lost") if lost else None
        raise self._failed(lost[0] if lost else failed[0], f"is lost: {(what or {}).get('what')}")

    def silent(self) -> bool:
        """Return True if no rank has reported anything for twice the timeout."""
        return time.monotonic() - self._heard_s > self._silence_s

    def await_loss(self, ranks: Sequence[int], timeout_s: float) -> float | None:
        """Waits until these ranks know that others are gone; returns when the last one knew.

        That is when their communication failed, or they ended. None: not within ``timeout_s``.
        """
        watches = {rank: PidWatch(self.pid(rank)) for rank in ranks}
        knew_s: dict[int, float] = {}
        try:
            deadline_s = time.monotonic() + timeout_s
            while len(knew_s) < len(watches) and time.monotonic() < deadline_s:
                gone = {rank for rank, watch in watches.items() if watch.ended()}
                self.poll()
                for rank in watches:
                    lost = self.found(rank, "lost")
                    if rank not in knew_s and (lost is not None or rank in gone):
                        knew_s[rank] = time.monotonic() if lost is None else lost["at_s"]
                time.sleep(_POLL_S)
        finally:
            for watch in watches.values():
                watch.close()
        if len(knew_s) < len(watches):
            return None
        return max(knew_s.values(), default=time.monotonic())

    def end(self) -> None:
        """Ends agents and trainers, as a scheduler does before it starts a job again; keepers,
        which are in sessions of their own, stay."""
        self._hosts.end_programs(self._order)
        for agent in self.agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(_REAP_S)
        self.poll()

    # --- Below --------------------------------------------------------------------------

    def _log(self, host: int) -> Path:
        return self._folder / f"{self.name}-{host}.log"

    def _failed(self, host: int, what: str) -> DrillError:
        try:
            tail = self._log(host).read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            tail = ""
        return DrillError(
            f"{self.name}: rank {host} {what}, at step {self.step(host)}; its last output:\n"
            f"{tail or '(nothing)'}",
            rank=host,
        )
