"""Memory and disk space that a run will need: computed and checked before it starts.

Runs in the training process. Read in this order:

- ``host_memory``: divides the budget of host memory; limits of the gradient log; predicts the
  state after the first update, so that budgets apply to it.
- ``disk``: upper bounds for the disk, and the daily write budget.
"""

from everstep.trainer.budget.disk import (
    DAY_S,
    RUN_BYTES,
    Bounds,
    DayMeter,
    Forecast,
    bounds_of,
    budget_in_words,
    check_disk_budget,
)
from everstep.trainer.budget.host_memory import LogLimits, bases_in_flight_max

__all__ = [
    "DAY_S",
    "RUN_BYTES",
    "Bounds",
    "DayMeter",
    "Forecast",
    "LogLimits",
    "bases_in_flight_max",
    "bounds_of",
    "budget_in_words",
    "check_disk_budget",
]
