"""What can go wrong, in words a user can act on: each message has what happened, the value, and what to do."""


class ChairliftError(Exception):
    """Any failure that is not a bug of ours; its message is one line for the user."""


class RequestError(ChairliftError):
    """A request that cannot be served as asked; the engine goes on.

    `setting_advice` ends the message for users of the engine's own process. A server's clients do not: they are shown
    `for_clients`, the message without it.
    """

    def __init__(self, message: str = "", *, setting_advice: str = "") -> None:
        super().__init__(f"{message} {setting_advice}".rstrip())
        self.for_clients = message


class ContextLengthError(RequestError):
    """A prompt that leaves no room for an answer in the model's context."""

    def __init__(
        self, prompt_tokens: int, max_tokens: int | None, max_length: int, *, is_estimate: bool = False
    ) -> None:
        count = f"at least {prompt_tokens}" if is_estimate else f"{prompt_tokens}"
        super().__init__(
            f"the prompt has {count} tokens and the context holds {max_length}, which leaves no room for an "
            "answer: shorten the prompt",
            setting_advice="or raise max_length",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_length = max_length
        self.is_estimate = is_estimate  # there are at least so many: the text was too large to be tokenized
        self.field = "prompt"  # of the request's body; a chat's is "messages"


class SettingsError(ChairliftError):
    """A setting with a value that cannot work."""


class ModelError(ChairliftError):
    """A model that cannot be found, read or run."""


class CapacityError(ChairliftError):
    """Not enough memory for what was asked."""


class DeviceError(ChairliftError):
    """The device is in a state in which no further step can run: the process that uses it must end."""


class EngineFault(ChairliftError):  # noqa: N818
    """The engine has stopped because its device fails; only a new engine can serve."""
