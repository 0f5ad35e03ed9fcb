"""Options of places that keep copies, as given by the user and validated once; the tiers that they
name.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from operator import attrgetter
from pathlib import PurePath, PurePosixPath
from typing import Any, TypeAlias, cast

from everstep.config import is_int, is_number
from everstep.config.given import checked, is_sequence
from everstep.errors import OptionError, UnavailableError
from everstep.seams import Clock, FileSystem
from everstep.seams.machine import is_in_memory, is_on_network, mounted_as
from everstep.tiers.contract import Tier
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.object import ObjectTier
from everstep.tiers.retry import RetryingTier

LOG_FORMS = ("none", "whole", "adaptive")
"""Form of log copies: none; exact; or approximate gradients (TierCheck, section 3.2).

Approximate: eight bits per element of small tensors, the largest elements of large ones.
"""

PEER = "peer"
"""Name of the place that the memory of other nodes is."""

_YEAR_S = 366 * 86_400.0
_VOLATILE_KINDS = ("memory", "peer")


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
        where: ``"s3://bucket/prefix"``, ``"gs://bucket/prefix"``, ``"az://container/prefix"``,
            the absolute path of a directory on another disk, or a :class:`Tier` of your own (see
            ``docs/TIERS.md``), of which the URL is kept.
        every_s: minimum seconds between two copies; the newest base is copied.
        keep: number of copies to keep; None: as many as bases.
        log: form of log copies, made in the background: ``"none"``, ``"whole"`` (exact), or
            ``"adaptive"``: approximate gradients with a hundredth of the bytes. A run that resumes
            from these is not exact, and reports it.
        log_steps: minimum steps per segment (TierCheck uses 5).
        log_ratio: for ``log="adaptive"``: fraction of a large gradient's elements that is kept.
        log_int8_below: gradients with fewer elements than this are small (TierCheck: 100,000).
        opens: class of a tier of your own, as ``"module:Class"``; called with the URL.
        module_dir: directory from which a keeper process imports that module.
    """

    where: str
    every_s: float = 0.0
    keep: int | None = None
    log: str = "none"
    log_steps: int = 5
    log_ratio: float = 0.01
    log_int8_below: int = 100_000
    opens: str = ""
    module_dir: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.where, PurePath):
            object.__setattr__(self, "where", str(self.where))
        own: Any = self.where
        if not isinstance(own, str) and callable(getattr(own, "put", None)):
            object.__setattr__(self, "opens", _name_of_class(own))
            object.__setattr__(self, "module_dir", _module_dir(type(own).__module__))
            object.__setattr__(self, "where", own.url)
        for name in ("opens", "module_dir"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"TierOptions.{name} must be text, not {getattr(self, name)!r}")
        if not isinstance(self.where, str) or not self.where:
            raise OptionError(f"a tier must be a URL or a directory, not {self.where!r}")
        if not is_number(self.every_s) or not 0 <= self.every_s <= _YEAR_S:
            raise OptionError(f"TierOptions.every_s must be seconds, not {self.every_s!r}")
        if self.keep is not None and (not is_int(self.keep) or self.keep < 1):
            raise OptionError(f"TierOptions.keep must be at least 1, not {self.keep!r}")
        _check_log("TierOptions", self.log, self.log_ratio, self.log_int8_below)
        if not is_int(self.log_steps) or self.log_steps < 1:
            raise OptionError(f"TierOptions.log_steps must be at least 1, not {self.log_steps!r}")

    def open(self, filesystem: FileSystem, clock: Clock) -> Tier:
        """Return the tier; see :func:`open_tier`."""
        return open_tier(
            self.where, filesystem, clock=clock, opens=self.opens, module_dir=self.module_dir
        )


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


Place: TypeAlias = "str | PurePath | Tier | TierOptions | PeerOptions"
"""An item of ``tiers=``."""


def split_peers(
    tiers: Sequence[Place], method_tiers: Sequence[str] = ()
) -> tuple[list[str | Tier | TierOptions], PeerOptions | None]:
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
    named = [PeerOptions() if one == PEER else one for one in plain]
    peers = [one for one in named if isinstance(one, PeerOptions)]
    if len(peers) > 1:
        raise OptionError("tiers= contains peers twice: each rank has one peer")
    rest = [one for one in named if not isinstance(one, PeerOptions)]
    implied = PeerOptions(if_there=True) if PEER in method_tiers else None
    return rest, peers[0] if peers else implied


