"""Host memory for captured state: page-aligned, touched beforehand, reused, within a budget.

``buffers``    private blocks, for chunks on their way to and from the disk
``reused``     private memory that is lent again once nobody looks at it any more
``allocator``  which part of an arena is whose
``memory``     the arena: memory that trainer and keeper share
"""

from everstep.arena.buffers import PAGE_BYTES, Block

__all__ = ["PAGE_BYTES", "Block"]
