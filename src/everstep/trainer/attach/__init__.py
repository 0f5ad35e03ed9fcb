"""Finds or starts the keeper, communicates with it, and replaces it when it is lost.

Runs in the training process. Read in this order:

- ``keeper``: interface of a keeper, which is a process or a thread.
- ``terms``: the settings that each keeper of a rank gets; ``mailbox``: where other ranks reach it.
- ``keepers``: the keeper of one Checkpointer: attach, start a timeline, replace, close.
- ``attach``: finds the keeper process of a run, or starts one; reads those of earlier processes.
- ``remote``: a keeper process as seen from here: messages and pending bases.
- ``requests``: requests to it that wait for a reply.
"""
