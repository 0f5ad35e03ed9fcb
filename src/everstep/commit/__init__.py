"""Commit, history and retention: decisions without I/O.

``lineage``      which bases are in the history of a timeline
``machine``      the life of one base on one rank, from first byte to commit record
``deletion``     how one base is deleted from one disk
``retention``    which bases may go; ``reclaim``: what each tier may forget
``watermark``    the newest base that is durable on all ranks

Several ranks (``adr/020``):

``cluster``      which ranks there are, and which of them see the same disk
``member``       one rank's part in a timeline; ``coordinator``: rank 0's
                 ``steps``: what these ask for and report
``messages``     what they tell each other
``offers``       what each rank can read at a start, and what all should restore;
                 ``offers_wire``: that as bytes
``agreement``    how the ranks come to restore the same
"""
