"""Failure drills: hosts that train together are killed, replaced, and compared bit by bit.

A job of real ``torchrun`` agents and real gloo trains a small GPT on several hosts of this machine,
each with a disk folder, a runtime folder for its keeper and, where the machine allows it, a network
namespace behind a rate-limited link of its own. A process, a node or a rack is killed with SIGKILL;
the job is started again with empty hosts in place of the dead ones, calls ``resume()`` and trains
to the end. What every rank ends with must be, bit for bit, what it ends with in a run that nobody
disturbed. What it cost is printed as TierCheck's Table 3 has it (section 5.2, Exp. 4).

What each arm has to come back from is in :mod:`everstep_bench.drill.plan`.

``plan``       ways to be recoverable, a line each; what is trained and killed: validated once
``network``    network namespaces with links of a stated rate, or process groups on loopback; a
               real object store behind links, as the durable tier
``processes``  processes that belong to a host: found by a mark, ended by their ids
``hosts``      a host: disk, memory of its keeper, and its death
``child``      the training process (``python -m everstep_bench.drill.child``, under torchrun)
``job``        one start of the job: an agent on every host, followed through journals
``report``     the outcome as plain data, and TierCheck's figures; progress
``run``        one arm and one kill: train, kill, replace, resume, compare; all of them, and the
               clean-up
"""
