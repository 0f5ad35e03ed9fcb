"""Types of the user's own in plain data: each is registered with two functions, for its bytes.

:func:`register_type` is public. A value of a registered type is stored as the name of its type and
the bytes that ``to_bytes`` returns, taken when the state is surveyed; ``from_bytes`` makes it again
in a process that has registered the same name. Where the type is not registered (in commands, in a
keeper) the bytes stay what they are: reading a run never runs code of its training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.errors import OptionError, UnsupportedStateError

_T = TypeVar("_T")
_NAME_LETTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class RegisteredValue:
    """Stored form of a value of a registered type.

    Attributes:
        name: name under which the type is registered.
        data: its bytes, as ``to_bytes`` returned them.
    """

    name: str
    data: bytes

    def __repr__(self) -> str:
        return f"<{self.name}, {len(self.data)} bytes>"


@dataclass(frozen=True, slots=True)
class _Registration:
    kind: type
    name: str
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


_BY_KIND: dict[type, _Registration] = {}
_BY_NAME: dict[str, _Registration] = {}


def register_type(
    kind: type[_T],
    *,
    name: str | None = None,
    to_bytes: Callable[[_T], bytes] | None = None,
    from_bytes: Callable[[bytes], _T] | None = None,
) -> type[_T]:
    """Let values of a class be part of plain data; call it before the Checkpointer is made.

    It can decorate a class that has the methods ``to_bytes()`` and, as a class method,
    ``from_bytes(data)``. Values must not hold tensors that are trained: only their bytes are saved,
    at each save, in the training thread.

    Args:
        kind: the class; subclasses are registered on their own.
        name: name in saved files, which never changes; ``"module.Class"`` by default.
        to_bytes: returns the bytes of a value, the same for equal values.
        from_bytes: makes a value that continues training as the saved one would.

    Returns:
        The class.

    Raises:
        OptionError: not a class, no such functions, or the name belongs to another class.
    """
    if not isinstance(kind, type):
        raise OptionError(f"register_type takes a class, not {kind!r}")
    chosen = f"{kind.__module__}.{kind.__qualname__}" if name is None else name
    if not isinstance(chosen, str) or not 0 < len(chosen) <= _NAME_LETTERS_MAX:
        raise OptionError(f"the name of a registered type must be a short text, not {chosen!r}")
    taken = _BY_NAME.get(chosen)
    # A cell of a notebook that is executed again defines the same class anew.
    if taken is not None and _path_of(taken.kind) != _path_of(kind):
        raise OptionError(
            f"the name {chosen!r} is registered for {taken.kind.__qualname__}",
            hint="give another name=",
        )
    encoder: Any = to_bytes or getattr(kind, "to_bytes", None)
    decoder: Any = from_bytes or getattr(kind, "from_bytes", None)
    if not callable(encoder) or not callable(decoder):
        raise OptionError(
            f"{kind.__qualname__} has no to_bytes() and from_bytes()",
            hint="define them, or give to_bytes= and from_bytes=",
        )
    if taken is not None:
        _BY_KIND.pop(taken.kind, None)
    _BY_KIND[kind] = _BY_NAME[chosen] = _Registration(kind, chosen, encoder, decoder)
    return kind


def _path_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def stored_form(value: object, path: str) -> RegisteredValue | None:
    """Return the stored form of a value; None if its type is not registered.

    Args:
        path: path of the value in the state, for messages.

    Raises:
        UnsupportedStateError: ``to_bytes`` has failed, or did not return bytes.
    """
    known = _BY_KIND.get(type(value))
    if known is None:
        return None
    try:
        data = known.to_bytes(value)
    # A user's function may raise anything.
    except Exception as error:
        reason = f"to_bytes() of {known.name} failed: {error!r}"
        raise UnsupportedStateError(f"{path}: {reason}", leaves=((path, reason),)) from error
    if type(data) is not bytes:
        reason = f"to_bytes() of {known.name} returned {type(data).__name__}, not bytes"
        raise UnsupportedStateError(f"{path}: {reason}", leaves=((path, reason),))
    return RegisteredValue(known.name, data)


def is_registered(name: str) -> bool:
    """Return True if this process has registered a type under this name."""
    return name in _BY_NAME


def value_of(stored: RegisteredValue) -> object:
    """Return the value; its stored form if the type is not registered in this process."""
    known = _BY_NAME.get(stored.name)
    return stored if known is None else known.from_bytes(stored.data)
