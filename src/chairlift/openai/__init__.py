"""The shapes of OpenAI's API: what a request's body asks of us, and how an answer is written.

Shared by batch files and the HTTP server. Nothing here reads a socket or knows the engine; no torch.
"""
