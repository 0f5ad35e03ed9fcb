"""What a caller has given, checked once for all: names, types and numbers.

``@checked`` makes a frozen dataclass refuse what does not fit its fields' annotations, ``@named``
a function what does not fit its signature: as :class:`~everstep.errors.OptionError`, which says
what would fit, and not as Python's ``TypeError`` or, worse, later.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from everstep.errors import EverstepError, OptionError

__all__ = [
    "NUMBER_MAX",
    "checked",
    "is_int",
    "is_number",
    "is_sequence",
    "named",
    "nearest",
    "one_of",
    "plain",
    "refuse_unknown",
]

NUMBER_MAX = (1 << 63) - 1
"""Of a whole number that is given, either way: more no record and no message can take."""

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
    """The known name that ``name`` was probably meant to be."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def refuse_unknown(who: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuses an argument that ``who`` does not have, before Python does in words of its own.

    Raises:
        OptionError: with the nearest known one.
    """
    names = list(known)
    for name in given:
        if name not in names:
            guess = nearest(name, names)
            raise OptionError(
                f"{who} has no option {name!r}; there are: {', '.join(names) or 'none'}",
                hint=f"did you mean {guess!r}?" if guess else None,
            )


def one_of(what: str, value: object, known: Iterable[str], *, beside: str = "") -> None:
    """Refuses a value that is none of some names.

    Args:
        what: the value is, in words.
        beside: what else would do, in words.

    Raises:
        OptionError: with the nearest known one.
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return
    guess = nearest(value, names) if isinstance(value, str) else None
    raise OptionError(
        f"no {what} {value!r}; there are: {', '.join(names)}{beside}",
        hint=f"did you mean {guess!r}?" if guess else None,
    )


def is_int(value: object) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a number, and a finite one; True and False are none."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def is_sequence(value: object) -> bool:
    """Return True for a list, a tuple and any other sequence (OmegaConf's ``ListConfig``, say);
    strings and bytes are no sequences here."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def plain(value: object) -> Any:
    """Return an argument in the form that options keep and that records and messages can take.

    A number of another kind (of NumPy, in which intervals and budgets are often worked out)
    becomes Python's own, and any sequence (a list, a ``ListConfig`` of OmegaConf) a tuple of such;
    all else is returned as it is. Truth values, arrays and tensors are no numbers, though some of
    them say so.
    """
    if is_sequence(value):
        return tuple(map(plain, typing.cast("Sequence[object]", value)))
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return operator.index(value)
    if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):
        return float(value)
    return value


def named(who: str, **kinds: Any) -> Callable[[_Function], _Function]:
    """Makes a function refuse arguments that it does not have, and miss those that it needs, in
    words that help. Whole numbers and sequences come to it as :func:`plain` returns them.

    Args:
        who: has the arguments, as its caller knows it.
        kinds: types of some of them, which are refused if they are of another.
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
                return function(*args)  # mostly, and at each save: there is nothing to look at
            args = tuple(map(plain, args))
            options = {name: plain(value) for name, value in options.items()}
            refuse_unknown(who, options, known)
            try:
                bound = signature.bind(*args, **options)
            except TypeError as error:
                hint = f"by name: {', '.join(by_name)}" if by_name else None
                raise OptionError(f"{who}: {error}", hint=hint) from None
            _refuse_misfits(f"{who}({{}}=)", bound.arguments, kinds)
            return function(*args, **options)

        return typing.cast("_Function", call)

    return decorate


def checked(cls: _Class) -> _Class:
    """Makes a dataclass refuse names and types that are none of its fields'.

    Its own ``__post_init__`` speaks first, since it knows more; it may also put a field right (a
    list for a tuple), and need not mind what compares with what.

    Raises:
        OptionError: of the class, when it is made.
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
        except Exception:  # of a comparison, say, of a number with a string
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
