"""The server: OpenAI's routes in HTTP processes, the engine in another, with messages of token ids between them.

An HTTP process validates, tokenizes, rejects and streams. The engine process (`engine_process.py`) never reads a byte
that a client sent. Only the command line and the gateway import this folder.
"""
