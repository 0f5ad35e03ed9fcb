"""Resume a run when a training process starts: :meth:`Checkpointer.resume`.

Runs in the training process. A run of one rank and a job of several ranks have a driver each;
both restore by the same replay, and give the same result. Read in this order:

``resume``        driver of one rank: choose, restore, open a timeline
``roll_forward``  load a base, and replay the log on it
``report``        the result: for the training process, for the other ranks, and as the user gets
                  it; bases that lack sections of the state; the request: step, live state,
                  strictness
``resume_job``    driver of several ranks; carries out their agreement
``rank_sources``  what one rank can read; opens its timeline
``rank_restore``  what one rank restores, as the ranks chose: its share of a base, and its log
``rank_log``      one rank's log in a resume of several ranks; records that the ranks exchange
"""

from everstep.restore.start.rank_log import RankLog
from everstep.restore.start.rank_sources import needs_on_disk
from everstep.restore.start.report import (
    Recovery,
    Resumed,
    ResumeRequest,
    describe,
    doubted,
    with_causes,
)
from everstep.restore.start.resume_job import resume_all_ranks

__all__ = [
    "RankLog",
    "Recovery",
    "ResumeRequest",
    "Resumed",
    "describe",
    "doubted",
    "needs_on_disk",
    "resume_all_ranks",
    "with_causes",
]
