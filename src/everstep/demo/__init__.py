"""``everstep demo``: train on real text, get killed, resume, and compare every bit.

Two processes train the same model from the same seed, side by side. One is undisturbed. The other
is killed with SIGKILL four times, twice together with its keeper and twice without it. It is
started again each time and has nothing but its checkpoints. Both must end in the same bits.

All of it runs in the process of the command, except ``child``. Read in this order:

``plan``        the training, and the kills: a function of the seed
``child``       the training process (``python -m everstep.demo.child``)
``report``      the result as plain data; files on disk and bases in memory right after a kill;
                comparison of both runs
``supervisor``  runs the plan; one child: start it, follow it, kill it
``show``        progress lines and the final table
"""
