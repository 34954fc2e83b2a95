"""The engine in the caller's process: `LLM`, `AsyncEngine`, batch files, and a model's tokenizer and sampling defaults.

No module here uses HTTP. The server imports only `vocabulary` and `defaults` from here.
"""
