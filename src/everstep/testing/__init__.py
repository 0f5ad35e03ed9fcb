"""What our own tests use, shipped because users' tests need it too.

``simfs``     a file system in memory with crashes, errors and lies (:class:`SimFileSystem`);
              ``faults``, ``simdisk`` and ``simtree`` are its parts
"""

from everstep.testing.faults import Fault, Operation, SimulatedCrash
from everstep.testing.simfs import MappedFile, SimFileSystem

__all__ = ["Fault", "MappedFile", "Operation", "SimFileSystem", "SimulatedCrash"]
