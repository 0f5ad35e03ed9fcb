"""``everstep bench scale``: saves of models of several sizes by several data-parallel ranks.

``run`` starts the ranks of each size and number, and reports; ``child`` is one rank.
"""
