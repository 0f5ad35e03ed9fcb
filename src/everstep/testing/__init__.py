"""What our own tests use, shipped because users' tests need it too.

``simfs``       a file system in memory with crashes, errors and lies; ``faults``, ``simdisk``
                and ``simtree`` are its parts
``crashes``     crashes and errors at every operation of a scenario, enumerated
``training``    scenarios of tiny trainings, of which every bit is known beforehand
``invariants``  what holds on every disk that a crash may leave
``simcluster``  a whole cluster by seed; ``simfaults``, ``simhost``, ``simjob``, ``simnet``,
                ``simrank`` and ``simtruth`` are its parts
``conformance`` what a tier must do to be one, with ``conformance_parts``; ``faultytier``: a tier
                on which everything goes wrong
"""

from everstep.testing.crashes import (
    Report,
    Scenario,
    Violation,
    enumerate_crashes,
    enumerate_errors,
    replay,
    watch_crashes,
)
from everstep.testing.faults import Fault, Moment, Operation, SimulatedCrash
from everstep.testing.invariants import assert_nothing_vouches_for_torn_bytes
from everstep.testing.simcluster import SimCluster, SimViolationError, simulate, simulate_many
from everstep.testing.simfs import MappedFile, SimFileSystem
from everstep.testing.simjob import Plan
from everstep.testing.training import TinyTraining, TrainingScenario

__all__ = [
    "Fault",
    "MappedFile",
    "Moment",
    "Operation",
    "Plan",
    "Report",
    "Scenario",
    "SimCluster",
    "SimFileSystem",
    "SimViolationError",
    "SimulatedCrash",
    "TinyTraining",
    "TrainingScenario",
    "Violation",
    "assert_nothing_vouches_for_torn_bytes",
    "enumerate_crashes",
    "enumerate_errors",
    "replay",
    "simulate",
    "simulate_many",
    "watch_crashes",
]
