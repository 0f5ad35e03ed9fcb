"""``everstep plan``: choose intervals, parts and schedules from models, before anything runs.

``interval``   steps between bases, and between writes of the log; the command group itself
``multistep``  number of parts of a multi-step base
``schedule``   copies of every step by a plan (Checkflow)
"""
