"""Cost models and plans: decisions without clocks and without I/O.

``costs``      what a choice of intervals wastes: the model
``interval``   how often to take a base and to write the log, so that the least is wasted
``estimator``  the first of these while training runs, from what is measured (``median``)
``batch``      the second, by what the disk takes
``multistep``  in how many parts a base is copied
``trace``      what a step does: ``steps`` (the words), ``recorder`` (who sees it), ``parallel``
               (what ranks add), ``tracing`` (where it is traced), ``groundtruth`` (is it true)
``devices``    how long operators take
``schedule``   when each tensor leaves: ``problem`` (and what a plan violates), ``exact`` and
               ``literal`` (integer programs), ``planned`` (a plan and what one chooses by)
``timeline``   the same from what hooks show of a real step
"""
