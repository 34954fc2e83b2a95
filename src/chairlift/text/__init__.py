"""Between text and tokens: tokenizers, chat templates, the incremental detokenizer, and answers.

Everything here is plain CPU work on strings and ids, and imports without torch or a web framework. Nothing here may
know of the engine, batches or the model that runs: only of its vocabulary, its chat template and a request's updates.
"""
