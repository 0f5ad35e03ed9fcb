"""WHAT is saved: providers, entries, objects, layout.

``providers``, ``optimizers``, ``rng``  one provider per value of the state dict
``tree``, ``objects``                   nested state taken apart; plain objects as bytes
``entries``, ``layout``                 named typed byte ranges and where they lie in a file
``image``                               all of it at one moment
"""
