"""Messages between ranks and between processes.

``mailbox``  small messages between ranks: the contract and its implementation over TCP
``group``    the ranks of a job as ``torch.distributed`` knows them
``sockets``  Unix sockets that pass file descriptors
"""
