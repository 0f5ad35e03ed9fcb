"""Memory and disk space that a run will need: computed and checked before it starts.

Runs in the training process. Read in this order:

- ``host_memory``: divides the budget of host memory; limits of the gradient log; predicts the
  state after the first update, so that budgets apply to it.
- ``disk``: upper bounds for the disk, and the daily write budget.
"""
