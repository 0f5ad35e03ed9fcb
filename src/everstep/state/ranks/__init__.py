"""State that is distributed or replicated over ranks: who writes each entry, and who logs each
gradient.

Runs in the training process. Read in this order:

``ddp``         parameters that DistributedDataParallel keeps equal, and those it does not; restore
                the order in which DDP sums gradients
``writers``     the rank that writes each entry; this process's place in the job
``rank_share``  this rank's share of a survey; entries that a partial restore skips
``log_shares``  the rank whose log holds each gradient
"""

from everstep.state.ranks.ddp import (
    BUCKETS_SECTION,
    DDPBuckets,
    find_ddp,
    reduced_parameter_ids,
    refuse_divergent_updates,
)
from everstep.state.ranks.log_shares import names_digest, updated_elsewhere
from everstep.state.ranks.rank_share import SkippedState
from everstep.state.ranks.writers import ONE_RANK, RankInfo

__all__ = [
    "BUCKETS_SECTION",
    "ONE_RANK",
    "DDPBuckets",
    "RankInfo",
    "SkippedState",
    "find_ddp",
    "names_digest",
    "reduced_parameter_ids",
    "refuse_divergent_updates",
    "updated_elsewhere",
]
