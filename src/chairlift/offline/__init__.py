"""The model in your own process: `LLM`, batch files, and reading a checkpoint's tokenizer and sampling defaults.

Nothing here knows of HTTP. The server imports `vocabulary` and `defaults` from here and nothing else.
"""
