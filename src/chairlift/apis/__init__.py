"""The HTTP APIs that generate: OpenAI's Responses and Anthropic's Messages, each a translation of chat completions.

A Front reads a body as that of a chat completion, and writes the chat's reply, chunks and errors in its own shapes. It
knows no engine and no socket: serving/ runs every front on one path.
"""
