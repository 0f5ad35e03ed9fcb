"""Encode plain Python objects as bytes: tagged msgpack, never pickle.

Everything of a training state that is not a tensor goes through :func:`encode` and comes back from
:func:`decode` with the same types and values, or is refused by name. The caller puts a
:class:`TensorRef` in the place of each tensor.

Wire format
    One msgpack value; nothing follows it. None, bool, float (always float 64), str (UTF-8),
    bytes, list and dict (order kept, any hashable storable keys) are msgpack's own nil, bool,
    float, str, bin, array and map; int is msgpack's int from -2**63 up to 2**64 (exclusive).
    Anything else is *tagged*: an array whose first element is a marker, an ext of length 0
    (bytes ``c7 00 tag``) whose ext code is the tag; the other elements are its components. An
    ext anywhere else, or with a payload, is an error.

    === =================== =====================================================
    tag type                components
    === =================== =====================================================
      1 tuple               the items
      2 set                 the members, in ascending order of their encodings
      3 frozenset           as for set
      4 OrderedDict         key, value, key, value, ...
      5 Counter             as for OrderedDict
      6 deque               maxlen or nil, then the items
      7 range               start, stop, step
      8 slice               start, stop, step
      9 torch.Size          the lengths
     32 int                 bin: two's complement, little endian, as short as can be
     33 complex             float: real part, float: imaginary part
     34 bytearray           bin
     35 numpy.ndarray       str: dtype, bin: elements in C order, then the shape
     36 numpy.generic       str: dtype, bin: the element
     37 numpy.str_          str
     38 numpy.bytes_        bin
     39 torch.dtype         str: name without "torch."
     40 torch.device        str: type, index or nil
     41 torch.memory_format str: name without "torch."
     42 torch.layout        str: name without "torch."
     43 TensorRef           str: name of the entry
     44 GeneratorState      str: kind of generator, bin: its state, encoded
     45 RegisteredValue     str: name of a type of the user's own, bin: its bytes
    === =================== =====================================================

    Tags below 32 are containers, as are list and dict: their components are any values, and at
    most ``MAX_DEPTH`` containers may lie inside each other (keys and members count too). The
    components of other tags are untagged scalars. Equal values with equal order of keys have
    equal bytes. An object that is referred to twice is written twice.

Refused, though they look plain: subclasses of these types (they would come back as another type)
and numpy arrays of objects, structures and ``longdouble`` (which differs between machines).

Explain why an object cannot be stored, and suggest a form that can.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import compress
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import torch
from torch.utils.data import DataLoader

from everstep.errors import FormatError, UnsupportedStateError
from everstep.state.values.generators import GeneratorState
from everstep.state.values.registered import RegisteredValue

_CODE = (FunctionType, BuiltinFunctionType, MethodType, partial, ModuleType)
_BASES = (OrderedDict, Counter, dict, list, tuple, set, frozenset, deque, bytes, bytearray)
_ADVICE: tuple[tuple[Any, str], ...] = (  # for instances of a type, or for types with an attribute
    (Enum, "an enum member; store its .name or .value"),
    (torch.Tensor, "tensors are found only in dicts, lists and tuples; put it in one of these"),
    (np.ndarray, "a subclass of numpy.ndarray; store numpy.array(value)"),
    (np.generic, "not the same on every machine, or a structure; store plain numbers"),
    ("_fields", "a namedtuple would come back as a tuple; store its _asdict()"),
    *((base, f"a subclass of {base.__name__}; store {base.__name__}(value)") for base in _BASES),
    ((int, float, complex, str), "a subclass of a plain type; convert it to that type"),
    (_CODE, "code cannot be stored; store the data that it depends on"),
    (type, "a class cannot be stored; store its name"),
    (
        DataLoader,
        "torch's own has no position; put everstep.data.ResumableLoader(loader) into the state, "
        "and iterate over that",
    ),
    ("state_dict", "give it a place of its own in the state, or store its state_dict()"),
    (np.random.BitGenerator, "store the numpy.random.Generator that draws from it"),
    ("bit_generator", "store its bit_generator.state"),
    ("get_state", "store its get_state()"),
    ("getstate", "store its getstate()"),
    ("isoformat", "store its isoformat()"),
    ("__fspath__", "store str(value)"),
    ("__dataclass_fields__", "store dataclasses.asdict(value)"),
    ("__next__", "an iterator's position cannot be stored; store its count"),
)
# Keys that are in every state_dict() of a kind of object.
_SNAPSHOTS = {
    "an optimizer": {"state", "param_groups"},
    "a scheduler": {"last_epoch", "_last_lr"},
    "a scaler": {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"},
}
_SNAPSHOT_DEPTH = 3


def storage_advice(value: object) -> str:
    """Return the type of an unsupported object, and a form to store instead."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    for mark, advice in _ADVICE:
        if hasattr(kind, mark) if isinstance(mark, str) else isinstance(value, mark):
            return f"{name}: {advice}"
    return (
        f"{name}: only plain data can be stored; store its contents, or register the class with "
        "everstep.data.register_type"
    )


