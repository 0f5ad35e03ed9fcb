"""Simulators of crashes: a file system in memory, and a cluster of ranks on top of it.

The file system, for one process:

``filesystem``     a :class:`FileSystem` in memory with crashes, errors and lies
``faults``         operations, moments and faults; the journal of a run
``disk``, ``tree`` its contents: durable state, pending effects, names
``crashes``        a scenario, repeated with a crash or an error at every operation
``training``       scenarios of small trainings, of which every bit is known in advance
``invariants``     conditions that hold on every disk that a crash may leave

The cluster, chosen by a seed:

``cluster``        the schedule: which event comes next
``job``, ``rank``  a job and one of its ranks, with the real state machines of ``everstep.commit``
``host``           disks of nodes, and the processes that write to them
``network``        messages that are lost, late or doubled
``cluster_faults`` faults that the schedule may choose
``truth``          invariants, checked after every event
"""
