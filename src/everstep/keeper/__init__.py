"""Captured bases, from the training thread to the disk.

In the trainer:

``parts``     puts a Checkpointer together
``cadence``   when bases are due, how much that writes in a day (``budget``)
``saver``     takes bases: surveys, copies, holds updates back; ``flight``: one on its way
``prepared``  what is the same at each save
``pool``      blocks of the arena, and plain data beside it; ``record_memory``: of the log
``calls``     one step mark, or base, at a time; ``midstep``: whether one is under way
``standby``   asks the keeper's replica for bases (``asked``), with ``samples`` of the state
``keepers``   which keeper is in service: a process or a thread; started anew when it is lost
``attach``, ``spawn``, ``remote``   finds or starts a keeper process; talks to it
``preemption``   a last base when a signal announces the end

In the keeper process (``python -m everstep.keeper``, without torch), or in a thread:

``server``    serves one trainer at a time (``attached``), outlives it
``holding``   the newest whole capture, kept for a trainer that is restarted
``duties``    what is done at each message
``logs``, ``log``   the gradient log; ``log_layouts``: what its records are of
``replicas``, ``replica``, ``replica_state``   a copy of the state that follows the log, with torch
``local``     one base after the other: persisted, audited, old ones retired
``persist``   one base: files, marker, manifest
``retain``    deletes, parks and cleans up
``audit``     compares digests with the base before
``auditor``   lets a child process replay the log onto the base before, and compare

Between them: ``capture`` (a base on its way), ``messages``, ``wire``, ``held``, ``registry``
(where keepers are found), ``channel`` (errors and deadlines), ``save`` (what the user holds),
``budget``, ``stats``.
"""
