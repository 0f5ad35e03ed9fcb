"""The main job: train on real text, get killed, resume, and compare every bit.

Two processes train the same model from the same seed, side by side. One is left alone.
The other is killed with SIGKILL four times, twice together with its keeper and twice alone,
started again each time, and has only its checkpoints to go on. In the end nothing may tell
them apart.

``plan``         what is trained, and when and where the kills fall: a function of the seed
``child``        the training process (``python -m everstep.demo.child``)
``journal``      what a child tells the supervisor while it runs: JSON lines in a file
``fingerprint``  digests of the live state, taken without any of everstep's own code
``process``      one child: started, followed, killed by its id
``keepers``      the keeper of the run that is killed: what it has in memory, and its end
``evidence``     what a kill left on disk and in memory
``verdict``      the comparison
``report``       the outcome as plain data
``show``         bar, lines, table
``workspace``    the temporary folder, the keepers' meeting place, and signals
``supervisor``   runs the plan and collects the report
"""

from __future__ import annotations

__all__: list[str] = []
