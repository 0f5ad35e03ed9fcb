"""Options of places that keep copies, as given by the user and validated once; the tiers that they
name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath, PurePosixPath

from everstep.config import is_int, is_number
from everstep.config.given import checked, is_sequence
from everstep.errors import OptionError
from everstep.seams import Clock, FileSystem
from everstep.tiers.contract import Tier
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.object import ObjectTier
from everstep.tiers.retry import RetryingTier

LOG_FORMS = ("none", "whole", "adaptive")
"""Form of log copies: none; exact; or approximate gradients (TierCheck, section 3.2).

Approximate: eight bits per element of small tensors, the largest elements of large ones.
"""

_YEAR_S = 366 * 86_400.0


def _check_log(kind: str, log: object, ratio: object, int8_below: object) -> None:
    if log not in LOG_FORMS:
        raise OptionError(f"{kind}.log must be one of {', '.join(LOG_FORMS)}, not {log!r}")
    if not is_number(ratio) or not 0 < ratio <= 1:  # type: ignore[operator]
        raise OptionError(f"{kind}.log_ratio must be in (0, 1], not {ratio!r}")
    if not is_int(int8_below) or int8_below < 0:  # type: ignore[operator]
        raise OptionError(f"{kind}.log_int8_below must be at least 0, not {int8_below!r}")


@checked
@dataclass(frozen=True, slots=True)
class TierOptions:
    """A place that keeps copies of committed bases.

    Attributes:
        where: ``"s3://bucket/prefix"``, ``"gs://bucket/prefix"``, ``"az://container/prefix"``, or
            the absolute path of a directory on another disk.
        every_s: minimum seconds between two copies; the newest base is copied.
        keep: number of copies to keep; None: as many as bases.
        log: form of log copies, made in the background: ``"none"``, ``"whole"`` (exact), or
            ``"adaptive"``: approximate gradients with a hundredth of the bytes. A run that resumes
            from these is not exact, and reports it.
        log_steps: minimum steps per segment (TierCheck uses 5).
        log_ratio: for ``log="adaptive"``: fraction of a large gradient's elements that is kept.
        log_int8_below: gradients with fewer elements than this are small (TierCheck: 100,000).
    """

    where: str
    every_s: float = 0.0
    keep: int | None = None
    log: str = "none"
    log_steps: int = 5
    log_ratio: float = 0.01
    log_int8_below: int = 100_000

    def __post_init__(self) -> None:
        if isinstance(self.where, PurePath):
            object.__setattr__(self, "where", str(self.where))
        if not isinstance(self.where, str) or not self.where:
            raise OptionError(f"a tier must be a URL or a directory, not {self.where!r}")
        if not is_number(self.every_s) or not 0 <= self.every_s <= _YEAR_S:
            raise OptionError(f"TierOptions.every_s must be seconds, not {self.every_s!r}")
        if self.keep is not None and (not is_int(self.keep) or self.keep < 1):
            raise OptionError(f"TierOptions.keep must be at least 1, not {self.keep!r}")
        _check_log("TierOptions", self.log, self.log_ratio, self.log_int8_below)
        if not is_int(self.log_steps) or self.log_steps < 1:
            raise OptionError(f"TierOptions.log_steps must be at least 1, not {self.log_steps!r}")


@checked
@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The memory of another node as a tier; ``"peer"`` means ``PeerOptions()``.

    Attributes:
        bytes_per_s: maximum bytes per second that each rank's keeper sends. None: a base takes four
            fifths of the time between two bases (TierCheck, section 3.2).
        host_bytes: maximum bytes of copies held here for other ranks, a share of
            ``Budget.host_bytes``. None: half of it.
        emulated_node: name of a node, for tests and drills on one machine: ranks with the same name
            count as one node. A copy on the same machine protects nothing.
        if_there: True: if there is no other node, nothing is sent, without an error.
        log: form of the log that is sent: ``"whole"``, ``"adaptive"`` or ``"none"`` (see
            :class:`TierOptions`).
        log_ratio: for ``log="adaptive"``: fraction of a large gradient's elements that is kept.
        log_int8_below: gradients with fewer elements than this are small.
    """

    bytes_per_s: float | None = None
    host_bytes: int | None = None
    emulated_node: str | None = None
    if_there: bool = False
    log: str = "whole"
    log_ratio: float = 0.01
    log_int8_below: int = 100_000

    def __post_init__(self) -> None:
        _check_log("PeerOptions", self.log, self.log_ratio, self.log_int8_below)
        for name in ("bytes_per_s", "host_bytes"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise OptionError(f"PeerOptions.{name} must be above 0, not {value!r}")
        node = self.emulated_node
        if node is not None and (not isinstance(node, str) or not node):
            raise OptionError(f"PeerOptions.emulated_node must be a name, not {node!r}")


def split_peers(
    tiers: Sequence[str | PurePath | TierOptions | PeerOptions], method_tiers: Sequence[str] = ()
) -> tuple[list[str | TierOptions], PeerOptions | None]:
    """Split ``tiers=`` into places and peer options; None: no peers.

    Args:
        method_tiers: where the method keeps its bases; if ``"peer"`` is among them, peers are used
            by default.

    Raises:
        OptionError: peers were given twice, or ``tiers`` is not a list.
    """
    if not is_sequence(tiers):
        places = isinstance(tiers, (str, PurePath, TierOptions, PeerOptions))
        hint = f"use tiers=[{tiers!r}]" if places else 'for example tiers=["s3://bucket/prefix"]'
        raise OptionError(f"tiers={tiers!r} must be a list of places", hint=hint)
    plain = [str(one) if isinstance(one, PurePath) else one for one in tiers]
    named = [PeerOptions() if one == "peer" else one for one in plain]
    peers = [one for one in named if isinstance(one, PeerOptions)]
    if len(peers) > 1:
        raise OptionError("tiers= contains peers twice: each rank has one peer")
    rest = [one for one in named if not isinstance(one, PeerOptions)]
    implied = PeerOptions(if_there=True) if "peer" in method_tiers else None
    return rest, peers[0] if peers else implied


def validate_tiers(
    tiers: Sequence[str | TierOptions],
    keep: int,
    peers: PeerOptions | None = None,
    *,
    logs: bool = False,
) -> tuple[TierOptions, ...]:
    """Return the options of the places that a user has given.

    Args:
        keep: number of bases on disk; default of ``TierOptions.keep``.
        logs: True if there is a gradient log.

    Raises:
        OptionError: log copies were requested without a log.
    """
    found = [one if isinstance(one, TierOptions) else TierOptions(one) for one in tiers]
    forms = [one.log for one in found] + ([peers.log] if peers is not None else [])
    # PeerOptions.log is "whole" by default, so only "adaptive" shows that the user wants it.
    if not logs and ("adaptive" in forms or any(one.log != "none" for one in found)):
        raise OptionError(
            "tiers= requests copies of the gradient log, but this method has no log",
            hint='use method="logged", or omit log= in TierOptions and PeerOptions',
        )
    return tuple(replace(one, every_s=float(one.every_s), keep=one.keep or keep) for one in found)


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_ONE_SLASH = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


class UrlPath(PurePosixPath):
    """A path below a URL. Plain paths would print ``s3://x`` as ``s3:/x``."""

    __slots__ = ()

    def __str__(self) -> str:
        return _ONE_SLASH.sub(r"\1://", super().__str__())


def is_url(text: str) -> bool:
    """Return True if the text is a URL, not a path."""
    return _URL.match(text) is not None


def open_tier(where: str, filesystem: FileSystem, *, clock: Clock | None = None) -> Tier:
    """Return the tier at a URL (``s3://bucket/prefix``, ``gs://``, ``az://``) or in a directory.

    Does not access it; use :meth:`Tier.check` for that.

    Args:
        filesystem: file system of a directory.

    Raises:
        OptionError: it is neither a URL nor an absolute path.
        UnavailableError: the library for the store is not installed.
    """
    if is_url(where):
        return RetryingTier(ObjectTier(where), clock=clock)
    if not where or "\0" in where or not os.path.isabs(where):
        raise OptionError(
            f"{where!r} is not a valid place for copies of a run",
            hint="use a URL like s3://bucket/prefix, or the absolute path of a directory",
        )
    return DiskTier(filesystem, PurePath(os.path.normpath(where)))
