"""Everstep in the Trainers and checkpoints of other libraries: one module for each of them.

``accelerate``         loops over objects that an Accelerator has prepared
``deepspeed``          loops over a DeepSpeed engine, and its checkpoints
``dcp``                state dicts that torch.distributed.checkpoint saves
``lightning``          Lightning's Trainer, its checkpoints, and loops over objects of Fabric
``transformers``       Hugging Face's Trainer
``checkpoint_files``   checkpoints that frameworks save, in verified files
``loops``              training loops over loaders that a framework has set up
``parts``              parts of a state: those of a framework, and those that the user adds

Each of the first five imports the library that it is named after, so it is imported by its own
name only.
"""
