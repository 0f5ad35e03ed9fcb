"""Load a base into live objects.

Runs in the training process (and in ``everstep.load``). Read in this order:

``saved_ranks``  files of all ranks that saved a base, and the view of them that a rank restores
``targets``      memory that the entries are read into
``pieces``       pieces of sharded entries, copied to their destinations
``load``         all of it, in order: compare, stream, restore; live state while a restore proceeds;
                 check for NaN and infinity
"""
