"""Resume a run when a training process starts: :meth:`Checkpointer.resume`.

Runs in the training process. Read in this order:

``resume``            resume of one rank; opening of a timeline
``roll_forward``      load a base, and replay the log on it
``missing_sections``  bases that lack sections of the state
``report``            the result, as the user gets it
``resume_job``        resume of several ranks, carrying out their agreement
``rank_loader``       one rank's share of a base of several ranks
``rank_log``          one rank's log in such a resume
``log_exchange``      records that ranks send each other meanwhile
``job_outcome``       the result of one rank
"""
