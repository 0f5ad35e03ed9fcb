"""Budgets: computed, printed and enforced before anything is captured (I10)."""

from __future__ import annotations

from pathlib import PurePath

from rich.filesize import decimal

from everstep.errors import OutOfSpaceError
from everstep.options import Options
from everstep.seams.machine import memory_available_bytes

__all__ = ["announcement", "check_disk_budget", "host_budget_bytes", "log_budget_bytes"]


def host_budget_bytes(options: Options, state_bytes: int) -> int:
    """Host memory for captured state.

    Raises:
        OutOfSpaceError: when the method needs more, with the number of bytes.
    """
    budget = options.budget.host_bytes or memory_available_bytes() // 2
    if options.method.base != "sync" and budget < state_bytes:
        raise OutOfSpaceError(
            f'method="{options.method_name}" copies the state ({state_bytes} bytes) into host '
            f"memory; the budget is {budget} bytes",
            hint=f'Budget(host_bytes={state_bytes}) or more, or method="sync"',
        )
    return budget


def log_budget_bytes(arena_bytes: int, state_bytes: int) -> int:
    """Host memory for the gradient log: what two bases at turnover leave; at least a half of what
    one leaves."""
    return max(arena_bytes - 2 * state_bytes, (arena_bytes - state_bytes) // 2)


def check_disk_budget(options: Options, run: PurePath, base_bytes: int) -> None:
    """Refuses a base that does not fit the budget beside those to keep.

    Raises:
        OutOfSpaceError: with the number of bytes, or of bases, that would fit.
    """
    budget = options.budget.disk_bytes
    need = (options.keep + 1) * base_bytes  # the new one before the oldest goes
    if budget is not None and need > budget:
        raise OutOfSpaceError(
            f"{options.keep} bases to keep and one being written take {need} bytes, the budget "
            f"is {budget}",
            path=run,
            hint=f"Budget(disk_bytes={need}), or keep={max(0, budget // base_bytes - 1)}",
        )


def announcement(options: Options, run: PurePath, state_bytes: int, host_bytes: int) -> str:
    """The line printed at start: what was chosen, and what it will take."""
    every, state = options.every, decimal(state_bytes)
    when = "on save() only"
    if every.steps is not None:
        when = f"every {every.steps} steps"
    elif every.seconds is not None:
        when = f"every {every.seconds:g} s"
    host = "a few chunks"
    if options.method.base != "sync":
        host = f"{state} per base in flight (budget {decimal(host_bytes)})"
    return (
        f"everstep: {run}: {options.method_name}, {when}, keep {options.keep}; state {state}; "
        f"host memory {host}; disk up to {decimal((options.keep + 1) * state_bytes)}"
    )
