"""Text to tokens and back: tokenizers, chat templates, the incremental detokenizer, and answers.

Modules here process strings and ids on the CPU and import neither torch nor a web framework. They may use a model's
vocabulary and chat template and a request's updates, but not the engine, batches or the model itself.
"""
