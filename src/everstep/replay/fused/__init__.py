"""Several updates in one pass over the state: on the CPU by blocks, on CUDA by slices.

``blocked``  SGD, Adam and AdamW on the CPU; ``cuts`` and ``passes`` are its parts
``slices``   the same on a CUDA device; ``alike``, ``uploads`` and ``kernels`` are its parts
"""
