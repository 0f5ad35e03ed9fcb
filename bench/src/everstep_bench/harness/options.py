"""Options of a bench, declared once: command line, defaults and checks follow from a field.

A field of a frozen dataclass that derives from :class:`Options`::

    params: int = option("10M", "Of the model, like 25M or 1G.", parse_params, least=100_000)

Its default is text where the field has a parser, as on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from everstep.config.given import did_you_mean
from everstep.errors import OptionError

_Options = TypeVar("_Options", bound="Options")
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


@dataclass(frozen=True, slots=True)
class Declared:
    """Declaration of an option.

    Attributes:
        text: default as on the command line, where that is not the value itself.
        flags: on the command line; none: the field's name.
        least, most: bounds of the value, or of each value of several.
        choices: all values that there are.
        hint: for a value that is refused.
    """

    help: str
    text: Any
    parse: Callable[[str], Any] | None
    flags: tuple[str, ...]
    least: float | None
    most: float | None
    choices: Collection[str]
    hint: str | None

    def default(self) -> Any:
        """Return the value of the default."""
        return self.text if self.parse is None or self.text is None else self.parse(self.text)

    def check(self, name: str, value: Any) -> None:
        """Refuse a value out of bounds.

        Raises:
            OptionError: naming the bounds, or the nearest choice.
        """
        name = self.flags[0] if self.flags else "--" + name.replace("_", "-")
        several = isinstance(value, tuple)
        bounded = self.choices or self.hint or self.least is not None
        if several and not value and bounded:
            raise OptionError(f"{name}: at least one is needed", hint=self.hint)
        for one in value if several else () if value is None else (value,):
            self._check_one(name, one)

    def _check_one(self, name: str, value: Any) -> None:
        if self.choices and value not in self.choices:
            raise OptionError(
                f"{name}: no {value!r}; there are: {', '.join(self.choices)}",
                hint=did_you_mean(str(value), self.choices),
            )
        if self.least is not None and not value >= self.least:
            raise OptionError(f"{name} {value}: at least {self.least:,}", hint=self.hint)
        if self.most is not None and not value <= self.most:
            raise OptionError(f"{name} {value}: at most {self.most:,}", hint=self.hint)


def option(
    default: Any,
    words: str,
    parse: Callable[[str], Any] | None = None,
    *,
    flags: str = "",
    least: float | None = None,
    most: float | None = None,
    choices: Collection[str] = (),
    hint: str | None = None,
) -> Any:
    """Declare an option of the command line.

    Args:
        words: help on the command line.
        default: text, where there is a parser; None: there is no value.
        parse: makes the value of the text.
        flags: on the command line, with spaces between.
    """
    made = Declared(words, default, parse, tuple(flags.split()), least, most, choices, hint)
    # Parsed late: parsers of units are the command's, whose package loads this one as a plug-in.
    return field(default_factory=made.default, metadata={"option": made})


def declared(options: type[Options]) -> dict[str, Declared]:
    """Return the declarations of all options, by the field's name."""
    return {one.name: one.metadata["option"] for one in fields(options) if "option" in one.metadata}


@dataclass(frozen=True)
class Options:
    """Options of a bench. Its docstring is the help of the command.

    Raises:
        OptionError: for what makes no measurement.
    """

    def __post_init__(self) -> None:
        for name, one in declared(type(self)).items():
            one.check(name, getattr(self, name))
        self.check()

    def check(self) -> None:
        """Refuse what is wrong together.

        Raises:
            OptionError: naming it.
        """

    def begin(self) -> None:
        """Look, before anything is measured, whether what is asked for can be done."""


def from_words(options: type[_Options], **words: Any) -> _Options:
    """Make options of words as on the command line; others are left at their defaults."""
    known = declared(options)
    for name, word in words.items():
        parse = known[name].parse
        if parse is not None and isinstance(word, str):
            words[name] = parse(word)
    return options(**words)


# --- Parsers ----------------------------------------------------------------------------


def parse_list(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser of values with commas, each once."""
    return lambda text: tuple(dict.fromkeys(parse(word.strip()) for word in text.split(",")))


def parse_number(text: str) -> int:
    """Return a whole number.

    Raises:
        OptionError: for anything else.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise OptionError(f"{text!r} is no whole number", hint="like 8, or 1,10,50")
    return int(text)


def parse_params(text: str) -> int:
    """Return a number of parameters: ``"25M"``, ``"1.5G"``, ``"300000"``.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgb]?)\s*", text.lower())
    if match is None:
        raise OptionError(f"{text!r} is no number of parameters", hint="like 10M, 1.5G")
    return round(float(match[1]) * _SCALES[match[2]])


def parse_share(text: str) -> float:
    """Return a share: ``"3.5%"`` or ``"0.035"``.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    if match is None:
        raise OptionError(f"{text!r} is no share", hint="like 3.5% or 0.035")
    return float(match[1]) / (100 if match[2] else 1)


def parse_size(text: str) -> int:
    """Return bytes: ``"1GiB"``."""
    from everstep.cli.common.output import parse_bytes

    return int(parse_bytes("a size:", text))


def parse_time(text: str) -> float:
    """Return seconds: ``"10s"``, ``"100ms"``."""
    from everstep.cli.common.output import parse_seconds

    return parse_seconds("a duration:", text)


def parse_speed(text: str) -> float:
    """Return bytes in a second: ``"2GB/s"``."""
    from everstep.cli.common.output import parse_bytes_per_s

    return parse_bytes_per_s("a bandwidth:", text)
