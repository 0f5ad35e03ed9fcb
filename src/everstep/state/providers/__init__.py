"""State providers: survey and restore each kind of value in the user's state dict.

Runs in the training process; also used by restores. Read in this order:

``provider``    the protocol, restore plans, comparison of saved entries with live tensors
``modules``     modules, and the names of their parameters
``optimizers``  optimizers: state by parameter name; ZeroRedundancyOptimizer
``encodings``   optimizers whose ``state_dict()`` has another form than their state
``stateful``    objects with ``state_dict()`` and ``load_state_dict()``; loaders
``chunks``      the user's own objects that give their state chunk by chunk
``plain``       plain data; the random generators of the process
``gradients``   gradients, which are not part of a state
"""

from everstep.state.providers.modules import ModuleProvider, named_parameters
from everstep.state.providers.optimizers import (
    PARTITIONED,
    OptimizerProvider,
    ZeroProvider,
    local_optimizer,
    unwrap_optimizer,
)
from everstep.state.providers.provider import RestorePlan, SectionProvider
from everstep.state.providers.stateful import StatefulProvider

__all__ = [
    "PARTITIONED",
    "ModuleProvider",
    "OptimizerProvider",
    "RestorePlan",
    "SectionProvider",
    "StatefulProvider",
    "ZeroProvider",
    "local_optimizer",
    "named_parameters",
    "unwrap_optimizer",
]