def copied_state_dict_owner(value: object, depth: int = 0) -> str | None:
    """Return the kind of object whose ``state_dict()`` was copied into plain data; None for other
    data.

    Training does not update such a copy, and restoring it does not change the object it came from.
    """
    if type(value) is dict:
        for kind, keys in _SNAPSHOTS.items():
            if keys <= value.keys():
                return kind
    items: Iterable[object] = ()
    if type(value) in (dict, OrderedDict) and isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    found = (
        (copied_state_dict_owner(item, depth + 1) for item in items)
        if depth < _SNAPSHOT_DEPTH
        else ()
    )
    return next(filter(None, found), None)


FIXED: Final = frozenset((type(None), bool, int, float))
"""Immutable types all of whose values can be stored."""

_STR = frozenset((str,))
_LEVELS = 8
_TEXT_BYTES_MAX = 1 << 20


def is_plain(value: object, levels: int = _LEVELS) -> bool:
    """Return True if a value consists of numbers, bools, None and short ASCII strings, in dicts
    with such strings as keys, lists and tuples, nested at most ``levels`` deep.

    This is a fast check for the training thread, which looks at all objects at each save. False
    does not mean that the value cannot be stored.
    """
    kind = type(value)
    if kind is str:
        assert isinstance(value, str)
        return value.isascii() and len(value) <= _TEXT_BYTES_MAX
    if kind is dict and levels > 0:
        assert isinstance(value, dict)
        if not _is_named_plainly(value):
            return False
        parts: Iterable[object] = value.values()
    elif kind in (list, tuple) and levels > 0:
        assert isinstance(value, (list, tuple))
        parts = value
    else:
        return kind in FIXED
    if FIXED.issuperset(map(type, parts)):
        return True
    return all(type(part) in FIXED or is_plain(part, levels - 1) for part in parts)


def is_fixed(value: Mapping[Any, Any]) -> bool:
    """Return True if a dict holds only numbers, bools, None, and tuples of them: immutable plain
    data."""
    for part in value.values():
        kind = type(part)
        if kind not in FIXED and (kind is not tuple or not FIXED.issuperset(map(type, part))):
            return False
    return _is_named_plainly(value)


def _is_named_plainly(value: Mapping[Any, Any]) -> bool:
    return _STR.issuperset(map(type, value)) and is_plain("".join(value), 0)


MAX_DEPTH: Final = 100
"""Maximum number of nested containers, when encoding and when decoding."""

