"""The way back: from a run folder to a training process that goes on.

``start``    :meth:`Checkpointer.resume`, for one rank and for several
``load``     reads a base into live objects
``redo``     replays the log onto it
``log``      finds how far the log leads
``relaid``   restores onto another number of ranks
``offline``  rebuilds a state in host memory, without the user's objects
``fetch``    gets copies of bases and logs from memory, peers and tiers
"""
