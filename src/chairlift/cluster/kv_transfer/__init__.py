"""KV blocks from one engine to another: a prefill engine sends the blocks of a prompt to the engine that decodes it.

A connection goes from a sender (outgoing.py) to a receiver (incoming.py) over a Unix or TCP socket (wire.py). Blocks
are in slots of the receiver's memory (region.py): shared memory or CUDA IPC on one host, RDMA (nixl.py) or sent bytes
between hosts. They are a cache: a block that is lost is computed again, so no failure here makes an answer wrong.
"""