_BULK_BYTES = 1024  # below this compiled code is not faster
_BIN_BYTES_MAX = 2**32 - 1  # msgpack's longest bin and str
_NATIVE = FIXED | {str, bytes}
_HOSTILE = (ValueError, TypeError, OverflowError, RuntimeError, IndexError, msgpack.OutOfData)
_NUMPY_DTYPE = re.compile(  # strings are bounded because even an empty array allocates one item
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)"
    r"|[<>][Mm]8(\[([1-9][0-9]{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
    r"|\|S[1-9][0-9]{0,5}|[<>]U[1-9][0-9]{0,5}"
)
_INSIDE = MAX_DEPTH + 1  # height of a container while we are in it
_NDIM_MAX = 64  # numpy's own limit
_NUMPY_SCALARS = frozenset(np.dtype(code).type for code in "?bhilBHILefdFDmM")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Reference to a tensor in an object tree; ``name`` is the name of its entry."""

    name: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """Subtree that :func:`encode` has encoded before, at this depth or deeper."""

    data: bytes


def encode(value: object, name: str = "object", *, checked: bool = False) -> bytes:
    """Return the bytes of ``value``; equal values always give equal bytes.

    Args:
        value: plain data, as listed in the module's docstring.
        name: name of the value in error messages.
        checked: :func:`unsupported_leaves` has found nothing in it, and it has not changed since.

    Raises:
        UnsupportedStateError: some leaves cannot be stored; lists all of them.
    """
    leaves = [] if checked else unsupported_leaves(value, name)
    if leaves:
        listed = "\n".join(f"  {path}: {reason}" for path, reason in leaves)
        raise UnsupportedStateError(
            f"{len(leaves)} part(s) of the state cannot be stored:\n{listed}", leaves=tuple(leaves)
        )
    return b"".join(_pieces(value, msgpack.Packer(strict_types=True)))


def encode_plain(value: object, *, owned: bool = False) -> bytes | None:
    """Return what :func:`encode` returns, made by compiled code; None for a value that has to be
    encoded piece by piece.

    This is for the training thread, which takes a copy of all plain data at each save: a copy made
    in Python, and the search of :func:`unsupported_leaves`, take some ten times as long.

    Args:
        owned: True if no other thread can change the containers. Otherwise only dicts and lists of
            numbers, text and bytes are encoded: Python code, such as that for a tuple, would let
            another thread change a container whose length is already written.
    """
    kinds = _PACKED if owned else _PACKED_AT_ONCE
    if not _is_packable(value, kinds):
        return None
    packer = msgpack.Packer(strict_types=True, default=_components if owned else None)
    try:
        data: bytes = packer.pack(value)
    # Whatever a leaf raises: encode() meets it again, and names it.
    except Exception:
        return None
    # Another thread may have changed the value since it was looked at.
    return data if owned or _is_packable(value, kinds) else None


def _is_packable(value: object, kinds: Set[type]) -> bool:
    """Return True if a value consists of these types, and has no more levels than can be stored.

    The containers of a level are replaced by their contents, level by level. msgpack itself would
    take a bytearray for bytes, and an ExtType of the user for a tag, and has another limit of
    depth.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        found = set(map(type, level))
        if found <= _NATIVE:
            return True
        if not found <= kinds:
            return False
        level = _next_level(level)
    return False


def _components(value: Any) -> list[Any]:
    """Return a tagged value as a list that msgpack packs.

    Raises:
        TypeError: it cannot be stored.
    """
    form = _BY_TYPE[type(value)]
    if form.tag >= _LEAF_TAG and _leaf_problem(value) is not None:
        raise TypeError
    return [_MARKERS[form.tag], *form.parts(value)]


def decode(data: bytes | memoryview) -> object:
    """Return the value that :func:`encode` was given.

    Safe for untrusted bytes: no allocation relies on a length field alone, and no code is run.

    Raises:
        FormatError: the bytes were not written by :func:`encode`.
    """
    data = bytes(data)
    if len(data) >= _BULK_BYTES and (found := _decode_plain(data)) is not None:
        return found[0]
    try:
        return _Reader(data).read()
    except _HOSTILE as error:
        ends = isinstance(error, (IndexError, msgpack.OutOfData))
        reason = "they end too early" if ends else str(error)
        raise FormatError(f"an object's bytes are invalid: {reason}") from error


def unsupported_leaves(value: object, name: str) -> list[tuple[str, str]]:
    """Return every leaf of ``value`` that cannot be stored, as ``(path, reason)``.

    ``name`` is the path of ``value`` itself, and the front of all the paths. A member of a set has
    no key or index; in a path it is ``*``. A container that several paths lead to is searched once,
    under the first of them.
    """
    if is_plain(value):
        return []
    walker = _Walker()
    walker.walk(value, name, "", 0)
    return walker.found


def join_path(parent: str, key: object) -> str:
    """Return the path of ``key`` (of a dict, or an index) in ``parent``: ``section/key/3``.

    In a key, ``~`` is written ``~0`` and ``/`` is written ``~1``. The result is valid UTF-8 for
    every key. Keys 0 and "0" share a path. An empty ``parent`` stands for no parent.
    """
    try:
        text = str(key)
    except Exception:  # an int of more digits than Python prints, or a foreign __str__
        text = hex(key) if type(key) is int else f"<{type(key).__name__}>"
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    text = text.replace("~", "~0").replace("/", "~1")
    return f"{parent}/{text}" if parent else text


