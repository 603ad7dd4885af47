"""The one exception type that a user's input can raise."""

from __future__ import annotations


class ReanchorError(ValueError):
    """Bad input: a checkpoint, config, prompt or option that cannot be used.

    The message is one line: what is wrong, what was found, what was expected, what to do.
    Command-line programs print it behind `error: ` and exit with code 2.
    """

    def __init__(self, message: str):
        # Names out of a checkpoint or a file system may hold line breaks.
        super().__init__(" ".join(message.split()))
