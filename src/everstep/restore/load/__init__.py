"""Load a base into live objects.

Runs in the training process (and in ``everstep.load``). Read in this order:

``saved_ranks``  files of all ranks that saved a base, and the view of them that a rank restores
``targets``      memory that the entries are read into; pieces of sharded entries, copied there
``load``         the load, in order: compare, stream, restore; progress of a restore; check for NaN
                 and infinity
"""

from everstep.restore.load.load import (
    OTHER_STATE,
    LoadedBase,
    Reads,
    Restored,
    contents,
    load_ranks,
    nonfinite_notice,
    rank_contents,
)
from everstep.restore.load.saved_ranks import SavedLayout, SavedRanks

__all__ = [
    "OTHER_STATE",
    "LoadedBase",
    "Reads",
    "Restored",
    "SavedLayout",
    "SavedRanks",
    "contents",
    "load_ranks",
    "nonfinite_notice",
    "rank_contents",
]