def _decode_plain(data: bytes) -> tuple[object] | None:
    """Return the value that :func:`encode_plain` has encoded, made by compiled code; None for
    other bytes, which :class:`_Reader` has to read, or to refuse."""
    sizes = {f"max_{kind}_len": len(data) for kind in ("str", "bin", "array", "map")}
    try:
        # Before anything is allocated: every element that a length field announces is there.
        tokens = msgpack.Unpacker(max_buffer_size=len(data) or 1, max_ext_len=0, **sizes)
        tokens.feed(data)
        tokens.skip()
        value: object = msgpack.unpackb(
            data, strict_map_key=False, list_hook=_untagged, max_ext_len=0, **sizes
        )
    except Exception:
        return None
    # Only these bytes have this meaning: not those of a key that is there twice, for example.
    return (value,) if encode_plain(value, owned=True) == data else None


def _untagged(parts: list[Any]) -> object:
    """Return the value of an array: itself, or what it is as a tagged value."""
    if not parts or type(parts[0]) is not msgpack.ExtType:
        return parts
    return _BY_TAG[parts[0].code].build(parts[1:])


def kinds_within(value: object) -> frozenset[type]:
    """Return the types of a value, of all containers in it, and of what these hold.

    Raises:
        UnsupportedStateError: containers are nested too deeply, or contain themselves.
    """
    kinds: set[type] = set()
    for level in _levels(value):
        kinds.update(map(type, level))
    return frozenset(kinds)


def registered_names(value: object) -> set[str]:
    """Return the names of the types of all registered values in a tree.

    Raises:
        UnsupportedStateError: containers are nested too deeply, or contain themselves.
    """
    return {
        one.name for level in _levels(value) for one in level if isinstance(one, RegisteredValue)
    }


def _levels(value: object) -> Iterator[list[object]]:
    level = [value]
    # The levels of containers, that of the innermost leaves, and an empty one.
    for _ in range(MAX_DEPTH + 2):
        if not level:
            return
        yield level
        level = _next_level(level)
    reason = f"nested more than {MAX_DEPTH} levels deep, or contains itself"
    raise UnsupportedStateError(reason, leaves=(("", reason),))


def _next_level(level: list[object]) -> list[object]:
    """Return what the containers in a list refer to."""
    containers = compress(level, map(_CONTAINERS.__contains__, map(type, level)))
    # Each once: a container that contains itself twice would double each level.
    return gc.get_referents(*{id(container): container for container in containers}.values())


class _Form(NamedTuple):
    """Tagged type: how to take a value into components, and how to build it from unchecked
    components."""

    tag: int
    name: str
    kind: type
    parts: Callable[[Any], list[Any]]
    build: Callable[[list[Any]], object]  # raises only exceptions in _HOSTILE


def _take(parts: list[Any], *kinds: type) -> list[Any]:
    """Return ``parts`` if they have exactly these types; ``object`` stands for any."""
    for part, kind in zip(parts, kinds, strict=True):
        if kind not in (object, type(part)):
            raise ValueError(f"{kind.__name__} was expected, not {type(part).__name__}")
    return parts


def _simple(tag: int, kind: type, parts: Callable[[Any], list[Any]], *kinds: type) -> _Form:
    """Create the form of a type whose constructor takes its components, which have these types."""
    name = f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__
    return _Form(tag, name, kind, parts, lambda got: kind(*_take(got, *kinds)))


def _torch_enum(tag: int, kind: type) -> _Form:
    """Create the form of a type whose instances are attributes of ``torch``, and print as such."""
    known = {str(item)[6:]: item for item in vars(torch).values() if isinstance(item, kind)}
    name = f"torch.{kind.__name__}"
    return _Form(tag, name, kind, lambda item: [str(item)[6:]], partial(_look_up, known))


def _look_up(known: Mapping[str, object], parts: list[Any]) -> object:
    (name,) = _take(parts, str)
    if name not in known:
        raise ValueError("this build of torch has nothing of that name")
    return known[name]


