"""Memory and disk space that a run will need: computed and checked before it starts.

Runs in the training process. Read in this order:

- ``first_update``: predicts the state after the first update, so that budgets apply to it.
- ``host_memory``: divides the budget of host memory.
- ``disk``: upper bounds for the disk, and the daily write budget.
- ``log_limits``: limits of the gradient log.
"""
