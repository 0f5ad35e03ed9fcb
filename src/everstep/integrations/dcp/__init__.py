"""``torch.distributed.checkpoint`` (DCP) on everstep's files.

::

    from everstep.integrations import dcp

    dcp.save({"model": model.state_dict()}, checkpoint_id="runs/a/step-100")
    dcp.load(state, checkpoint_id="runs/a/step-100")

A checkpoint is a run folder with one base, which everstep's commands show, verify and export. Read
in this order:

``items``   names of the items of a state dict in a base
``folder``  begin a save in a folder, write a rank's share, commit, delete the older checkpoint
``writer``  torch's ``StorageWriter``; ``save`` and ``async_save``
``reader``  torch's ``StorageReader``; ``load``
"""

from everstep.integrations.dcp.reader import EverstepStorageReader, load
from everstep.integrations.dcp.writer import EverstepStorageWriter, async_save, save

__all__ = ["EverstepStorageReader", "EverstepStorageWriter", "async_save", "load", "save"]