def _bounds(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _build_unique(kind: Any, parts: list[Any]) -> object:
    """Build a set from members, or a dict from alternating keys and values; refuse duplicates."""
    of_pairs = issubclass(kind, dict)
    unique = dict(zip(parts[::2], parts[1::2], strict=True)) if of_pairs else set(parts)
    if len(unique) * (2 if of_pairs else 1) != len(parts):
        raise ValueError("a key or member is there twice")
    return kind(unique)


def _build_deque(parts: list[Any]) -> object:
    maxlen, *items = parts
    if type(maxlen) not in (int, type(None)) or (maxlen is not None and maxlen < len(items)):
        raise ValueError("a deque holds more than its maxlen")
    return deque(items, maxlen)


def _int_parts(value: int) -> list[Any]:
    # One more bit than the magnitude, for the sign; ~value because -2**n fits where 2**n does not.
    length = (value if value >= 0 else ~value).bit_length() // 8 + 1
    return [value.to_bytes(length, "little", signed=True)]


def _build_int(parts: list[Any]) -> object:
    (data,) = _take(parts, bytes)
    value = int.from_bytes(data, "little", signed=True)
    # One encoding for each value: equal values must have equal bytes.
    if -(2**63) <= value < 2**64 or _int_parts(value) != parts:
        raise ValueError("an int takes more bytes than it needs")
    return value


def _numpy_parts(value: Any) -> list[Any]:
    return [value.dtype.str, value.tobytes(), *value.shape]


def _build_array(parts: list[Any]) -> np.ndarray[Any, Any]:
    name, data, *shape = _take(parts, str, bytes, *[int] * (len(parts) - 2))
    dtype = np.dtype(name) if _NUMPY_DTYPE.fullmatch(name) else None
    if dtype is None or dtype.str != name or len(shape) > _NDIM_MAX:
        raise ValueError("not a dtype, or more dimensions than arrays have")
    # In Python's integers, which do not overflow, and before NumPy allocates anything.
    size_bytes = dtype.itemsize
    for length in shape:
        size_bytes *= length
    if size_bytes != len(data):
        raise ValueError("an array has another length than its shape and dtype say")
    # A copy, since the memory of bytes is read-only.
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, data).copy()
    if reason := _array_problem(array):
        raise ValueError(reason)
    return array


def _build_scalar(parts: list[Any]) -> object:
    return _build_array(_take(parts, str, bytes))[()]


def _build_device(parts: list[Any]) -> object:
    kind, index = _take(parts, str, object)
    device = torch.device(kind) if index is None else torch.device(kind, index)
    if type(index) not in (int, type(None)) or [device.type, device.index] != parts:
        raise ValueError("not a torch device")  # torch keeps 8 bits of an index
    return device


_LEAF_TAG = 32  # tags from here on are of scalars

_FORMS = (
    _Form(1, "tuple", tuple, list, tuple),
    _Form(2, "set", set, list, partial(_build_unique, set)),
    _Form(3, "frozenset", frozenset, list, partial(_build_unique, frozenset)),
    _Form(4, "OrderedDict", OrderedDict, _pairs, partial(_build_unique, OrderedDict)),
    _Form(5, "Counter", Counter, _pairs, partial(_build_unique, Counter)),
    _Form(6, "deque", deque, lambda value: [value.maxlen, *value], _build_deque),
    _simple(7, range, _bounds, int, int, int),
    _simple(8, slice, _bounds, object, object, object),
    _Form(9, "torch.Size", torch.Size, list, torch.Size),
    _Form(32, "int", int, _int_parts, _build_int),
    _simple(33, complex, lambda value: [value.real, value.imag], float, float),
    _simple(34, bytearray, lambda value: [bytes(value)], bytes),
    _Form(35, "numpy.ndarray", np.ndarray, _numpy_parts, _build_array),
    _Form(36, "numpy.generic", np.generic, _numpy_parts, _build_scalar),
    _simple(37, np.str_, lambda value: [str.__str__(value)], str),
    _simple(38, np.bytes_, lambda value: [bytes.__getitem__(value, slice(None))], bytes),
    _torch_enum(39, torch.dtype),
    _Form(40, "torch.device", torch.device, lambda value: [value.type, value.index], _build_device),
    _torch_enum(41, torch.memory_format),
    _torch_enum(42, torch.layout),
    _simple(43, TensorRef, lambda value: [value.name], str),
    _simple(44, GeneratorState, lambda value: [value.kind, value.data], str, bytes),
    _simple(45, RegisteredValue, lambda value: [value.name, value.data], str, bytes),
)
_MARKERS = {form.tag: msgpack.ExtType(form.tag, b"") for form in _FORMS}
_BY_TAG = {form.tag: form for form in _FORMS}
_BY_TYPE = {form.kind: form for form in _FORMS} | dict.fromkeys(_NUMPY_SCALARS, _BY_TAG[36])
_CONTAINERS = {form.kind for form in _FORMS if form.tag < _LEAF_TAG} | {list, dict}

