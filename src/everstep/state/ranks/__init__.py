"""State that is spread over ranks: DTensor, FSDP, DDP and ZeRO, and which rank writes what.

Read ``sharing`` first, then ``placing`` (where a tensor lies over the ranks).
"""
