"""Names, placement and file layout of the entries that a state consists of. Needs no torch.

Runs in both processes: the trainer plans a layout, the keeper writes it. Read in this order:

``entries``    entries: named, typed byte ranges of the state; the shape digest; reserved names of
               entries and of objects
``placement``  the slice of a tensor that each rank of a mesh holds; compare the ranks' views of
               the tensors that they replicate
``shards``     offsets of entries in a rank's files; the protocol that supplies the bytes; bounded
               caches of layouts
"""

from everstep.state.layout.entries import GRADIENT, OBJECT_PREFIX, SAMPLE, Entry
from everstep.state.layout.placement import Box, Placement, ReplicaDigest
from everstep.state.layout.shards import Body, Placed, ShardLayout

__all__ = [
    "GRADIENT",
    "OBJECT_PREFIX",
    "SAMPLE",
    "Body",
    "Box",
    "Entry",
    "Placed",
    "Placement",
    "ReplicaDigest",
    "ShardLayout",
]
