"""States of a run in the formats of other programs.

Runs in commands, and ``initial`` in the training process. Read in this order:

``export``         write the state of a step as safetensors, a Hugging Face folder, a file of
                   ``torch.save``, or a folder of ``torch.distributed.checkpoint``
``selection``      choose what is written, and read its tensors a group ahead
``tensor_files``   formats that hold tensors by name
``nested_files``   formats that hold nested state
``sources``        read states that other programs have written
``initial``        begin a run with one of them
``importing``      make a run of one of them
``run_folder``     write a run of one base, which is there completely or not at all
"""

from everstep.convert.export import FORMATS, Exported, ExportOptions, export_state

__all__ = ["FORMATS", "ExportOptions", "Exported", "export_state"]
