"""Capture every step by a plan (Checkflow, section III); runs in the training process.

Read in this order:

- ``saver``: captures at each step mark; keeps the newest capture in memory, or makes it durable.
- ``scheduler``: observes steps, makes plans of them, and issues copies by a plan; reports when
  each copy ran, next to when it was planned.
- ``given``: a plan from a file, instead of one made from steps.
"""

from everstep.trainer.schedule.given import GivenPlan, given_plan
from everstep.trainer.schedule.saver import ScheduledSaver
from everstep.trainer.schedule.scheduler import ScheduleStats

__all__ = ["GivenPlan", "ScheduleStats", "ScheduledSaver", "given_plan"]
