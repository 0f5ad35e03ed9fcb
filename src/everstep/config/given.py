"""Validation of arguments that users pass: names, types and numbers.

``@checked`` validates the fields of a frozen dataclass against their annotations, ``@named`` the
arguments of a function against its signature. Both raise :class:`~everstep.errors.OptionError`
with the accepted values, instead of a ``TypeError`` or an error much later.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from everstep.errors import EverstepError, OptionError

NUMBER_MAX = (1 << 63) - 1
"""Largest absolute value of an integer argument: records and messages store 64-bit integers."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is closest to ``name``, or None."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a hint at the known name that is closest to ``name``, or None."""
    guess = nearest(name, known)
    return f"did you mean {guess!r}?" if guess else None


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise if ``given`` has a name that is not among the options of ``owner``.

    Raises:
        OptionError: names the closest known option.
    """
    names = list(known)
    for name in given:
        if name not in names:
            raise OptionError(
                f"{owner} has no option {name!r}; there are: {', '.join(names) or 'none'}",
                hint=did_you_mean(name, names),
            )


def one_of(what: str, value: object, known: Iterable[str], *, beside: str = "") -> None:
    """Raise if ``value`` is not one of the known names.

    Args:
        what: noun for the value in the error message, e.g. ``"tier"``.
        beside: text appended to the list of known names, for other accepted forms.

    Raises:
        OptionError: names the closest known one.
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return
    raise OptionError(
        f"no {what} {value!r}; there are: {', '.join(names)}{beside}",
        hint=did_you_mean(value, names) if isinstance(value, str) else None,
    )


def is_int(value: object) -> bool:
    """Return True for an integer; ``True`` and ``False`` are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True for a finite number; ``True`` and ``False`` are not numbers here."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def is_sequence(value: object) -> bool:
    """Return True for a list, a tuple or another sequence (e.g. OmegaConf's ``ListConfig``).

    Strings and bytes are not sequences here.
    """
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def plain(value: object) -> Any:
    """Convert an argument to the plain Python type that options, records and messages store.

    Numbers of other types (e.g. NumPy scalars) become ``int`` or ``float``, sequences (e.g. a list
    or OmegaConf's ``ListConfig``) become tuples of converted items. Everything else, including
    booleans, arrays and tensors, is returned unchanged.
    """
    if is_sequence(value):
        return tuple(map(plain, typing.cast("Sequence[object]", value)))
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return operator.index(value)
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return float(value)
    return value


def named(owner: str, **kinds: Any) -> Callable[[_Function], _Function]:
    """Decorate a function so that unknown, missing or mistyped arguments raise ``OptionError``.

    Arguments are converted with :func:`plain` before the function gets them.

    Args:
        owner: name of the function as its caller knows it, for error messages.
        kinds: types of some arguments; a value of another type is refused.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [one for name, one in signature.parameters.items() if name != "self"]
        known = [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]
        by_name = [f"{one.name}=" for one in parameters if one.kind is one.KEYWORD_ONLY]
        needed = [one for one in parameters if one.default is one.empty]
        may_be_bare = "self" in signature.parameters and not needed

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if may_be_bare and len(args) == 1 and not options:
                return function(*args)  # the common call, at each save: nothing to validate
            args = tuple(map(plain, args))
            options = {name: plain(value) for name, value in options.items()}
            refuse_unknown(owner, options, known)
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                hint = f"by name: {', '.join(by_name)}" if by_name else None
                raise OptionError(f"{owner}: {error}", hint=hint) from None
            _refuse_misfits(f"{owner}({{}}=)", bound.arguments, kinds)
            return function(*args, **options)

        return typing.cast("_Function", call)

    return decorate


def checked(cls: _Class) -> _Class:
    """Decorate a dataclass so that it validates the names and types of its arguments.

    Its own ``__post_init__`` runs first, because its messages are more specific. It may convert a
    field (a list to a tuple) and may compare values without checking their types: an exception of
    such a comparison is reported as a wrong type.

    Raises:
        OptionError: when an object is constructed with invalid arguments.
    """
    made: Any = cls
    init = named(cls.__name__)(made.__init__)
    hints = typing.get_type_hints(cls)

    @functools.wraps(made.__init__)
    def checked_init(self: Any, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except EverstepError:
            raise
        except Exception:  # e.g. a comparison of a number with a string in __post_init__
            # If a field has the wrong type, that is reported instead of the exception that it has
            # caused.
            _check_fields(self, hints)
            raise
        _check_fields(self, hints)

    made.__init__ = checked_init
    return cls


def _check_fields(made: Any, hints: Mapping[str, Any]) -> None:
    fields = {name: getattr(made, name) for name in hints}
    _refuse_misfits(f"{type(made).__name__}.{{}}", fields, hints)


def _refuse_misfits(where: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for name, hint in hints.items():
        if name not in values:
            continue
        shown = where.format(name)
        value = values[name]
        if is_int(value) and abs(value) > NUMBER_MAX:
            raise OptionError(f"{shown} must be at most {NUMBER_MAX}, not {value!r}")
        if not _fits(value, hint):
            raise OptionError(f"{shown} must be {_words(hint)}, not {value!r}")


def _fits(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is tuple:
        one = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_fits(item, one) for item in value)
    if hint is int:
        return is_int(value)
    if hint is float:
        return is_number(value)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(one) for one in typing.get_args(hint))
    if origin is tuple:
        return f"a list or a tuple, each {_words(typing.get_args(hint)[0])}"
    name = hint.__name__
    return _WORDS.get(hint) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


UNITS_S = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""Units of time, in seconds."""

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def amount_of(text: object, units: Mapping[str, float]) -> float | None:
    """Return the amount that a text like ``"2.5h"`` names, in the smallest unit, or None."""
    match = _AMOUNT.fullmatch(str(text))
    scale = units.get(match[2]) if match else None
    return None if match is None or scale is None else float(match[1]) * scale
