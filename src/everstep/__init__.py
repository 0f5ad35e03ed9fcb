"""everstep: every training step, recoverable.

What lives where, in the order in which data flows; imports go down this list, never up:

======================  ====================================================================
``errors``, ``given``   the exception tree; how what a user gave is checked
``intervals``, ``method``, ``options``  what a user can choose
``seams``               file system, clock, failpoints, progress: everything that tests replace
``state``               WHAT is saved: providers, entries, objects, layout
``data``                loaders whose position is part of the state
``capture``             device to host: lanes, base captures, hooks on updates
``compress``            gradients made small, as training consumes them
``arena``               host memory for captured state
``replay``              redo of an optimizer's own updates
``format``              the bytes on disk
``tiers``               where bytes live
``commit``              markers, manifest, history, retention: decisions without I/O
``recover``             what survives, and how it comes back
``plan``                how often, from measured costs
``keeper``              makes captured bases durable; sees every stage
``checkpointer``        the trainer's side; sees every stage
``look``                reads a run beside its trainer: ``load`` and ``peek``
``bench``, ``cli``      measurements and the demo; the ``everstep`` command
``testing``             a file system that loses what was not synced; crash enumeration
======================  ====================================================================
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from everstep.version import TORCH_MIN, __version__, is_too_old

if TYPE_CHECKING:
    from everstep import compress as compress
    from everstep import data as data
    from everstep import errors
    from everstep.checkpointer import Checkpointer
    from everstep.config import options
    from everstep.config.options import Budget, KeeperOptions, LogOptions, Method, presets
    from everstep.errors import EverstepError
    from everstep.link.save import Save
    from everstep.look.load import load, peek
    from everstep.restore.start.report import Recovery
    from everstep.trainer.session.stats import Stats

__all__ = [
    "Budget",
    "Checkpointer",
    "EverstepError",
    "KeeperOptions",
    "LogOptions",
    "Method",
    "Recovery",
    "Save",
    "Stats",
    "__version__",
    "errors",
    "load",
    "peek",
    "presets",
]

# Imported when first used: the command line answers without waiting for torch.
_WHERE = {
    "Budget": "options",
    "Checkpointer": "checkpointer",
    "EverstepError": "errors",
    "KeeperOptions": "options",
    "LogOptions": "options",
    "Method": "options",
    "Recovery": "recover.report",
    "Save": "keeper.save",
    "Stats": "keeper.stats",
    "load": "look",
    "peek": "look",
    "presets": "options",
}
_MODULES = ("compress", "data", "errors", "options")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"everstep.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'everstep' has no attribute {name!r}")
    _check_torch()
    return getattr(importlib.import_module(f"everstep.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def _check_torch() -> None:
    """Refuses an old torch, which pip leaves in place: everstep never replaces one."""
    from importlib import metadata

    try:
        found = metadata.version("torch")
    except metadata.PackageNotFoundError:  # none, which is said better by who imports it
        return
    if is_too_old(found):
        from everstep.errors import UnavailableError

        least = ".".join(map(str, TORCH_MIN))
        raise UnavailableError(
            f"torch {found} is installed, everstep needs {least} or newer",
            hint="install a newer torch into this environment",
        )
