"""How state leaves the training process: a point on four independent axes, or a preset's name.

Base capture, log, apply and tiers are chosen independently of each other; what does not go together
is refused, by name and with what would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from everstep.config.given import checked, is_int, one_of
from everstep.errors import OptionError

__all__ = ["HELD_STEPS_MAX", "Method", "presets"]

HELD_STEPS_MAX = 8
_PARTS_MAX = 24
_CHUNK_BYTES_MIN = 4096
_TIERS = (("disk",), ("memory", "peer", "disk"))
_BASES = ("sync", "async", "lazy", "checkfreq", "multistep", "scheduled")


@checked
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
            the gradients that bring each part to the last of them (GoCkpt section 4). Several
            ranks end at one step, and call ``wait()`` and ``close()`` behind the same step.
            ``"scheduled"``: at every step, behind the next one, in an order and at places that are
            planned from how steps go (Checkflow section III); those that are due are persisted, of
            the others the keeper holds the newest whole one in memory. Several ranks take only
            those that are due, which may live in memory (``tiers``).
        log: the gradient log. ``"none"``: a run goes back to its last base. ``"dense"``: what
            each optimizer update consumed is recorded, so that every step can be recovered.
            ``"topk"``: the same of compressed training (LowDiff section V): every optimizer has
            an :class:`everstep.compress.Compressor` in the state, whose forms are recorded, or
            DDP's ranks exchange its gradients by a ``DDPCompression`` that is in the state.
            ``"adaptive"``: lossy copies of the gradients, in eight bits or the largest ones only
            (TierCheck section 3.2), while training consumes whole ones. What such a log recovers
            is an approximation, said to be ``exact=False`` then and in all that descends from it.
        apply: when logged gradients are applied. ``"recovery"``: when a run is resumed.
            ``"replica"``: each step, as soon as it is whole, to a copy of the state in the memory
            of the keeper process, which then persists its bases from there (LowDiff+, section VI).
        tiers: where bases live. ``("disk",)``; or ``("memory", "peer", "disk")``: in the memory of
            the keeper process, and of the one on the next node, if there is one (GEMINI, as the
            papers describe it); and each ``disk_every``-th on disk. Places that keep copies are
            another thing (``Checkpointer(tiers=)``).
        disk_every: of bases that live in memory: each how manieth is written to disk.
        parts: of ``base="multistep"``: into how many the state is cut, each of which takes a step;
            ``"auto"``: as many as hold training up least, by what is measured.
        overlap_forward: of ``base="multistep"``: the copies of gradients run on behind the update
            and the next forward (GoCkpt-O); False: the update waits for them (GoCkpt).
        held_steps: of ``overlap_forward``: for how many updates of their optimizer gradients may be
            kept on the device until they are copied, 1 to 8. The next update waits for no more than
            that: where gradients are much of the link, more than 1 holds training up less, for
            device memory of up to so many steps' gradients (``everstep plan multistep
            --held-steps``). Parts of the state are copied before gradients that may still wait.
        chunk_bytes: of ``base="multistep"``: that are copied in one go, for which whatever is more
            urgent waits; ``"auto"``: 4 MiB (GoCkpt section 4.4.2) until the link has been measured,
            and then what it copies in a millisecond, if that is less.
        rebuild: of ``base="multistep"``: who brings its parts to one step. ``"keeper"``: the keeper
            process, before it writes them, with the CPU's arithmetic. ``"recovery"``: parts and
            gradients are written as they were captured, and whoever restores the base runs the
            optimizers over them: one rank on the device and with the kernels of training, several
            ranks on the CPU.
    """

    base: str = "lazy"
    log: str = "none"
    apply: str = "recovery"
    tiers: tuple[str, ...] = ("disk",)
    disk_every: int = 1
    parts: int | str = "auto"
    overlap_forward: bool = False
    held_steps: int = 1
    chunk_bytes: int | str = "auto"
    rebuild: str = "keeper"

    def __post_init__(self) -> None:
        one_of("base", self.base, _BASES)
        one_of("log", self.log, ("none", "dense", "topk", "adaptive"))
        one_of("apply", self.apply, ("recovery", "replica"))
        one_of("rebuild", self.rebuild, ("keeper", "recovery"))
        for tier in self.tiers if isinstance(self.tiers, tuple) else ():
            one_of("tier", tier, ("memory", "peer", "disk"))
        if self.log != "none" and self.base == "sync":
            raise OptionError(
                f"log={self.log!r} needs host memory, which base='sync' has none of",
                hint="base='lazy'",
            )
        if self.apply == "replica" and self.log == "none":
            raise OptionError(
                "apply='replica' needs a log to apply", hint="log='dense', or log='topk'"
            )
        if self.apply == "replica" and self.log == "adaptive":
            raise OptionError(
                "apply='replica' writes its copy as bases, and log='adaptive' would let that drift "
                "from what training has",
                hint="log='dense' with the replica, or apply='recovery'",
            )
        if self.base == "scheduled" and self.log != "none":
            raise OptionError(
                f"base='scheduled' captures every step: there is nothing left for log={self.log!r}",
                hint="base='lazy' with the log, or log='none'",
            )
        self._check_multistep()
        self._check_tiers()

    @property
    def in_memory(self) -> bool:
        """Whether most bases live in memory only."""
        return "memory" in self.tiers

    def _check_tiers(self) -> None:
        if self.tiers not in _TIERS:
            known = ", ".join(map(str, _TIERS))
            raise OptionError(f"Method.tiers must be one of {known}, not {self.tiers!r}")
        if not is_int(self.disk_every) or self.disk_every < 1:
            raise OptionError(f"Method.disk_every must be at least 1, not {self.disk_every!r}")
        if not self.in_memory:
            if self.disk_every != 1:
                raise OptionError(
                    "Method.disk_every is of bases that live in memory; tiers=('disk',) writes "
                    "each one",
                    hint="tiers=('memory', 'peer', 'disk'), or a longer every=",
                )
            return
        if self.base not in ("async", "lazy", "scheduled") or self.log != "none":
            raise OptionError(
                f"bases live in memory with base='async', 'lazy' or 'scheduled' and without a log, "
                f"not with base={self.base!r} and log={self.log!r}",
                hint="method='gemini', or tiers=('disk',)",
            )

    def _check_multistep(self) -> None:
        parts = self.parts
        if parts != "auto" and (not is_int(parts) or not 1 <= int(parts) <= _PARTS_MAX):
            raise OptionError(
                f'Method.parts must be "auto" or 1 to {_PARTS_MAX}, not {parts!r}',
                hint='parts="auto" takes as many as hold training up least',
            )
        if not isinstance(self.overlap_forward, bool):
            raise OptionError(
                f"Method.overlap_forward must be True or False, not {self.overlap_forward!r}"
            )
        held = self.held_steps
        if not is_int(held) or not 1 <= held <= HELD_STEPS_MAX:
            raise OptionError(
                f"Method.held_steps must be 1 to {HELD_STEPS_MAX}, not {held!r}",
                hint="everstep plan multistep --held-steps shows what it is worth",
            )
        if held != 1 and not self.overlap_forward:
            raise OptionError(
                "held_steps is of overlap_forward=True: otherwise updates wait for their gradients"
            )
        chunk = self.chunk_bytes
        if chunk != "auto" and (not is_int(chunk) or int(chunk) < _CHUNK_BYTES_MIN):
            raise OptionError(
                f'Method.chunk_bytes must be "auto" or at least {_CHUNK_BYTES_MIN}, not {chunk!r}',
                hint='chunk_bytes="auto" takes what the link copies in a millisecond',
            )
        if self.base != "multistep":
            if (
                parts != "auto"
                or self.overlap_forward
                or held != 1
                or chunk != "auto"
                or self.rebuild != "keeper"
            ):
                raise OptionError(
                    "parts, overlap_forward, held_steps, chunk_bytes and rebuild are of "
                    f"base='multistep', not of {self.base!r}",
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
        "gemini": Method(base="lazy", tiers=("memory", "peer", "disk"), disk_every=10),
    }
)
"""Named methods: what ``method="name"`` stands for."""
