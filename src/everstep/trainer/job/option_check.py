"""What every rank of a job has to be told alike, compared where they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from everstep.config.options import Options, presets
from everstep.errors import ForeignDirectoryError, OptionError, RecoveryError, StateError
from everstep.seams.processes.processes import configured_cores
from everstep.state.ranks.ranks import RankInfo
from everstep.tiers.options import TierOptions

__all__ = [
    "refuse_errors",
    "refuse_other_calls",
    "refuse_other_options",
    "refuse_unaudited",
    "refuse_unsupported",
    "same_as_copies",
    "same_run",
    "shared_options",
]


def shared_options(options: Options) -> dict[str, str]:
    """Options by which ranks do things together, as text. Not those that are of a rank's machine
    (cores, budgets, how its link is used and a segment is written), nor what it does with errors,
    nor how long it waits."""
    every = options.every
    log = options.log
    method = replace(options.method, **_OF_A_LINK)
    named = next((name for name, one in presets.items() if one == method), None)
    when = "auto" if every.auto else every.steps
    found = {
        "method": repr(named or method),
        "every": repr(when if every.seconds is None else f"{every.seconds:g}s"),
        "keep": repr(options.keep),
    }
    if every.mtbf_s is not None:
        found["Every.mtbf_s"] = repr(every.mtbf_s)
    if options.logs:
        found |= {f"LogOptions.{name}": repr(getattr(log, name)) for name in _OF_LOG}
    return found


_OF_A_LINK: dict[str, Any] = {"parts": "auto", "held_steps": 1, "chunk_bytes": "auto"}
_OF_LOG = ("to", "history", "watch", "lag_steps")


def refuse_other_options(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Each rank would take bases at steps of its own, or other ones, and the others wait for it.

    Args:
        found: by rank: ``"options"`` as each has said.
        rank: this one.

    Raises:
        OptionError: naming what differs, and the ranks.
    """
    for name in dict.fromkeys(name for said in found for name in said["options"]):
        ranks: dict[str, list[int]] = {}
        for other, said in enumerate(found):
            ranks.setdefault(said["options"].get(name, "none"), []).append(other)
        if len(ranks) > 1:
            listed = "; ".join(
                f"rank(s) {' '.join(map(str, each))}: {value}" for value, each in ranks.items()
            )
            raise OptionError(
                f"the ranks were given different values of {name} ({listed})",
                rank=rank,
                hint=f"give every rank the same {name.partition('.')[0]}",
            )


def same_run(found: Sequence[Mapping[str, Any]], rank: int) -> str:
    """The run that all of the ranks' folders are of.

    Raises:
        RecoveryError: they are of different ones.
    """
    runs = {said["run"]: other for other, said in enumerate(found) if said["run"] is not None}
    if len(runs) > 1:
        where = ", ".join(f"rank {other}: run {run}" for run, other in sorted(runs.items()))
        raise RecoveryError(
            f"the ranks see different runs ({where})",
            rank=rank,
            hint="give every rank the same run folder, or remove those of other runs",
        )
    return str(next(iter(runs), found[0]["name"]))


def same_as_copies(run: str | None, copied: str | None, path: PurePath) -> str | None:
    """The run that a folder and the places for copies are of; None: they are of none yet.

    Raises:
        ForeignDirectoryError: they are of different ones.
    """
    if None not in (run, copied) and run != copied:
        raise ForeignDirectoryError(
            f"the places for copies hold those of another run than {path}",
            path=path,
            hint="give each run a place of its own",
        )
    return run if run is not None else copied


def refuse_errors(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Of a rank that cannot open its run folder.

    Raises:
        StateError: saying so.
    """
    for other, said in enumerate(found):
        if said["error"] is not None:
            raise StateError(
                f"rank {other} cannot open its run folder: {said['error']}",
                rank=rank,
                hint="look at what that rank prints",
            )


def refuse_other_calls(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Ranks start in different ways.

    Raises:
        StateError: saying which.
    """
    if len({said["what"] for said in found}) > 1:
        calls = "; ".join(f"rank {other}: {said['what']}" for other, said in enumerate(found))
        raise StateError(
            f"the ranks do different things ({calls})",
            rank=rank,
            hint="every rank calls resume() with the same step, or none does",
        )


def refuse_unsupported(info: RankInfo, options: Options, tiers: Sequence[TierOptions]) -> None:
    """Raises:
    OptionError: for what this machine has not, or what several ranks cannot do together.
    """
    cores = options.keeper.cores
    if cores is not None and min(cores) >= configured_cores():
        raise OptionError(
            f"KeeperOptions.cores={cores!r}: this machine has none of them, its cores are 0 to "
            f"{configured_cores() - 1}",
            hint="cores=None: wherever the training process may run",
        )
    if info.world == 1:
        return
    if any((tier.objects_per_hour or info.world) < info.world for tier in tiers):
        raise OptionError(
            f"this job has {info.world} ranks: TierOptions.objects_per_hour is shared by all of "
            "them, and is less than one for each",
            rank=info.rank,
            hint=f"TierOptions(objects_per_hour={info.world}) or more",
        )


def refuse_unaudited(info: RankInfo, options: Options) -> None:
    """Called when the ranks know whose folders are the same.

    Raises:
        OptionError: audits are asked for, and no rank sees whole bases, and the logs of all.
    """
    if options.log.audit and info.near is not None:
        raise OptionError(
            f"this job has {info.world} ranks: LogOptions(audit=True) takes a folder that all of "
            "them share: an audit reads whole bases, and the logs of all ranks",
            rank=info.rank,
            hint="audit=None; or one folder for all ranks",
        )
