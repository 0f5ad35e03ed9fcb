"""Messages between ranks and processes: mailboxes over TCP, Unix sockets, ``torch.distributed``."""
