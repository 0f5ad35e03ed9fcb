"""Everything that runs in the training process.

- ``session``: one life of a Checkpointer: start, step mark, close. Begin here.
- ``participant``: the interface that the session calls; each feature below is a participant.
- ``attach``: finds, starts and replaces the keeper.
- ``base``: captures a base in one step; ``multistep``: over several steps (GoCkpt);
  ``schedule``: at every step, by a plan (Checkflow).
- ``log``: records gradients and step marks (LowDiff).
- ``budget``: memory and disk space that a run will need.
- ``job``: several ranks: their run folders, starts and exchanges.
- ``checks``: checks of the state and of the training loop.
"""
