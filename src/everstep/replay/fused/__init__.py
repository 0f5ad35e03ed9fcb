"""Fast paths: apply several updates in one pass over the state.

``blocked``   SGD, Adam and AdamW on the CPU, block by block
``cuts``      cuts tensors into blocks
``programs``  TorchScript programs that replace torch's functions on blocks
``slices``    the same on a CUDA device: tensors end to end, cut into slices
``uploads``   copies gradients to the device, one slice ahead
``kernels``   Triton kernels that keep a slice in registers for all updates
"""
