"""llama-index, through its client for OpenAI-like servers."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from trying import MODEL, URL, attempt

model = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_tokens=8)
messages = [ChatMessage(role="user", content="Name a colour.")]
attempt("chat", lambda: model.chat(messages).message.content)
attempt("stream", lambda: [each.delta for each in model.stream_chat(messages)])
attempt("complete", lambda: model.complete("Name a colour.").text)
plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=False, max_tokens=8)
attempt("completion", lambda: plain.complete("Once upon a time").text)
