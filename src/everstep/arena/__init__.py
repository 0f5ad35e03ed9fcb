"""Host memory for captured state: page-aligned, touched beforehand, reused, within a budget."""

from everstep.arena.buffers import Block, BlockPool

__all__ = ["Block", "BlockPool"]
