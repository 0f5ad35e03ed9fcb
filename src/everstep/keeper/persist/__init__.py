"""Make captured bases durable: write, commit and audit them.

Runs in the keeper process, or as a thread of the training process if there is no keeper process.
Read in this order:

``base_writer``    the queue: one base after another, each followed by retention
``committer``      the contract of a commit, and the commit of a single rank
``shard_writer``   the files of one rank; comparison of their digests with the base before; hard
                   links to files of entries that never change
``job_committer``  the commit of a rank together with other ranks: deadlines, retries
``rank_disk``      disk operations of a commit with other ranks
``job_link``       messages between the keepers of a job
"""

from everstep.keeper.persist.base_writer import BaseWriter
from everstep.keeper.persist.committer import Timeline
from everstep.keeper.persist.job_link import JobLink

__all__ = ["BaseWriter", "JobLink", "Timeline"]
