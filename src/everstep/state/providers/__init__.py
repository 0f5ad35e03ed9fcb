"""State providers: survey and restore each kind of value in the user's state dict.

The room runs in the training process; restores use it, too. Read in this order:

``provider``    the protocol, restore plans, comparison of saved entries with live tensors
``modules``     modules, and the names of their parameters
``optimizers``  optimizers: state by parameter name
``encodings``   optimizers whose ``state_dict()`` has another form than their state
``zero``        ZeroRedundancyOptimizer
``stateful``    objects with ``state_dict()`` and ``load_state_dict()``; loaders
``plain``       plain data; the random generators of the process
``gradients``   gradients, which are not part of a state
"""
