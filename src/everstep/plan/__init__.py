"""Cost models and plans: decisions without clocks and without I/O.

Used in the training process and by ``everstep plan``. Read in this order:

``interval``   the intervals of bases and log segments that waste the least; wasted time as a
               function of the intervals: the model
``estimator``  the interval of bases during training, from measured costs; steps per log segment,
               from the speed of the disk
``multistep``  cost of a base that is captured in several parts; number and sizes of these parts
``schedule``   capture plans: when each tensor leaves the device during a step
"""
