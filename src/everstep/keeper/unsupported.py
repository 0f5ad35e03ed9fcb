"""What this machine has not, or several ranks cannot do together, refused before all else."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.errors import OptionError
from everstep.options import History, Options
from everstep.seams.processes import configured_cores
from everstep.state.ranks import RankInfo
from everstep.tiers.options import TierOptions

__all__ = ["refuse_unsupported"]


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
    every, method = options.every, options.method
    why, hint = "", 'method="lazy", every=100 (steps)'
    if method.base not in ("sync", "async", "lazy"):
        why = f"base={method.base!r} is for one rank; with several: 'sync', 'async' or 'lazy'"
    elif options.logs and (why_not := _why_no_log(options)):
        why, hint = why_not, 'method="logged", with log=LogOptions(to=, batch_steps=, lag_steps=)'
    elif every.auto or every.seconds is not None:
        why = "every= must be a number of steps: ranks would not agree on when a time is over"
        hint = "every=100 (steps)"
    elif any((tier.objects_per_hour or info.world) < info.world for tier in tiers):
        why = "TierOptions.objects_per_hour is shared by all ranks, and is less than one for each"
        hint = f"TierOptions(objects_per_hour={info.world}) or more"
    if why:
        raise OptionError(
            f"this job has {info.world} ranks: {why}",
            rank=info.rank,
            hint=hint,
        )


def _why_no_log(options: Options) -> str:
    """Why several ranks cannot have this gradient log; "" if they can."""
    if options.has_replica:
        return "apply='replica' is for one rank; with several: apply='recovery'"
    if options.method.log != "dense":
        return f"log={options.method.log!r} is for one rank; with several: log='dense' or 'none'"
    if options.log.watch:
        return "LogOptions(watch=True) is for one rank: others may not see what it sees"
    if options.log.audit:
        return "LogOptions(audit=True) is for one rank: an audit reads whole bases"
    if History.parse(options.log.history).is_more:
        return "LogOptions(history=) is for one rank; with several: history='last'"
    return ""
