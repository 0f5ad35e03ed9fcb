"""Several ranks that train together: their run folders, their starts, and their exchanges.

Runs in the training process. Read in this order:

- ``job``: one rank of a job, which may be its only one; its place and its folder.
- ``run_folder``: opens the run folders of all ranks as the same run; decides which node's
  memory holds whose copies.
- ``start``: one start of all ranks.
- ``option_check``: checks that all ranks were given the same options.
- ``copies``: opens places for copies.
"""

from everstep.trainer.job.copies import seams_with_copies, with_source
from everstep.trainer.job.job import Job, RunPlace, resume_as_job_of_one
from everstep.trainer.job.run_folder import memory_notice, peer_notice, refuse_single_base_with_peer

__all__ = [
    "Job",
    "RunPlace",
    "memory_notice",
    "peer_notice",
    "refuse_single_base_with_peer",
    "resume_as_job_of_one",
    "seams_with_copies",
    "with_source",
]
