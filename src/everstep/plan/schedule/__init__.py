"""Capture plans: when each tensor leaves the device during a step (Checkflow, section III).

Read in this order:

``steps``        data types of a traced step: operators, lifetimes of tensors
``recorder``     record the operators of a step
``trace``        trace one training step
``tracing``      devices for tracing: meta, fake tensors, small batches, real ones
``parallel``     operators that DistributedDataParallel adds
``scaling``      a gradient scaler for tracing
``groundtruth``  verify a trace
``devices``      durations of operators
``problem``      the plan as an optimization problem; violations of a plan
``schedule``     plans found by a heuristic, and a lower bound
``exact``        optimal plans by integer programming
``planned``      a plan for a traced step, with its figures
``timeline``     plans from the events of a real step
"""
