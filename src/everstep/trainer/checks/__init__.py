"""Checks of the state and of the training loop; most of them warn instead of raising.

Runs in the training process. The modules are independent of each other:

- ``keeper_replay``: refuses states whose updates a keeper cannot repeat.
- ``step_order``: warns when ``ckpt.step()`` is called before the step is complete.
- ``untracked``: warns of optimizers and schedulers that are not part of the state.
- ``first_batches``: warns of lost data and random numbers after a resume.
"""
