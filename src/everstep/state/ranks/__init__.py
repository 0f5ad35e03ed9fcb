"""State that is distributed or replicated over ranks: who writes each entry, and who logs each
gradient.

The room runs in the training process. Read in this order:

``rank_info``    this process's place in the job
``ddp``          parameters that DistributedDataParallel keeps equal, and those it does not
``writers``      the rank that writes each entry
``rank_share``   this rank's share of a survey; entries that a partial restore skips
``log_shares``   the rank whose log holds each gradient
``ddp_buckets``  restore the order in which DDP sums gradients
"""
