"""Capture plans: when each tensor leaves the device during a step (Checkflow, section III).

Read in this order:

``steps``     a traced step: operators, their durations, lifetimes of tensors
``recorder``  record the operators of a step
``trace``     trace one training step, on the meta device, fake tensors or a real device; operators
              that DistributedDataParallel adds
``schedule``  the plan as an optimization problem, a heuristic, and a lower bound
``exact``     optimal plans by integer programming; a plan for a traced step, with its figures
``timeline``  plans from the events of a real step
``plan_file`` plans in files, for the events of a real step
"""

from everstep.plan.schedule.timeline import (
    Leaving,
    StepPlan,
    follow_placements,
    plan_departures,
)

__all__ = ["Leaving", "StepPlan", "follow_placements", "plan_departures"]
