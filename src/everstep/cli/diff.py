"""``everstep diff``: compare the states of two steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console, count_of, label, left_out, plain, say, table
from everstep.cli.common.runs import RUN_ARGUMENT, absolute

if TYPE_CHECKING:
    from everstep.look.differences import TensorDifference, TensorSummary
    from everstep.look.load import Loaded

_ROWS = 40
_VALUE_CHARS_MAX = 60


def diff(
    run: Annotated[str, RUN_ARGUMENT],
    first: Annotated[int, typer.Argument(metavar="A", help="Step.", show_default=False)],
    second: Annotated[int, typer.Argument(metavar="B", help="Step.", show_default=False)],
    of: Annotated[
        str | None, typer.Option(metavar="RUN", help="Run of step B; RUN itself if not given.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Part, or pattern on names, to compare; repeatable."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Most tensors to list.")] = _ROWS,
    json_output: JsonFlag = False,
) -> None:
    """Compares the states of two steps, of one run or two.

    For each tensor that differs: norms, norm and largest absolute value of the change, share of the
    elements that changed, number of NaN and infinite elements. The largest relative changes come
    first. Plain values that differ are listed as well. Exit status 1 if anything differs.
    """
    from everstep.look.differences import tensor_differences, value_differences
    from everstep.look.open_state import open_state

    with ExitStack() as stack:
        before = stack.enter_context(open_state(_place(run), first, only or None))
        after = stack.enter_context(open_state(_place(of or run), second, only or None))
        found = list(tensor_differences(before, after))
        values = list(value_differences(before.outline.objects, after.outline.objects))
    different = [one for one in found if one.kind != "equal"]
    different.sort(key=lambda one: -one.relative)
    if json_output:
        emit(
            {
                "first": _state(before.outline),
                "second": _state(after.outline),
                "equal": len(found) - len(different),
                "different": [asdict(one) for one in different],
                "values": [
                    {"name": name, "first": _value(one), "second": _value(two)}
                    for name, one, two in values
                ],
            }
        )
    else:
        _show(different, values, rows, equal=len(found) - len(different))
    if different or values:
        raise typer.Exit(ExitCode.DIFFERENT)


def _place(run: str) -> str:
    return run if "://" in run else str(absolute(run))


def _state(outline: Loaded) -> dict[str, Any]:
    return {"step": outline.step, "timeline": outline.timeline, "exact": outline.exact}


def _value(value: Any) -> str | None:
    return None if value is ... else plain(repr(value), _VALUE_CHARS_MAX)


def _show(
    different: list[TensorDifference],
    values: list[tuple[str, Any, Any]],
    rows: int,
    *,
    equal: int,
) -> None:
    out = console()
    if different:
        right = ("norm of A", "norm of B", "norm of B - A", "largest", "changed")
        made = table(("tensor", *right, "note"), right=right)
        for one in different[:rows]:
            made.add_row(label(one.name), *_numbers(one), label(_note(one)))
        out.print(made)
        left_out(out, len(different), rows)
    for name, first, second in values[:rows]:
        say(out, f"{name}: {_value(first) or 'missing'} in A, {_value(second) or 'missing'} in B")
    left_out(out, len(values), rows)
    tensors = count_of(len(different), "tensor differs", "tensors differ")
    out.print(f"{tensors}, {equal} equal to the bit; {count_of(len(values), 'other difference')}")


def _numbers(one: TensorDifference) -> tuple[str, ...]:
    numbers = (
        None if one.first is None else one.first.norm,
        None if one.second is None else one.second.norm,
        one.change_norm,
        one.change_max,
    )
    changed = "" if one.changed is None else f"{one.changed:.1%}"
    return (*("" if number is None else f"{number:.4g}" for number in numbers), changed)


def _note(one: TensorDifference) -> str:
    notes: list[str] = [one.kind] if one.kind.startswith("only") else []
    if one.kind == "form":
        notes.append(f"{_form(one.first)} in A, {_form(one.second)} in B")
    for name, summary in (("A", one.first), ("B", one.second)):
        if summary is not None and (summary.nan or summary.inf):
            notes.append(f"{summary.nan} NaN and {summary.inf} infinite in {name}")
    return "; ".join(notes)


def _form(summary: TensorSummary | None) -> str:
    assert summary is not None
    return f"{summary.dtype} {summary.shape}"
