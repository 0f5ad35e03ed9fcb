"""Ways to be recoverable that a drill compares, all on the same engine.

What each arm comes back from is what its system has (TierCheck section 5.1). CheckFreq and
DataStates-LLM write to a durable tier that all hosts share, from threads of the training process,
so nothing of them outlives it. GEMINI keeps states in the host memory of two machines, in a
process beside the trainer, and seldom writes one to the durable tier. everstep's own methods have a
keeper beside every trainer: where that survives, its memory is a source, too. With a run folder on
the hosts' own disks a method needs tiers or peers; without them what only a lost host had is lost.

The durable tier is a folder that all hosts see, on this machine's disk: no link is in between, in
no arm. That is kinder to the arms which read all their state from it than the paper's testbed is.
With a store (:mod:`everstep_bench.drill.store`) it is a real object store behind the same link of
each host for all arms. What arms would write to a shared folder then goes to the host's disk and,
by a keeper process, on from there. Of systems that write to the durable tier alone (TierCheck,
Table 1: "full remote checkpoint fetch") disks and keepers go before a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

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
