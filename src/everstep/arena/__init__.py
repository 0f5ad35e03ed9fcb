"""Host memory for captured state: page-aligned, pre-faulted, reused, within a budget.

Used in both processes:

``memory``     the arena: memory that trainer and keeper share
``allocator``  allocation of ranges within an arena; private blocks of one process, for chunks in
               flight to and from the disk; a pool of private blocks, reused after the last view is
               released
"""

from everstep.arena.allocator import PAGE_BYTES, Allocator, Block, ReusedMemory
from everstep.arena.memory import CONTROL_BYTES, PROGRESS_WORDS, Arena

__all__ = [
    "CONTROL_BYTES",
    "PAGE_BYTES",
    "PROGRESS_WORDS",
    "Allocator",
    "Arena",
    "Block",
    "ReusedMemory",
]
