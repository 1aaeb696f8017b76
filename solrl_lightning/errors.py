"""Exceptions whose messages are shown to the user without a traceback."""

import difflib
import errno
import re
from collections.abc import Iterable, Sequence

EMPTY = "it must not be empty, as a shell variable is that is not set"
"""The rule of a text, in an error."""
_NO_MEMORY = re.compile("DefaultCPUAllocator|bad_alloc|could not create a memory object|CUBLAS_STATUS_ALLOC_FAILED")


class UserError(ValueError):
    """Invalid configuration or input; the message states the value, the rule and a fix."""


class NonFiniteError(RuntimeError):
    """Non-finite reward or loss of a row of a batch, or gradient or weights of all rows (row 0).

    The message names the prompt and the seed of a row, where they are known.
    """

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[str, int]]:
        return type(self), (str(self), self.row)  # Exception pickles the message only


class WriteError(RuntimeError):
    """Failed write; the message names the file, whose old content is intact.

    Attributes:
        path: of the file, as in the message.
    """

    path: str

    @classmethod
    def of(cls, path: object, error: Exception) -> "WriteError":
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.EFBIG:
            reason = "File too large for `ulimit -f`, or for this file system"
        failure = cls(f"{path} could not be written: {reason}.")
        failure.path = str(path)
        return failure


class FolderLost(WriteError):
    """The folder of this run was moved or removed, and another run has begun in a folder of its name."""


class ServerError(RuntimeError):
    """A server that does not answer, or not as agreed; the message names the server and the sample."""


class ExplorersLost(RuntimeError):
    """No explorer answers any more; the message says what became of the last one."""


class RewardError(RuntimeError):
    """An exception in the code of a reward; the message names the reward, file and line, and ``__cause__`` is it."""


class RankLost(RuntimeError):
    """Another rank has ended, for which this one would wait."""


class OutOfMemory(RuntimeError):
    """The device has no memory left, after what can be halved has been; the message has the allocator's numbers."""


class RewardOutOfMemory(OutOfMemory):
    """The device has no memory left for a reward; the message names it."""


class CheckFailed(RuntimeError):
    """Faults found by a task that completed; its report lists them, the message counts them."""


def causes_of(error: BaseException) -> list[BaseException]:
    """Return ``error``, what it was raised from, and so on; the last one is the reason."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator of Python, torch or oneDNN raised the error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # of torch
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def is_out_of_threads(error: BaseException) -> bool:
    """Return whether the system let a process start no thread or process, as Python says it."""
    no_process = isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN
    return no_process or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error is about memory, disk, threads or GPU, whatever the program did with them."""
    is_of_disk = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_of_gpu = type(error).__name__ == "AcceleratorError"  # of torch
    return is_of_disk or is_of_gpu or is_out_of_memory(error) or is_out_of_threads(error)


def sentence(error: BaseException) -> str:
    """Return the first line of an error's text as a sentence."""
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0].rstrip('. :')}."


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of ``known``, nearest first; of a dotted key, the whole or the last part alone may be near."""

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, word, candidate).ratio()
        last = difflib.SequenceMatcher(None, word.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.9 * last) + 0.1 * whole - 0.04 * candidate.count(".")

    scored = sorted(((likeness(candidate), candidate) for candidate in dict.fromkeys(known)), reverse=True)
    return [candidate for score, candidate in scored[:3] if score > max(0.65, scored[0][0] - 0.1)]


def did_you_mean(names: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(names)}?" if names else ""
