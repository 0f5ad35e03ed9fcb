"""Cost models and plans: decisions without clocks and without I/O.

``costs``      what a choice of intervals wastes: the model
``interval``   how often to take a base and to write the log, so that the least is wasted
``estimator``  the same while training runs, from what is measured
"""
