"""Everything that runs in the training process.

``session``    one life of a Checkpointer: start, step mark, close
``attach``     finds, starts and replaces the keeper
``base``       captures a base in one step; ``multistep``: over several steps (GoCkpt);
               ``schedule``: at every step, by a plan (Checkflow)
``log``        records gradients and step marks (LowDiff)
``budget``     memory and disk that will be needed
``job``        several ranks: start, agreement at step boundaries
``checks``     warns of optimizers and schedulers that the state does not have
"""
