"""Everstep in the Trainers and checkpoints of other libraries: one module for each of them.

``accelerate``      loops over objects that an Accelerator has prepared
``dcp``             state dicts that torch.distributed.checkpoint saves
``lightning``       Lightning's Trainer
``transformers``    Hugging Face's Trainer

Each module imports the library that it is named after, so it is imported by its own name only.
"""
