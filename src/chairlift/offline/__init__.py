"""The model in your own process: `LLM`, `AsyncEngine`, batch files, and a checkpoint's tokenizer and sampling defaults.

Nothing here knows of HTTP. The server imports `vocabulary` and `defaults` from here and nothing else.
"""
