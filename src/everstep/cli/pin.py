"""``everstep pin``: keep one base whatever the retention of its run deletes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import console, say
from everstep.cli.common.runs import RUN_ARGUMENT, filesystem_of, open_run, reading, select_base
from everstep.errors import OptionError
from everstep.format.names import PIN_RECORD
from everstep.format.records import PinRecord
from everstep.seams import FileSystem, PosixFileSystem

if TYPE_CHECKING:
    from everstep.run.scan import BaseFound

_NOTE_CHARS_MAX = 4096
_PINNABLE = ("committed", "complete")


def pin(
    run: Annotated[str, RUN_ARGUMENT],
    step: Annotated[int, typer.Option(help="Step of the base to pin.", show_default=False)],
    timeline: Annotated[
        int | None, typer.Option(help="Timeline of the base, if several have the step.")
    ] = None,
    note: Annotated[str, typer.Option(help="Text for people, shown by ls.")] = "",
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the pin: retention decides again.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Pins one base: training never deletes it, however many newer ones there are.

    Also while the run is being trained, and in a copy of a run (a directory or s3://bucket/prefix).
    Copies that training makes later are pinned, too. The log after a pinned base is not kept: its
    own step can be restored.
    """
    from everstep.tiers import MemoryFile
    from everstep.tiers.options import open_tier

    filesystem = filesystem_of(run)
    inventory = open_run(filesystem, run)
    base = select_base(inventory, step, timeline)
    if len(note) > _NOTE_CHARS_MAX:
        raise OptionError(f"--note: at most {_NOTE_CHARS_MAX} letters")
    if base.status not in _PINNABLE:
        raise OptionError(
            f"{base.id} cannot be pinned: it is {base.status}", step=step, path=base.path
        )
    tier = open_tier(str(inventory.path), PosixFileSystem())
    name = (base.path / PIN_RECORD).relative_to(inventory.path).as_posix()
    with reading(base.path):
        if remove:
            tier.delete(name)
        else:
            record = PinRecord(base.id.timeline, base.id.step, note, time.time())
            tier.put(name, MemoryFile([memoryview(record.encode())]))
            _refuse_deletion(filesystem, inventory.path, base, lambda: tier.delete(name))
    if json_output:
        emit(
            {
                "path": inventory.path,
                "timeline": base.id.timeline,
                "step": base.id.step,
                "pinned": not remove,
                "note": note,
            }
        )
    else:
        say(console(), f"{base.id} is {'not pinned any more' if remove else 'pinned'}")


def _refuse_deletion(
    filesystem: FileSystem, run: PurePath, base: BaseFound, unpin: Callable[[], None]
) -> None:
    """Check, after the pin is there, that the base is not being deleted.

    Retention looks for a pin after it has marked a base for deletion, and this looks for the mark
    after the pin: one of the two sees the other.

    Raises:
        OptionError: the base is being deleted; the pin was removed.
    """
    from everstep.run.scan import scan_base

    try:
        status = scan_base(filesystem, run, base.id).status
    except FileNotFoundError:
        status = "incomplete"
    if status not in _PINNABLE:
        unpin()
        raise OptionError(
            f"{base.id} is being deleted by the retention of its run",
            step=base.id.step,
            path=base.path,
            hint="pin another base: everstep ls lists them",
        )
