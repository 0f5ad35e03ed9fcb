"""Benchmark: plans of captures for eight networks (Checkflow Table I and Fig. 2).

``tables``    the cells, and in which range of the time model each holds; how long planning takes;
              targets
``executed``  plans carried out on this machine, over an emulated link
"""
