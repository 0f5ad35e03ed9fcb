"""Placement of a tensor over the ranks of a job: the box of it that each rank holds; no torch
needed.

The text form of a placement, as written in headers:

- ``whole``: the job has one such tensor, and this rank holds all of it.
- ``sliced``: the job has one such tensor; files of its ranks hold slices of it, in any layout.
- ``whole@0-3``: ranks 0 to 3 hold replicas; other ranks may have another tensor of that name.
- ``whole@2``: the tensor belongs to rank 2 alone.
- ``replicate,shard(0)@2x4:0-7``: distributed over a mesh of 2 x 4 ranks, listed in row-major order,
  with one placement for each dimension of the mesh, as in ``torch.distributed.tensor``.

Ranks are written as runs with a step: ``0-6/2,9`` stands for 0, 2, 4, 6 and 9.

Compare the ranks' views of the tensors that they replicate.

A rank writes only its share of replicated tensors, and relies on other ranks to write the rest.
Each rank computes this division by itself (:mod:`everstep.state.ranks.writers`), so ranks that were
given different states would write files that do not form one base. Each rank therefore stores a
digest of its view in its marker, and a base whose markers disagree is not committed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import xxhash

WHOLE = "whole"
"""Text of a placement that is not sharded."""
SLICED = "sliced"
"""Text of a placement of which only the offsets of the slices are known."""
_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?", re.ASCII)
_KIND = re.compile(r"replicate|shard\(\d{1,2}\)|strided\(\d{1,2},\d{1,9}\)", re.ASCII)
# A few bytes of an untrusted header must not expand to gigabytes of ranks.
_RANKS_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Box:
    """Box of a tensor: ``shape`` elements from ``offset`` on, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """Return the intersection with another box; None if it is empty."""
        offset = []
        shape = []
        sides = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        for mine, extent, theirs, their_extent in sides:
            begin = max(mine, theirs)
            end = min(mine + extent, theirs + their_extent)
            if begin >= end:
                return None
            offset.append(begin)
            shape.append(end - begin)
        return Box(tuple(offset), tuple(shape))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that select this box in ``outer``, which contains it."""
        return tuple(
            slice(at - base, at - base + extent)
            for at, extent, base in zip(self.offset, self.shape, outer.offset, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Effect of one mesh dimension on a tensor.

    Attributes:
        dim: dimension of the tensor that is sharded; None: replicated.
        factor: number of shards into which later mesh dimensions split ``dim`` first (FSDP over
            tensor parallelism); 1: none.
    """

    dim: int | None
    factor: int = 1

    @property
    def text(self) -> str:
        """Text form, as in a header."""
        if self.dim is None:
            return "replicate"
        return f"shard({self.dim})" if self.factor == 1 else f"strided({self.dim},{self.factor})"


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a tensor over ranks, parsed.

    Attributes:
        ranks: ranks that hold the tensor, in the mesh's row-major order; None: all ranks.
        cuts: one per dimension of the mesh; empty if the tensor is not sharded.
        mesh: shape of the mesh; empty if the tensor is not sharded.
        is_sliced: files hold slices of a tensor that all ranks have in common.
    """

    ranks: tuple[int, ...] | None = None
    cuts: tuple[Cut, ...] = ()
    mesh: tuple[int, ...] = ()
    is_sliced: bool = False

    @property
    def text(self) -> str:
        """Text form, as in a header."""
        if self.ranks is None:
            return SLICED if self.is_sliced else WHOLE
        if not self.cuts:
            return f"{WHOLE}@{_in_runs(self.ranks)}"
        sides = "x".join(map(str, self.mesh))
        return f"{','.join(cut.text for cut in self.cuts)}@{sides}:{_in_runs(self.ranks)}"

    @property
    def is_cut(self) -> bool:
        """Return True if a rank holds only a shard."""
        return any(cut.dim is not None for cut in self.cuts)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinate of a rank in the mesh.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        assert self.ranks is not None
        at = self.ranks.index(rank)
        found = []
        for side in reversed(self.mesh):
            found.append(at % side)
            at //= side
        return tuple(reversed(found))

    def holds(self, rank: int) -> bool:
        """Return True if ``rank`` holds the tensor or a shard of it."""
        return self.ranks is None or rank in self.ranks

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Placement:
        """Parse the text form; the inverse of :attr:`text`.

        Raises:
            ValueError: the text is not a placement.
        """
        if text in (WHOLE, SLICED):
            return cls(is_sliced=text == SLICED)
        kinds, at, rest = text.partition("@")
        if not at:
            raise ValueError(f"{text!r:.80} is not a placement")
        if kinds == WHOLE:
            return cls(_from_runs(rest))
        sides, _, runs = rest.partition(":")
        mesh = tuple(int(side) for side in sides.split("x"))
        cuts = tuple(map(_cut, re.split(r",(?=[rs])", kinds)))
        ranks = _from_runs(runs)
        if len(cuts) != len(mesh) or math.prod(mesh) != len(ranks):
            raise ValueError(f"{text!r:.80}: the mesh does not fit its ranks")
        return cls(ranks, cuts, mesh)


@lru_cache(maxsize=65536)
def box_on_mesh(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], cuts: tuple[Cut, ...]
) -> Box:
    """Return the box of a tensor of ``shape`` that the rank at coordinate ``at`` of a mesh holds.

    Shards have the sizes that ``torch.chunk`` gives: all equal but the last ones, which may be
    smaller or empty.

    Raises:
        ValueError: the order of the splits cannot be derived from their factors.
    """
    offset = [0] * len(shape)
    extent = list(shape)
    for index in _order(mesh, cuts):
        dim = cuts[index].dim
        assert dim is not None
        if dim >= len(shape):
            raise ValueError(
                f"dimension {dim} of a tensor of {len(shape)} dimensions cannot be sharded"
            )
        part = -(-extent[dim] // mesh[index])
        begin = min(at[index] * part, extent[dim])
        extent[dim] = min(part, extent[dim] - begin)
        offset[dim] += begin
    return Box(tuple(offset), tuple(extent))


def _order(mesh: tuple[int, ...], cuts: tuple[Cut, ...]) -> list[int]:
    """Return the sharding mesh dimensions in the order in which they split the tensor.

    They split from left to right, but a strided dimension comes after the dimensions to its right
    that its factor accounts for.
    """
    order: list[int] = []
    for index in reversed(range(len(cuts))):
        cut = cuts[index]
        if cut.dim is None:
            continue
        place = 0
        factor = cut.factor
        while factor > 1:
            if place == len(order):
                raise ValueError(
                    f"{cut.text}: no mesh dimensions to its right split into that many shards"
                )
            before = order[place]
            place += 1
            if cuts[before].dim != cut.dim:
                continue
            if factor % mesh[before]:
                raise ValueError(
                    f"{cut.text}: no mesh dimensions to its right split into that many shards"
                )
            factor //= mesh[before]
        order.insert(place, index)
    return order


@lru_cache(maxsize=4096)
def replicas_on_mesh(placement: Placement, rank: int) -> tuple[int, ...]:
    """Return all ranks that hold the same box of the tensor as ``rank``, in ascending order.

    Raises:
        ValueError: ``rank`` is not in the mesh.
    """
    assert placement.ranks is not None
    here = placement.coordinate(rank)
    sides = [
        range(side) if cut.dim is None else (at,)
        for side, cut, at in zip(placement.mesh, placement.cuts, here, strict=True)
    ]
    found = []
    for place in product(*sides):
        index = 0
        for side, at in zip(placement.mesh, place, strict=True):
            index = index * side + at
        found.append(placement.ranks[index])
    return tuple(sorted(found))


def _cut(text: str) -> Cut:
    if not _KIND.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not a placement")
    return Cut(None) if text == "replicate" else Cut(*map(int, re.findall(r"\d+", text)))


def _in_runs(ranks: Sequence[int]) -> str:
    runs = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        end = at + 1
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        # Two ranks are shorter as a list than as a run with a step.
        if end - at < 3 and step != 1:
            end = at + 1
        last = ranks[end - 1]
        by = "" if step == 1 else f"/{step}"
        runs.append(f"{ranks[at]}" if end == at + 1 else f"{ranks[at]}-{last}{by}")
        at = end
    return ",".join(runs)


def _from_runs(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            raise ValueError(f"{text!r:.80} is not a list of ranks")
        first = int(match[1])
        step = int(match[3] or 1)
        last = int(match[2]) if match[2] else first
        if last < first or not step or (last - first) // step + len(ranks) >= _RANKS_MAX:
            raise ValueError(f"{text!r:.80} is not a list of ranks")
        ranks += range(first, last + 1, step)
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{text!r:.80} names a rank twice")
    return tuple(ranks)


_LISTED = 4  # ranks, and sections, in an error


@dataclass(frozen=True, slots=True)
class ReplicaDigest:
    """Digest of the tensors of one section that a rank shares with other ranks.

    Attributes:
        ranks: ranks that hold these tensors, this rank included, as in a placement: ``0-3``.
        section: section of the state.
        count: number of tensor names.
        digest: digest of the tensors' descriptions; equal on all of these ranks.
    """

    ranks: str
    section: str
    count: int
    digest: str


def replica_digests(
    lines: Mapping[tuple[tuple[int, ...], str], Iterable[str]],
) -> tuple[ReplicaDigest, ...]:
    """Compute the digests of a rank's replicated tensors.

    Args:
        lines: by ranks and section: a description of each tensor.
    """
    found = []
    for (ranks, section), of_section in lines.items():
        text = "\n".join(known := sorted(of_section))
        runs = Placement(tuple(sorted(ranks))).text.partition("@")[2]
        found.append(
            ReplicaDigest(runs, section, len(known), xxhash.xxh3_128_hexdigest(text.encode()))
        )
    return tuple(sorted(found, key=lambda one: (one.section, one.ranks)))


def ranks_of_digest(one: ReplicaDigest) -> tuple[int, ...]:
    """Parse the ranks of a digest.

    Raises:
        ValueError: the text is not a list of ranks.
    """
    return Placement.parse(f"whole@{one.ranks}").ranks or ()


def describe_mismatch(said: Mapping[int, Sequence[ReplicaDigest]]) -> str:
    """Describe the sections in which ranks disagree about replicated tensors; "" if they agree.

    Args:
        said: digests of all ranks, by rank.
    """
    if not any(said.values()):
        return ""
    by_rank = {rank: {(o.section, o.ranks): o for o in each} for rank, each in said.items()}
    groups = {key: one for each in by_rank.values() for key, one in each.items()}
    wrong: list[str] = []
    for key, group in sorted(groups.items()):
        versions: dict[tuple[int, str], list[int]] = {}
        for rank in ranks_of_digest(group):
            mine = by_rank.get(rank, {}).get(key)
            version = (0, "") if mine is None else (mine.count, mine.digest)
            versions.setdefault(version, []).append(rank)
        if len(versions) > 1:
            counts = ", ".join(
                f"rank(s) {_listed(ranks)}: {count or 'none'}"
                for (count, _), ranks in sorted(versions.items(), key=lambda item: item[1])
            )
            wrong.append(f"{key[0]!r}, tensors replicated on ranks {key[1]}: {counts}")
    more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
    return "; ".join(wrong[:_LISTED]) + more


def _listed(ranks: Sequence[int]) -> str:
    text = " ".join(map(str, ranks[:_LISTED]))
    return text + (" ..." if len(ranks) > _LISTED else "")
