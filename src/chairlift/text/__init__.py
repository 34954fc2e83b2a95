"""Between text and tokens: tokenizers, chat templates and the incremental detokenizer.

Everything here is plain CPU work on strings and ids, and imports without torch or a web framework. Nothing here may
know of requests, batches or the model that runs: only of its vocabulary and the way it was taught to chat.
"""
