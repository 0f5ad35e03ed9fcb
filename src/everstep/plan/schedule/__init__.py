"""Capture plans: when each tensor leaves the device during a step (Checkflow, section III).

``trace``     operators of a step and the lifetimes of tensors: ``steps`` (data types),
``recorder``,
              ``tracing``, ``parallel``, ``groundtruth``
``problem``   the plan as an optimization problem; ``exact`` and ``literal`` solve it
``schedule``  plans found by a heuristic; ``timeline``: plans from the events of a real step
``devices``   how long operators take
"""
