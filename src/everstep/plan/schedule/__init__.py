"""Capture plans: when each tensor leaves the device during a step (Checkflow, section III).

Read in this order:

``steps``     data types of a traced step: operators, lifetimes of tensors
``recorder``  record the operators of a step
``trace``     trace one training step; operators that DistributedDataParallel adds
``tracing``   devices for tracing: meta, fake tensors, real ones
``devices``   durations of operators
``schedule``  the plan as an optimization problem, a heuristic, and a lower bound
``exact``     optimal plans by integer programming; a plan for a traced step, with its figures
``timeline``  plans from the events of a real step
"""

from everstep.plan.schedule.timeline import Leaving, StepPlan, plan_departures

__all__ = ["Leaving", "StepPlan", "plan_departures"]
