"""Exceptions whose messages are shown to the user without a traceback."""


class UserError(ValueError):
    """Invalid configuration or input; the message states the value, the rule and a fix."""


class NonFiniteError(RuntimeError):
    """Non-finite reward or loss; the message names the prompt and, if known, the seed.

    Args:
        row: index of the sample in its batch.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[str, int]]:
        return type(self), (str(self), self.row)  # Exception pickles the message only


class WriteError(RuntimeError):
    """Failed write; the message names the file, whose old content is intact."""

    @classmethod
    def of(cls, path: object, error: Exception) -> "WriteError":
        return cls(f"{path} could not be written: {getattr(error, 'strerror', None) or error}.")


class CheckFailed(RuntimeError):
    """Faults found by a task that completed; its report lists them, the message counts them."""


def sentence(error: Exception) -> str:
    """Return the first line of an error's text as a sentence."""
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0].rstrip('. :')}."
