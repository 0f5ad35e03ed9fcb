"""Tools for users' own tests of what they build on everstep.

``conformance``    checks of the contract of a tier, for users' own tiers; their helpers
``providers``      checks of the contract of a state provider, for users' own providers
``faultytier``     a tier that wraps another, and fails, stalls or loses data as a seed determines
``emulated_link``  a link between device and host with a given bandwidth
``keepers``        end the keeper of a run; find the base that it holds in memory
``inspection``     the components of a Checkpointer, for everstep's own tests

Failpoints are named places in the protocol at which a test can end or interrupt a process:
:func:`arm` one of :data:`FAILPOINTS`, or set ``EVERSTEP_FAILPOINTS`` in its environment.
"""

from everstep.seams.failpoints import FAILPOINTS, FailpointError, arm, disarm_all
from everstep.testing.emulated_link import EmulatedLink
from everstep.testing.faultytier import FaultKind, FaultyTier, TierFault
from everstep.testing.inspection import inspect
from everstep.testing.keepers import end_keeper

__all__ = [
    "FAILPOINTS",
    "EmulatedLink",
    "FailpointError",
    "FaultKind",
    "FaultyTier",
    "TierFault",
    "arm",
    "disarm_all",
    "end_keeper",
    "inspect",
]