_PACKED_AT_ONCE = _NATIVE | {list, dict}
# Without sets, whose members are sorted, and bytearrays, which msgpack packs as bytes.
_PACKED = (_NATIVE | _BY_TYPE.keys() | {list, dict}) - {
    set,
    frozenset,
    bytearray,
    TensorRef,
    GeneratorState,
}

TAGS: Mapping[str, int] = MappingProxyType({form.name: form.tag for form in _FORMS})
"""Ext code of each tagged type, as in the table above."""


def _pieces(value: Any, packer: Any) -> Iterator[bytes]:
    """Yield the encoding of a value without unsupported leaves, in pieces."""
    kind = type(value)
    if kind is Encoded:
        yield value.data
        return
    if kind in _NATIVE:
        with suppress(OverflowError):  # an int of more than 64 bits goes on
            yield packer.pack(value)
            return
    if kind is dict:
        yield packer.pack_map_header(len(value))
        for part in _pairs(value):
            yield from _pieces(part, packer)
        return
    form = _BY_TYPE.get(kind)  # None for a list
    marker = [_MARKERS[form.tag]] if form else []
    parts = form.parts(value) if form else value
    if kind not in (set, frozenset) and set(map(type, parts)) <= _NATIVE:
        with suppress(OverflowError):
            yield packer.pack([*marker, *parts])  # all at once is fast
            return
    yield packer.pack_array_header(len(marker) + len(parts))
    yield from map(packer.pack, marker)
    if kind in (set, frozenset):
        # Equal sets are iterated in different orders, even within one process.
        yield from sorted(b"".join(_pieces(part, packer)) for part in parts)
    else:
        for part in parts:
            yield from _pieces(part, packer)


_ARRAY_BYTES = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
_MAP_BYTES = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_EXT8_BYTE = 0xC7
_NOT_SCALAR = _ARRAY_BYTES | _MAP_BYTES | {0xC1, 0xC7, 0xC8, 0xC9, 0xCA, *range(0xD4, 0xD9)}
"""First bytes of arrays, maps, exts, float 32, and the byte that msgpack does not use."""


