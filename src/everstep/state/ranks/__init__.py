"""State that is distributed or replicated over ranks: who writes each entry, and who logs each
gradient.

The room runs in the training process. Read in this order:

``ddp``         parameters that DistributedDataParallel keeps equal, and those it does not; restore
                the order in which DDP sums gradients
``writers``     the rank that writes each entry; this process's place in the job
``rank_share``  this rank's share of a survey; entries that a partial restore skips
``log_shares``  the rank whose log holds each gradient
"""
