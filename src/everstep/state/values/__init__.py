"""Leaf values of a state: tensors, plain objects and random generators, as entries and as bytes.

Runs in both processes, mostly in the trainer; it does no I/O. Read in this order:

``tensors``     tensors and DTensors as entries; their memory as bytes
``tree``        split nested state into tensors and plain objects, and join them again; find
                objects that refer to given objects
``objects``     encode plain objects as bytes: tagged msgpack, never pickle; advice for objects that
                cannot be stored
``registered``  values of types that the user has registered
``generators``  states of random generators: the process's own, and those in plain data
"""
