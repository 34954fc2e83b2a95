"""The server: OpenAI's routes over HTTP in one process, the engine in another, numbers between them.

The HTTP side validates, tokenizes, streams and refuses; the engine's side is `engine_process.py` and never sees a byte
that a client wrote. Nothing below this folder imports it.
"""
