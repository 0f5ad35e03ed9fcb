"""Reads a run without taking it over: :func:`everstep.load` and :func:`everstep.peek`.

Read ``load`` first; ``present`` lists the states that exist, ``memory`` asks keepers for theirs.
"""
