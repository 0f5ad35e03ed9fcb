"""Checkpointing methods: a :class:`Method` has four independent choices; presets are named methods.

The choices are base capture, log, apply and tiers. Combinations that cannot work are refused with a
combination that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

from everstep.config.given import checked, is_int, one_of
from everstep.errors import OptionError

HELD_STEPS_MAX = 8
# The same as everstep.plan.multistep.PARTS_MAX, the most parts that "auto" chooses.
_PARTS_MAX = 24
_CHUNK_BYTES_MIN = 4096
_TIERS = (("disk",), ("memory", "peer", "disk"))
_BASES = ("sync", "async", "lazy", "checkfreq", "multistep", "scheduled")


@checked
@dataclass(frozen=True, slots=True)
class Method:
    """Method by which state leaves the training process.

    Attributes:
        base: base capture.

            - ``"sync"``: training waits until the base is durable.
            - ``"async"``: training waits for a copy in host memory; the base is persisted from
              there while training continues.
            - ``"lazy"``: the copy overlaps with the next forward and backward pass and the next
              update waits for it; bytes are persisted as they arrive (DataStates-LLM, section V).
            - ``"checkfreq"``: copied as in ``"lazy"``, persisted only after the copy is complete,
              one base at a time (CheckFreq, as the papers describe it).
            - ``"multistep"``: the copy is spread over several steps. Each step copies one part of
              the state, and the gradients that bring earlier parts to the last step (GoCkpt,
              section 4). All ranks end a base at the same step and must call ``wait()`` and
              ``close()`` after the same step. With a log its records are these gradients: they
              are captured once.
            - ``"scheduled"``: every step is captured during the next one, tensor by tensor, in an
              order planned from the memory use of the step (Checkflow, section III). Bases that
              are due are persisted; of the others the keeper holds the newest complete one in
              memory. Each keeper of several ranks holds the newest three, from which the ranks
              choose one that all have; with ``tiers`` in memory only due bases are captured.
        log: the gradient log.

            - ``"none"``: no log; a run resumes from its newest base.
            - ``"dense"``: record the gradients that each optimizer update consumed, so that every
              step can be recovered.
            - ``"topk"``: record compressed gradients of compressed training (LowDiff, section V).
              Every optimizer needs an :class:`everstep.compress.Compressor` in the state, or DDP
              exchanges gradients through a ``DDPCompression`` that is in the state.
            - ``"adaptive"``: record lossy copies of the gradients, eight bits per element or the
              largest elements only (TierCheck, section 3.2), while training consumes full
              gradients. A state recovered from it is an approximation: it and all states that
              descend from it have ``exact=False``.
        apply: when logged gradients are applied. ``"recovery"``: when a run resumes.
            ``"replica"``: after each step, to a copy of the state in the memory of the keeper
            process, which persists bases from that copy (LowDiff+, section VI).
        tiers: where bases are kept. ``("disk",)``, or ``("memory", "peer", "disk")``: in the memory
            of the keeper process and of the keeper on the next node, if there is one (GEMINI, as
            the papers describe it), and every ``disk_every``-th base on disk. Tiers that hold
            copies of bases are a separate option (``Checkpointer(tiers=)``).
        disk_every: for bases kept in memory: write every ``disk_every``-th one to disk.
        parts: for ``base="multistep"``: number of parts, one per step. ``"auto"``: the number that
            delays training least, from measurements.
        overlap_forward: for ``base="multistep"``: gradient copies continue during the update and
            the next forward pass (GoCkpt-O). False: the update waits for them (GoCkpt).
        held_steps: for ``overlap_forward``: number of updates, 1 to 8, for which gradients may be
            kept on the device until they are copied. More than 1 delays training less where
            gradients take much of the link, at the cost of device memory for the gradients of that
            many steps (``everstep plan multistep --held-steps``). Parts of the state are copied
            before gradients that may still wait.
        chunk_bytes: for ``base="multistep"``: bytes copied in one operation; more urgent copies
            wait for at most one. ``"auto"``: 4 MiB (GoCkpt, section 4.4.2), or less once the link
            has been measured: the bytes it copies in a millisecond.
        rebuild: for ``base="multistep"``: where the parts are brought to one step. ``"keeper"``: in
            the keeper process before it writes them, with CPU arithmetic. ``"recovery"``: parts
            and gradients are written as captured, and the process that restores the base runs the
            optimizers on them; one rank uses the device and kernels of training, several ranks
            use the CPU.
        plan: for ``base="scheduled"``: file written by ``everstep plan schedule --out``, which is
            followed instead of a plan made from the first steps. Its state must be ``{"model":
            ..., "optimizer": ...}``, and its steps those of the traced model.
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
    plan: str | None = None

    def __post_init__(self) -> None:
        one_of("base", self.base, _BASES)
        one_of("log", self.log, ("none", "dense", "topk", "adaptive"))
        one_of("apply", self.apply, ("recovery", "replica"))
        one_of("rebuild", self.rebuild, ("keeper", "recovery"))
        for tier in self.tiers if isinstance(self.tiers, tuple) else ():
            one_of("tier", tier, ("memory", "peer", "disk"))
        if self.log != "none" and self.base == "sync":
            raise OptionError(
                f"log={self.log!r} needs host memory for the log, and base='sync' allocates none",
                hint="base='lazy'",
            )
        if self.apply == "replica" and self.log == "none":
            raise OptionError(
                "apply='replica' needs a log to apply", hint="log='dense', or log='topk'"
            )
        if self.apply == "replica" and self.log == "adaptive":
            raise OptionError(
                "apply='replica' writes its copy of the state as bases, and with log='adaptive' "
                "that copy would drift from the state of training",
                hint="log='dense' with the replica, or apply='recovery'",
            )
        if self.base == "scheduled" and self.log != "none":
            raise OptionError(
                f"base='scheduled' captures every step: log={self.log!r} would add nothing",
                hint="base='lazy' with the log, or log='none'",
            )
        if isinstance(self.plan, PurePath):
            object.__setattr__(self, "plan", str(self.plan))
        if self.plan is not None and self.base != "scheduled":
            raise OptionError(
                f"Method.plan is followed with base='scheduled', not with base={self.base!r}",
                hint="Method(base='scheduled', plan=...)",
            )
        self._check_multistep()
        self._check_tiers()

    @property
    def in_memory(self) -> bool:
        """True if most bases are kept in memory only."""
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
                    "Method.disk_every applies to bases that are kept in memory; tiers=('disk',) "
                    "writes every base to disk",
                    hint="tiers=('memory', 'peer', 'disk'), or a longer every=",
                )
            return
        if self.base not in ("async", "lazy", "scheduled") or self.log != "none":
            raise OptionError(
                f"bases can be kept in memory with base='async', 'lazy' or 'scheduled' and without "
                f"a log, not with base={self.base!r} and log={self.log!r}",
                hint="method='gemini', or tiers=('disk',)",
            )

    def _check_multistep(self) -> None:
        parts = self.parts
        if parts != "auto" and (not is_int(parts) or not 1 <= int(parts) <= _PARTS_MAX):
            raise OptionError(
                f'Method.parts must be "auto" or 1 to {_PARTS_MAX}, not {parts!r}',
                hint='parts="auto" chooses the number that delays training least',
            )
        held = self.held_steps
        if not is_int(held) or not 1 <= held <= HELD_STEPS_MAX:
            raise OptionError(
                f"Method.held_steps must be 1 to {HELD_STEPS_MAX}, not {held!r}",
                hint="everstep plan multistep --held-steps shows its effect",
            )
        if held != 1 and not self.overlap_forward:
            raise OptionError(
                "held_steps needs overlap_forward=True: otherwise updates wait for their gradients"
            )
        chunk = self.chunk_bytes
        if chunk != "auto" and (not is_int(chunk) or int(chunk) < _CHUNK_BYTES_MIN):
            raise OptionError(
                f'Method.chunk_bytes must be "auto" or at least {_CHUNK_BYTES_MIN}, not {chunk!r}',
                hint='chunk_bytes="auto" chooses the bytes that the link copies in a millisecond',
            )
        if self.base != "multistep":
            own = (parts, self.overlap_forward, held, chunk, self.rebuild)
            if own != ("auto", False, 1, "auto", "keeper"):
                raise OptionError(
                    "parts, overlap_forward, held_steps, chunk_bytes and rebuild need "
                    f"base='multistep', not base={self.base!r}",
                    hint="base='multistep'",
                )
            return
        if self.log != "none":
            self._check_multistep_log()

    def _check_multistep_log(self) -> None:
        """Check a multi-step base whose gradients are those of the log."""
        if self.log == "adaptive":
            raise OptionError(
                "base='multistep' with log='adaptive' would bring parts to one step with lossy "
                "gradients: such a base is no state of training",
                hint="log='dense', or base='lazy'",
            )
        if self.apply == "replica":
            raise OptionError(
                "apply='replica' writes its copy of the state as bases: base='multistep' would "
                "capture none",
                hint="base='lazy' with the replica, or apply='recovery'",
            )
        if self.overlap_forward:
            raise OptionError(
                f"overlap_forward=True and log={self.log!r} exclude each other: an update ends "
                "when the log has its gradients",
                hint="overlap_forward=False",
            )
        if self.rebuild == "recovery":
            raise OptionError(
                f"rebuild='recovery' and log={self.log!r} exclude each other: the gradients would "
                "be written twice",
                hint="rebuild='keeper'",
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
        "tiercheck": Method(base="lazy", log="dense"),
        "gockpt": Method(base="multistep"),
        "gockpt_o": Method(base="multistep", overlap_forward=True),
        "checkflow": Method(base="scheduled"),
        "gemini": Method(base="lazy", tiers=("memory", "peer", "disk"), disk_every=10),
    }
)
"""Methods by preset name, as in ``method="lazy"``."""

AUTO = "auto"
"""Name of the method that is chosen at each start."""
