"""Typed messages between processes, and their bytes: MessagePack by :mod:`msgspec`.

A message is a struct whose fields have types and bounds (:class:`TypedMessage`); its kind is the
name of its class, or a tag. Decoding returns an object of the declared types, or raises an error
that names the field: receivers check no types by themselves. Fields may be dataclasses, whose own
unknown fields are ignored.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Generic, Protocol, Self, TypeVar, get_args

import msgspec
from msgspec import Meta

from everstep.errors import EverstepError, FormatError

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Integer that is never negative: a step, a timeline, an offset, a size in bytes."""

Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
"""Number of a rank."""

Text = Annotated[str, Meta(max_length=1 << 20)]
"""Reason or description."""

_WIRE = PurePath("message")


class TypedMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """Message of one kind. A message with other fields is refused: it is of another version."""


class _Record(Protocol):
    """Record of a run folder (:mod:`.records`)."""

    def encode(self) -> bytes: ...

    @classmethod
    def decode(cls, data: bytes, path: PurePath) -> Self: ...


_R = TypeVar("_R", bound=_Record)
_T = TypeVar("_T")


class Stored(Generic[_R]):
    """Record of a run folder within a message: sent as its bytes on disk, with their digest."""

    __slots__ = ("record",)

    def __init__(self, record: _R) -> None:
        self.record = record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stored) and self.record == other.record

    def __hash__(self) -> int:
        return hash(self.record)

    def __repr__(self) -> str:
        return f"Stored({self.record!r})"


def encode(value: Any) -> bytes:
    """Return the bytes of a message or of another typed value."""
    return _ENCODER.encode(value)


class Decoder(Generic[_T]):
    """Decoder of values of one type.

    Args:
        kind: type of the values; a union of messages, for example.
        name: description of the values in errors.
    """

    def __init__(self, kind: Any, name: str) -> None:
        # No type may be a union of a fixed tuple and a bounded number (tuple[Count, int] | Count):
        # the garbage collector crashes when it walks such a decoder (msgspec 0.22).
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_to_stored)
        self._name = name

    def decode(self, data: bytes | bytearray | memoryview) -> _T:
        """Decode a value.

        Raises:
            FormatError: ``data`` is something else.
            EverstepError: a record in it is damaged or of a newer format.
        """
        try:
            found: _T = self._decoder.decode(data)
        except EverstepError:
            raise
        # Hostile bytes may also exhaust the stack, or fail in the decoder of text.
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            raise FormatError(f"not {self._name}: {error}") from error
        return found


def union_of(kind: type[TypedMessage]) -> Any:
    """Return the union of the messages derived from ``kind``: the classes without subclasses."""
    leaves: list[Any] = []
    for below in kind.__subclasses__():
        leaves.append(union_of(below) if below.__subclasses__() else below)
    return functools.reduce(operator.or_, leaves)


def _plain(value: Any) -> Any:
    if isinstance(value, Stored):
        return value.record.encode()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"no form in a message for {type(value).__name__}")


def _to_stored(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", None) is not Stored or not isinstance(value, bytes):
        # msgspec turns a ValueError of a hook into its own error, which names the field.
        raise ValueError("not the bytes of a record")
    (record,) = get_args(kind)
    return Stored(record.decode(value, _WIRE))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
