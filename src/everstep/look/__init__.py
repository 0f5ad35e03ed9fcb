"""Read a run without taking it over: :func:`everstep.load` and :func:`everstep.peek`.

Runs in any process beside a running trainer, and writes nothing into the run. Read in this
order:

``load``           the two public functions
``open_state``     a state whose tensors are read when they are needed
``differences``    compare two of them
``run_view``       the states that exist now, in order of preference
``copy_run``       copy a run while it may be training
``keeper_memory``  bases and logs in the memory of keepers on this machine
"""
