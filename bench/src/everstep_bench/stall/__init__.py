"""Benchmark: what a save costs a training loop, by cause, and how long until it is durable.

Blocks of steps on one training, each with one save, all arms in turns.

``arms``       what an arm is; a save that is under way; when a lane copied what
``ours``       everstep, by its public interface
``peers``      torch.save, torchsnapshot, torch_checkpointing; ``dcp``: torch.distributed.checkpoint
``neighbour``  a process that copies and digests as much, and saves nothing
``run``        warm-up, rounds, blocks
``figures``    blocks and the arithmetic on them
``report``     targets, tables
``timeline``   a picture of one save
"""
