"""Fast path on the CPU: apply several updates in one pass over the state.

``blocked``   SGD, Adam and AdamW, block by block
``cuts``      cuts tensors into blocks
``programs``  TorchScript programs that replace torch's functions on blocks
"""