class _Reader:
    """Reader of one value from untrusted bytes.

    Scalars are read by msgpack. Arrays and maps are read here, because msgpack allocates a list as
    long as an array claims to be and has no depth limit.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        # No valid length field exceeds the number of bytes.
        sizes = {f"max_{kind}_len": len(data) for kind in ("str", "bin", "array", "map")}
        self._tokens = msgpack.Unpacker(max_buffer_size=len(data) or 1, max_ext_len=0, **sizes)
        self._tokens.feed(data)
        self._tell: Callable[[], int] = self._tokens.tell

    def read(self) -> object:
        value = self._value(0)
        if self._tell() != len(self._data):
            raise ValueError("bytes follow the end")
        return value

    def _value(self, depth: int) -> object:
        first = self._data[self._tell()]  # an IndexError where the bytes end too early
        if first not in _NOT_SCALAR:
            value: object = self._tokens.unpack()
            return value
        if first not in _ARRAY_BYTES | _MAP_BYTES or depth > MAX_DEPTH:
            raise ValueError(f"byte 0x{first:02x} is not expected where it stands")
        if first in _MAP_BYTES:
            return _build_unique(dict, self._values(2 * self._tokens.read_map_header(), depth))
        count = self._tokens.read_array_header()
        if count == 0 or self._data[self._tell()] != _EXT8_BYTE:
            return self._values(count, depth)
        marker = self._tokens.unpack()
        if marker.code not in _BY_TAG:
            raise ValueError(f"tag {marker.code} is unknown")
        form = _BY_TAG[marker.code]
        if form.kind in _CONTAINERS:
            return form.build(self._values(count - 1, depth))
        return form.build([self._value(MAX_DEPTH + 1) for _ in range(count - 1)])

    def _values(self, count: int, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        return [self._value(depth + 1) for _ in range(count)]


class _Walker:
    """Search for leaves that cannot be stored, without writing or copying."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._heights: dict[int, int] = {}  # of containers, by id: each is walked once

    def walk(self, value: Any, path: str, role: str, depth: int) -> int:
        """Add unsupported leaves to ``found``; return the height of ``value`` in levels of
        containers.

        ``role`` ("key: ") precedes the reasons if the path alone would mislead.
        """
        if type(value) not in _CONTAINERS:
            if reason := _leaf_problem(value):
                self.found.append((path, role + reason))
            return 0
        known = self._heights.get(id(value))
        if known is not None and depth + known <= MAX_DEPTH:
            return known
        if known is not None or depth >= MAX_DEPTH:
            reason = f"nested more than {MAX_DEPTH} levels deep, or contains itself"
            self.found.append((path, role + reason))
            return 0
        height = 1
        self._heights[id(value)] = _INSIDE
        for key, part, part_role in _children(value):
            if type(part) not in _NATIVE:
                part_height = self.walk(part, join_path(path, key), role + part_role, depth + 1)
                height = max(height, 1 + part_height)
            elif reason := _native_problem(part):
                self.found.append((join_path(path, key), role + part_role + reason))
        self._heights[id(value)] = height
        return height


def _children(value: Any) -> Iterator[tuple[object, object, str]]:
    """Yield ``(key in the path, child, role)`` for children of a container that may be refused."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        for key, item in value.items():
            yield key, key, "key: "
            yield key, item, ""
    elif kind in (range, slice):
        yield from zip(("start", "stop", "step"), _bounds(value), ("", "", ""), strict=True)
    elif not set(map(type, value)) <= FIXED:
        indexed = kind not in (set, frozenset)
        yield from ((index if indexed else "*", part, "") for index, part in enumerate(value))


def _leaf_problem(value: Any) -> str | None:
    kind = type(value)
    if kind is Encoded:
        return None
    if kind not in _BY_TYPE and kind not in _NATIVE:
        return storage_advice(value)
    if kind is np.ndarray:
        return _array_problem(value)
    if kind in _NATIVE or kind is bytearray:
        return _native_problem(value)
    if kind is TensorRef and type(value.name) is str:
        return _native_problem(value.name)  # by far the most frequent, so no more than needed
    form = _BY_TYPE[kind]
    parts = form.parts(value)
    try:
        form.build(parts)
    except _HOSTILE as error:
        return f"a {kind.__name__} that would not come back: {error}"
    return next(filter(None, map(_native_problem, parts)), None)


def _native_problem(value: Any) -> str | None:
    kind = type(value)
    if kind in FIXED:
        return None
    try:
        size_bytes = len(value.encode()) if kind is str and not value.isascii() else len(value)
    except UnicodeEncodeError:
        return "a str with lone surrogates, which UTF-8 cannot hold"
    return f"a {kind.__name__} of 4 GiB or more" if size_bytes > _BIN_BYTES_MAX else None


def _array_problem(array: np.ndarray[Any, Any]) -> str | None:
    dtype = array.dtype
    if not _NUMPY_DTYPE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype or dtype.metadata:
        return f"a numpy array of {dtype!r}; convert it with astype(), or store its tolist()"
    if array.nbytes > _BIN_BYTES_MAX:
        return "a numpy array of 4 GiB or more; make it a torch.Tensor"
    if array.size and dtype.kind in "bU":
        unit, limit = (np.uint8, 1) if dtype.kind == "b" else (np.uint32, sys.maxunicode)
        units = np.dtype(unit).newbyteorder(dtype.byteorder)
        if np.ascontiguousarray(array).reshape(-1).view(units).max() > limit:
            return f"a numpy array with elements that {dtype!r} does not allow"
    return None
