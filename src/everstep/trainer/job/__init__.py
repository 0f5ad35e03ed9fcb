"""Several ranks that train together: their run folders, their starts, and their exchanges.

Runs in the training process. Read in this order:

- ``place``: folder, ranks and places for copies of one process; a job of one.
- ``job``: one rank of a job: its folder, its exchanges with the others, and one start of all ranks.
- ``run_folder``: opens the run folders of all ranks as the same run, with the same options; decides
  which node's memory holds whose copies.
- ``memory``: bases that only the memory of keepers has: those of frozen replicas of all ranks.
- ``promised``: the options of a process; those that keep a promise, or follow measurements.
"""

from everstep.trainer.job.job import Job
from everstep.trainer.job.place import (
    RunPlace,
    checked_places,
    place_of_run,
    refuse_single_base_with_peer,
    resume_as_job_of_one,
    seams_with_copies,
    with_log_in_store,
    with_source,
)
from everstep.trainer.job.promised import options_of, with_chosen_method
from everstep.trainer.job.run_folder import memory_notice, peer_notice

__all__ = [
    "Job",
    "RunPlace",
    "checked_places",
    "memory_notice",
    "options_of",
    "peer_notice",
    "place_of_run",
    "refuse_single_base_with_peer",
    "resume_as_job_of_one",
    "seams_with_copies",
    "with_chosen_method",
    "with_log_in_store",
    "with_source",
]
