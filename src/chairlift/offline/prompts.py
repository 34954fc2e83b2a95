"""Prompts of LLM and AsyncEngine: text, token ids or a conversation, as the token ids of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from chairlift.core.constraint import Thinking
from chairlift.core.errors import RequestError
from chairlift.offline.keywords import refuse_unknown
from chairlift.openai.conversation import read_messages
from chairlift.openai.params import read_thinking
from chairlift.openai.tools import ToolUse, read_tools
from chairlift.text.message import PLAIN, Family, MessageFormat, is_closed
from chairlift.text.parsers.reasoning import opens_reasoning
from chairlift.text.template_process import render_confined
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_prompt import show_calls, show_tools

Prompt = Union[str, Sequence[int], Mapping[str, Any], "Read"]
Message = Mapping[str, Any]
# Arguments of render_confined() that a caller may not set as variables.
_OURS = frozenset({"template", "messages", "bos_token", "eos_token", "tools"})


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt in token ids, and what is known of its answers' format."""

    text: str | None
    ids: list[int]
    form: MessageFormat = PLAIN
    use: ToolUse | None = None
    dialect: str = ""
    thinking: Thinking | None = None


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, no_tokenizer: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.no_tokenizer = no_tokenizer  # the reason, if there is none

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; RequestError, with the reason, if there is none."""
        if self.tokenizer is None:
            raise RequestError(f"text cannot be read: {self.no_tokenizer}; give prompts as token ids")
        return self.tokenizer

    def encode(self, prompt: Prompt) -> Read:
        """Return a prompt's text, if known, and its token ids."""
        if isinstance(prompt, Read):
            return prompt
        text: str | None = None
        if isinstance(prompt, Mapping):
            if not prompt.keys() & {"prompt", "prompt_token_ids"}:
                raise RequestError('a prompt given as a mapping needs "prompt" or "prompt_token_ids"')
            text, prompt = prompt.get("prompt"), prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty: give at least one character")
            return Read(prompt, self.require_tokenizer().encode(prompt))
        try:
            ids: list[Any] = list(prompt or ())  # type: ignore[arg-type]  # which the next line is for
        except TypeError:
            raise RequestError(f"the prompt is {prompt!r}: give text or a list of token ids") from None
        if set(map(type, ids)) - {int}:  # checking each in Python would delay a GPU
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise RequestError(
                        f"the prompt holds {token!r}, not a token id: give text or a list of whole numbers"
                    )
        return Read(text, ids)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        max_thinking_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Read:
        """Return a conversation as text, rendered by the chat template, and as token ids."""
        refuse_unknown(unknown, is_chat=True)
        tokenizer = self.require_tokenizer()
        template = tokenizer.chat_template if chat_template is None else chat_template
        if template is None:
            raise RequestError(
                f"{self.model} has no chat template: give one as chat_template, or use generate() with a plain prompt"
            )
        if not isinstance(template, str):
            raise RequestError(f"chat_template is {template!r}: give the template itself, a string")
        use = read_tools(
            {
                "tools": None if tools is None else list(tools),
                "tool_choice": tool_choice,
                "parallel_tool_calls": parallel_tool_calls,
            }
        )
        variables = dict(chat_template_kwargs or {})
        if taken := sorted(variables.keys() & _OURS):
            raise RequestError(f"chat_template_kwargs has {', '.join(taken)}, which the model or the call determines")
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **variables,  # as in vLLM, they may set these two as well
        }
        special = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        family = Family.of(template)
        if any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages):
            messages = read_messages({"messages": list(messages)})
        if use is not None and not family.shows_tools:
            messages = show_tools(messages, use.shown)
        else:
            messages = show_calls(messages, template)
            if use is not None:
                options["tools"] = use.shown
        text = render_confined(template, messages, **special, **options)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template writes them
        markers = family.reasoning
        is_open = markers is not None and opens_reasoning(text, markers)
        has_ended = markers is not None and is_closed(text, markers)
        budget = read_thinking({"max_thinking_tokens": max_thinking_tokens})
        thinking = family.thinking(tokenizer, is_open, has_ended, budget)
        form = family.form([] if use is None else use.tools).opened(is_open)
        return Read(text, ids, form, use, family.dialect, thinking)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, (str, Mapping, Read)):
        return [prompts]
    try:
        listed = list(prompts)
    except TypeError:
        raise RequestError(
            f"prompts is {prompts!r}: give text, a list of token ids, or a list of such prompts"
        ) from None
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]  # the ids of one prompt
    return listed  # type: ignore[return-value]
