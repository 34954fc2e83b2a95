"""Chat templates: a conversation as the prompt that the model was trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from chairlift.core.errors import RequestError
from chairlift.text.sandbox import Sandbox

Message = Mapping[str, Any]

_sandbox = Sandbox()
# Marks the end of a message to continue. Its last space shows whether the template trims messages.
_BREAK = "\ue000break\ue001 "
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: jinja2.Template
    reads_parts: bool  # it loops over the parts of a message's content
    reads_strings: bool  # it tests whether the content is a string, or never loops over it


def render(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """Return a conversation as a prompt, equal to that of transformers' apply_chat_template.

    With `continue_final_message` the prompt ends inside the last message, so that the model continues it; no generation
    prompt is added then. Further keywords are variables for the template (`enable_thinking=False`). An untrusted
    template can take all memory: `template_process.py` renders with limits.

    >>> template = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    >>> render(template, [{"role": "user", "content": "Hi"}], bos_token=None, eos_token="</s>")
    'user: Hi</s>'
    """
    if not messages:
        raise RequestError("the conversation is empty: send at least one message")
    compiled = _compile(template)
    conversation = [_plain(message, index, compiled) for index, message in enumerate(messages)]
    open_text = _break_off(conversation[-1]) if continue_final_message else None
    special = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {
        # As in transformers: a token the model does not have is undefined, not None.
        **{name: token for name, token in special.items() if token is not None},
        "messages": conversation,
        "tools": list(tools) if tools is not None else None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        **kwargs,
    }
    try:
        prompt = _sandbox.render(compiled.template, variables)
    except MemoryError:  # reported by the process that set the limit
        raise
    except RecursionError:
        raise RequestError("the chat template cannot write this conversation: it is nested too deep") from None
    except Exception as error:  # a template is a program and may raise anything
        raise RequestError(f"the chat template refuses this conversation: {_line(error)}") from error
    return prompt if open_text is None else _until_break(prompt, open_text)


@lru_cache(maxsize=64)
def _compile(template: str) -> _Compiled:
    try:
        tree = _sandbox.parse(template)
        reads_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
        return _Compiled(_sandbox.from_string(_sandbox.bind(tree)), reads_parts, asks or not reads_parts)
    except MemoryError:
        raise
    except RecursionError:
        raise RequestError("the chat template cannot be read: it is nested too deep") from None
    except Exception as error:  # Python's compiler has limits, too
        raise RequestError(f"the chat template cannot be read: {_line(error)}") from error


def _is_content(node: nodes.Node | None) -> bool:
    match node:
        case nodes.Filter():
            return _is_content(node.node)
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name():
            return node.name == "content"
    return False


def _plain(message: Message, index: int, compiled: _Compiled) -> dict[str, Any]:
    """Return the message with its content as the template reads it: one string, or a list of parts."""
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is a {type(message).__name__}; send an object with a role and a content")
    plain = dict(message)
    # Servers name a model's reasoning differently; templates read these two.
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    content = plain.get("content")
    if isinstance(content, list | tuple):
        texts = [_text(part, index) for part in content]
        plain["content"] = [_part(text) for text in texts] if compiled.reads_parts else "\n".join(texts)
    elif isinstance(content, str) and not compiled.reads_strings:
        plain["content"] = [_part(content)]
    return plain


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text(part: Any, index: int) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise RequestError(f"message {index} has a part of type {kind!r}; this model reads text parts only")
    return str(part["text"])


def _break_off(message: dict[str, Any]) -> str:
    """Mark the end of a message's text, and return the text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _BREAK
        return content
    if isinstance(content, list) and content:
        last = content[-1]
        content[-1] = _part(last["text"] + _BREAK)
        return str(last["text"])
    raise RequestError("continue_final_message needs a last message with text in it: send one, or leave it out")


def _until_break(prompt: str, open_text: str) -> str:
    before, mark, after = prompt.rpartition(_BREAK.rstrip())
    if not mark or open_text.strip() not in before:
        raise RequestError(
            "continue_final_message does not work here: the chat template rewrites the last message; leave it out"
        )
    return before if after.startswith(" ") else before.rstrip()


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
