"""WHAT is saved: providers, entries, objects, layout.

``providers``, ``optimizers``, ``rng``  one provider per value of the state dict
``restoring``                           what is restored of each
``tree``, ``objects``                   nested state taken apart; plain objects as bytes
``entries``, ``layout``                 named typed byte ranges and where they lie in a file
``survey``, ``proofs``, ``owners``        all of it at one moment, found without walking through
                                        what has not changed; who answers for each entry
``left_out``, ``apart``, ``in_common``    what ranks have in common, and what each has of its own
``positions``, ``loader_provider``        loaders that save their position, and what that lacks
``worker_draws``                        generators of their workers
``fsdp``, ``within``                      gradients that no parameter of the state has
``tags``                                whether dicts can have changed, at a glance
``image``                               the user's state dict as a whole
"""
