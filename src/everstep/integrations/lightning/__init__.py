"""Lightning: its Trainer, its checkpoints, and loops over objects that Fabric has set up.

``callback``        a callback makes a ``fit()`` recoverable, step by step
``checkpoint_io``   the Trainer's and Fabric's own checkpoints, in verified files
``fabric``          a loop over objects that Fabric has set up
"""

from __future__ import annotations

try:
    from everstep.integrations.lightning.callback import EverstepCallback
    from everstep.integrations.lightning.checkpoint_io import EverstepCheckpointIO
    from everstep.integrations.lightning.fabric import resumable
except ImportError as error:
    raise ImportError(
        f"everstep.integrations.lightning cannot be used: {error}; "
        "pip install 'everstep[lightning]'"
    ) from error

__all__ = ["EverstepCallback", "EverstepCheckpointIO", "resumable"]
