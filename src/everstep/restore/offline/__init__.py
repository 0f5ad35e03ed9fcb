"""Rebuild the state of a step in host memory from files, without the user's objects.

Runs in commands (``everstep verify``, ``restore``), in ``load()`` and ``peek()``, in
the audit process, and in the keeper's replica. Read in this order:

``run_log``        ``RunLog``: steps that the log of a run restores, each with its base and its
                   segments
``memory``         ``HostMemory``: the memory that :class:`.ReplayDriver` updates; ``OfflineState``:
                   tensors and objects of one rank
``job_state``      ``JobState``: the states of all ranks of a job, replayed together; one rank is a
                   job of one
``rank_files``     read one rank's files of a base; bring the parts of a multi-step base, here or in
                   live objects, to the step of the base
``load``           read a base of one or several ranks; choose the tensors of a job's base that are
                   loaded for each rank
``rebuild``        ``Rebuilder``: the state of any logged step
``audit``          compare a base with the replay of the log from the base before it
``audit_process``  the same in a process of its own, started by the keeper
"""
