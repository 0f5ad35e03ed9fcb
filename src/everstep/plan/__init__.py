"""Cost models and plans: decisions without clocks and without I/O.

Used in the training process and by ``everstep plan``. Read in this order:

``interval``   model of the time that intervals of bases and log segments waste; the intervals that
               waste the least
``estimator``  the interval of bases during training, from measured costs; steps per log segment,
               from the speed of the disk
``multistep``  cost of a base that is captured in several parts; number and sizes of these parts
``models``     closed-form models of the papers, of Young and of Daly
``schedule``   capture plans: when each tensor leaves the device during a step
"""

from everstep.plan.estimator import BatchEstimator, Estimator, FailurePrior
from everstep.plan.interval import checkfreq_interval, seldom, without_log
from everstep.plan.multistep import PARTS_MAX, Cut, Overlap, Pipeline

__all__ = [
    "PARTS_MAX",
    "BatchEstimator",
    "Cut",
    "Estimator",
    "FailurePrior",
    "Overlap",
    "Pipeline",
    "checkfreq_interval",
    "seldom",
    "without_log",
]
