"""OpenAI's request and response shapes: reading a request's body, and writing a reply.

Batch files and the HTTP server share them. Nothing here reads a socket or imports the engine or torch.
"""
