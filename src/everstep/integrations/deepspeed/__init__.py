"""DeepSpeed: loops over an engine with ZeRO 0 to 3, and the checkpoints that an engine saves.

``training``            a loop over an engine becomes recoverable, step by step
``checkpoint_engine``   the engine's own checkpoints, in verified files
"""

from __future__ import annotations

try:
    from everstep.integrations.deepspeed.checkpoint_engine import EverstepCheckpointEngine
    from everstep.integrations.deepspeed.training import resumable
except ImportError as error:
    raise ImportError(
        f"everstep.integrations.deepspeed cannot be used: {error}; "
        "pip install 'everstep[deepspeed]'"
    ) from error

__all__ = ["EverstepCheckpointEngine", "resumable"]
