"""Restore a state: from a run folder to a training process that continues.

Runs in the training process, except ``offline``, which also serves the command line and audits.
Each package may import those before it:

``load``     load a base into live objects
``redo``     replay log records on live objects
``fetch``    get copies of bases and logs from keepers, other nodes and tiers
``log``      find the log records, and how far they lead
``offline``  rebuild a state in host memory, without the user's objects
``reshard``  replay a log written by another number of ranks or in another layout
``start``    :meth:`Checkpointer.resume`, for one rank and for several
"""
