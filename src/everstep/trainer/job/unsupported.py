"""What this machine has not, or several ranks cannot do together, refused before all else."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.config.options import Options
from everstep.errors import OptionError
from everstep.seams.processes.processes import configured_cores
from everstep.state.ranks.rank_info import RankInfo
from everstep.tiers.options import TierOptions

__all__ = ["refuse_unaudited", "refuse_unsupported"]


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
