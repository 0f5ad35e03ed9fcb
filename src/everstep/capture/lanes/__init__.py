"""Lanes: ordered copies from a device into host memory.

They run in the training process, with a thread of their own. Read in this order:

``lane``     contract of a lane, and the lane for tensors in host memory
``batches``  grouping of tensors into copies
``cuda``     lane for CUDA devices: side streams, and a thread that enqueues the copies
``pinned``   pinned host memory that CUDA devices copy into
``devices``  choice of the lane by the tensors' devices
"""
