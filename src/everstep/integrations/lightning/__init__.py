"""Lightning's Trainer.

``callback``   a callback makes a ``fit()`` recoverable, step by step
"""

from __future__ import annotations

try:
    from everstep.integrations.lightning.callback import EverstepCallback
except ImportError as error:
    raise ImportError(
        f"everstep.integrations.lightning cannot be used: {error}; "
        "pip install 'everstep[lightning]'"
    ) from error

__all__ = ["EverstepCallback"]
