"""Device to host: lanes carry bytes off the device, base captures say when.

``lane``  the contract of a copy engine, and the one for tensors in host memory
``base``  a base's bytes: taken straight from live tensors, or from a copy of them
"""
