"""States of a run in the formats of other programs.

Runs in commands. Read in this order:

``export``         write the state of a step as safetensors, a Hugging Face folder, a file of
                   ``torch.save``, or a folder of ``torch.distributed.checkpoint``
``selection``      choose what is written, and read its tensors a group ahead
``tensor_files``   formats that hold tensors by name
``nested_files``   formats that hold nested state
"""

from everstep.convert.export import FORMATS, Exported, ExportOptions, export_state

__all__ = ["FORMATS", "ExportOptions", "Exported", "export_state"]
