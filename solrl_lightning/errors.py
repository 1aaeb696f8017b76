"""The errors that a user of the application meets."""


class UserError(ValueError):
    """A mistake in what the user asked for; the message states the rule, the value found and the way out."""


class NonFiniteError(RuntimeError):
    """A reward or a loss is not finite; the message names the prompt, and the seed where there is one.

    Args:
        row: which sample of the batch.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[str, int]]:
        return type(self), (str(self), self.row)  # pickle passes on what Exception got: the message alone


class WriteError(RuntimeError):
    """A file could not be written; the message names it. What was there before is intact."""

    @classmethod
    def of(cls, path: object, error: Exception) -> "WriteError":
        return cls(f"{path} could not be written: {getattr(error, 'strerror', None) or error}.")


class CheckFailed(RuntimeError):
    """A task that checks something is done and found faults, which its report holds; the message counts them."""


def sentence(error: Exception) -> str:
    """The first line of an error's text, as a sentence."""
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0].rstrip('. :')}."
