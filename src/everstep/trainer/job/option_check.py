"""Checks that all ranks were given the same options, and that the machine and job support them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from everstep.config import Options, presets
from everstep.errors import ForeignDirectoryError, OptionError, RecoveryError, StateError
from everstep.seams.processes.processes import configured_cores
from everstep.state.ranks import RankInfo
from everstep.tiers import TierOptions


def shared_options(options: Options) -> dict[str, str]:
    """Return the options that must be the same on all ranks, as text.

    Not included are options that belong to a rank's machine (cores, budgets, use of its link, size
    of segments), the failure policy, and timeouts.
    """
    every = options.every
    log = options.log
    # Options of a rank's link get one value here, so that they neither differ nor hide a preset.
    method = replace(options.method, **_LINK_OPTIONS)
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
        found |= {f"LogOptions.{name}": repr(getattr(log, name)) for name in _LOG_OPTIONS}
    return found


_LINK_OPTIONS: dict[str, Any] = {"parts": "auto", "held_steps": 1, "chunk_bytes": "auto"}
_LOG_OPTIONS = ("to", "history", "watch", "lag_steps")


def refuse_other_options(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse different options: ranks would take different bases, and wait for each other.

    Args:
        found: message of each rank, with its ``"options"``.
        rank: this rank.

    Raises:
        OptionError: Naming the option, its values, and the ranks.
    """
    for name in dict.fromkeys(name for message in found for name in message["options"]):
        ranks: dict[str, list[int]] = {}
        for other, message in enumerate(found):
            ranks.setdefault(message["options"].get(name, "none"), []).append(other)
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
    """Return the run that the folders of all ranks belong to.

    Raises:
        RecoveryError: They belong to different runs.
    """
    runs = {
        message["run"]: other for other, message in enumerate(found) if message["run"] is not None
    }
    if len(runs) > 1:
        where = ", ".join(f"rank {other}: run {run}" for run, other in sorted(runs.items()))
        raise RecoveryError(
            f"the ranks see different runs ({where})",
            rank=rank,
            hint="give every rank the same run folder, or remove those of other runs",
        )
    return str(next(iter(runs), found[0]["name"]))


def same_as_copies(run: str | None, copied: str | None, path: PurePath) -> str | None:
    """Return the run that a folder and its places for copies belong to; None for no run yet.

    Raises:
        ForeignDirectoryError: They belong to different runs.
    """
    if None not in (run, copied) and run != copied:
        raise ForeignDirectoryError(
            f"the places for copies contain another run than {path}",
            path=path,
            hint="give each run its own place for copies",
        )
    return run if run is not None else copied


def refuse_errors(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse to continue if a rank cannot open its run folder.

    Raises:
        StateError: Naming the rank and its error.
    """
    for other, message in enumerate(found):
        if message["error"] is not None:
            raise StateError(
                f"rank {other} cannot open its run folder: {message['error']}",
                rank=rank,
                hint="see the output of that rank",
            )


def refuse_other_calls(found: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse ranks that start in different ways.

    Raises:
        StateError: Naming the calls.
    """
    if len({message["what"] for message in found}) > 1:
        calls = "; ".join(f"rank {other}: {message['what']}" for other, message in enumerate(found))
        raise StateError(
            f"the ranks make different calls ({calls})",
            rank=rank,
            hint="call resume() with the same step on every rank, or on none",
        )


def refuse_unsupported(info: RankInfo, options: Options, tiers: Sequence[TierOptions]) -> None:
    """Refuse options that this machine or a job of several ranks cannot support.

    Raises:
        OptionError: Naming the option.
    """
    cores = options.keeper.cores
    if cores is not None and min(cores) >= configured_cores():
        raise OptionError(
            f"KeeperOptions.cores={cores!r}: this machine has only the cores 0 to "
            f"{configured_cores() - 1}",
            hint="cores=None uses the cores of the training process",
        )
    if info.world == 1:
        return
    if any((tier.objects_per_hour or info.world) < info.world for tier in tiers):
        raise OptionError(
            f"this job has {info.world} ranks, which share TierOptions.objects_per_hour: it is "
            "less than one for each rank",
            rank=info.rank,
            hint=f"TierOptions(objects_per_hour={info.world}) or more",
        )


def refuse_unaudited(info: RankInfo, options: Options) -> None:
    """Refuse audits if the ranks have different folders.

    Called after the ranks have found out which of them share a folder.

    Raises:
        OptionError: Audits are requested, and no rank sees complete bases and all logs.
    """
    if options.log.audit and info.near is not None:
        raise OptionError(
            f"this job has {info.world} ranks: LogOptions(audit=True) needs a folder that all of "
            "them share, because an audit reads complete bases and the logs of all ranks",
            rank=info.rank,
            hint="audit=None; or one folder for all ranks",
        )