def as_options(place: str | PurePath | Tier | TierOptions) -> TierOptions:
    """Return the options of a place."""
    given: Any = place
    return given if isinstance(given, TierOptions) else TierOptions(given)


def validate_tiers(
    tiers: Sequence[str | Tier | TierOptions],
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
    found = [as_options(one) for one in tiers]
    forms = [one.log for one in found] + ([peers.log] if peers is not None else [])
    # PeerOptions.log is "whole" by default, so only "adaptive" shows that the user wants it.
    if not logs and ("adaptive" in forms or any(one.log != "none" for one in found)):
        raise OptionError(
            "tiers= requests copies of the gradient log, but this method has no log",
            hint='use method="logged", or omit log= in TierOptions and PeerOptions',
        )
    return tuple(replace(one, every_s=float(one.every_s), keep=one.keep or keep) for one in found)


ENTRY_POINTS = "everstep.tiers"
"""Group of entry points: each names a URL scheme, and the class of its tiers."""

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


def survival_of(where: str) -> str:
    """Return the worst failure that a place for copies, or a run folder, survives: ``"rack"`` (a
    store, or a directory on a network file system), ``"machine"`` (a local disk, which is lost with
    its node), or ``"process"`` (a directory in memory).
    """
    if is_url(where):
        return "rack"
    kind = mounted_as(PurePath(where))
    if is_on_network(kind):
        return "rack"
    return "process" if is_in_memory(kind) else "machine"


def _name_of_class(tier: Tier) -> str:
    """Return the class of a user's tier as ``module:Class``.

    Raises:
        OptionError: a keeper process cannot open the tier.
    """
    kind = type(tier)
    hint = (
        "the keeper process opens the tier again, by its class and URL: put the class into a "
        'module that can be imported, and let its url be like "name://place"; see docs/TIERS.md'
    )
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise OptionError(f"{kind.__qualname__} cannot be imported by another process", hint=hint)
    if tier.traits.kind in _VOLATILE_KINDS:
        raise OptionError(
            f"a tier of kind {tier.traits.kind!r} cannot keep copies: it ends with its process",
            hint=hint,
        )
    if not isinstance(tier.url, str) or not is_url(tier.url):
        raise OptionError(f"the url of {kind.__qualname__} is {tier.url!r}, no URL", hint=hint)
    return f"{kind.__module__}:{kind.__qualname__}"


def _module_dir(module: str) -> str:
    """Return the directory from which a module, or the package that contains it, is imported."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:  # a namespace package, say: the keeper has to find it by itself
        return ""
    path = PurePath(file)
    return str(path.parent.parent if path.stem == "__init__" else path.parent)


def _tier_class(opens: str, module_dir: str) -> Callable[[str], Tier]:
    """Return the class of a user's tier.

    Raises:
        UnavailableError: it cannot be imported.
    """
    module, _, name = opens.partition(":")
    try:
        if module_dir and module_dir not in sys.path:
            sys.path.append(module_dir)
        return cast("Callable[[str], Tier]", attrgetter(name)(importlib.import_module(module)))
    # A user's module may raise anything.
    except Exception as error:
        raise UnavailableError(
            f"the class of a tier cannot be imported: {opens}: {error!r}",
            hint=f"make {module} importable for the keeper process ({sys.executable})",
        ) from error


def open_tier(
    where: str,
    filesystem: FileSystem,
    *,
    clock: Clock | None = None,
    opens: str = "",
    module_dir: str = "",
) -> Tier:
    """Return the tier at a URL (``s3://bucket/prefix``, ``gs://``, ``az://``) or in a directory.

    Does not access it; use :meth:`Tier.check` for that.

    Args:
        filesystem: file system of a directory.
        opens, module_dir: class of a user's tier; see :class:`TierOptions`.

    Raises:
        OptionError: it is neither a URL nor an absolute path.
        UnavailableError: the library for the store is not installed, or the class of a tier cannot
            be imported.
    """
    if is_url(where):
        own = metadata.entry_points(group=ENTRY_POINTS, name=where.partition("://")[0].lower())
        opens = opens or next((point.value for point in own), "")
        tier = _tier_class(opens, module_dir)(where) if opens else ObjectTier(where)
        return RetryingTier(tier, clock=clock)
    if not where or "\0" in where or not os.path.isabs(where):
        raise OptionError(
            f"{where!r} is not a valid place for copies of a run",
            hint="use a URL like s3://bucket/prefix, or the absolute path of a directory",
        )
    return DiskTier(filesystem, PurePath(os.path.normpath(where)))
