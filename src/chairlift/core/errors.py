"""What can go wrong, in words a user can act on: each error says what happened, with which value, and what to do."""


class ChairliftError(Exception):
    """Any failure that is not a bug of ours; its message is one line for the user."""


class RequestError(ChairliftError):
    """A request that cannot be served as asked; the engine goes on."""


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
