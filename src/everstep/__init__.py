"""everstep: every training step, recoverable.

The docstring of each package says in which process it runs. A package imports only packages above
it in this list:

================  ================================================================================
``errors``        the exceptions
``seams``         file system, clock, processes, sockets: everything that tests replace
``state``         the state that is saved: entries, providers, layout, shares of ranks
``arena``         host memory for captured state
``format``        bytes on disk
``events``        events of a run, for people, dashboards and the event log
``commit``        commit, history, retention, agreement of ranks: state machines without I/O
``config``        options: what a user can choose; ``options`` has their public names
``compress``      compression of the gradients that training consumes
``replay``        redo of an optimizer's own updates
``link``          between the training process and the keeper: messages and shared memory
``tiers``         places that store bytes, with one interface
``run``           the run folder: its bases, logs and timelines
``capture``       device to host: copy lanes, hooks on updates
``restore``       restores a state: resume, replay, copies from elsewhere
``plan``          cost models, intervals, capture plans
``keeper``        runs in the keeper process
``look``          reads a run without taking it over: ``load`` and ``peek``
``report``        one page about a run
``convert``       a state in the formats of other programs
``trainer``       runs in the training process
``checkpointer``  the public object
``data``          loaders whose position is part of the state
``workloads``     models that are trained in demos, tests and benchmarks
``testing``       a tier that fails, failpoints, a conformance suite
``demo``          ``everstep demo``
``cli``           the ``everstep`` command
================  ================================================================================
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from everstep.version import TORCH_MIN, __version__, is_too_old

if TYPE_CHECKING:
    from everstep import compress as compress
    from everstep import data as data
    from everstep import errors as errors
    from everstep import events as events
    from everstep import options as options
    from everstep.checkpointer import Checkpointer
    from everstep.config.method import Method, presets
    from everstep.config.options import Budget, KeeperOptions, LogOptions
    from everstep.errors import EverstepError
    from everstep.link.save import Save
    from everstep.look.load import load, peek
    from everstep.restore.start.report import Recovery
    from everstep.state.providers.chunks import Provider
    from everstep.tiers.options import PeerOptions, TierOptions
    from everstep.trainer.session.stats import Stats

__all__ = [
    "Budget",
    "Checkpointer",
    "EverstepError",
    "KeeperOptions",
    "LogOptions",
    "Method",
    "PeerOptions",
    "Provider",
    "Recovery",
    "Save",
    "Stats",
    "TierOptions",
    "__version__",
    "load",
    "peek",
    "presets",
]

# Imported when first used: the command line answers without waiting for torch.
_WHERE = {
    "Budget": "config.options",
    "Checkpointer": "checkpointer",
    "EverstepError": "errors",
    "KeeperOptions": "config.options",
    "LogOptions": "config.options",
    "Method": "config.method",
    "PeerOptions": "tiers.options",
    "Provider": "state.providers.chunks",
    "Recovery": "restore.start.report",
    "Save": "link.save",
    "Stats": "trainer.session.stats",
    "TierOptions": "tiers.options",
    "load": "look.load",
    "peek": "look.load",
    "presets": "config.method",
}
_MODULES = ("compress", "data", "errors", "events", "options")


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
