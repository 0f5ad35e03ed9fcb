"""Harness of all benches: a bench is its options, its arms, its figures and its tables.

``everstep bench`` runs in one process (the trainer of most arms); arms, kills and controls start
others. Read in this order:

``options``    declare options once: command line, defaults and checks
``session``    signals, scratch folder, machine, cores: from the start of a bench to its facts;
               rounds in which all arms take turns
``figures``    spreads over rounds, rows of arms, verdicts, plain data
``report``     the outcome: facts, tables, notes, targets; for people and as JSON; pictures
``children``   child processes that work on orders and answer with lines
``loop``       training as a loop of timed steps, also on a GPU
``running``    Checkpointers inside a bench
``machine``    facts about machine and file system; processor time and bytes of processes
``placement``  training on one core, everything else on the others
``display``    progress between timed runs
"""
