"""The console: errors in one line, and no messages of libraries that a user cannot act on."""

import errno
import logging
import re
import resource
import sys
import threading
import traceback
import warnings
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from solrl_lightning.artifacts.formatting import path_option
from solrl_lightning.artifacts.run_folder import LAST
from solrl_lightning.errors import (
    CheckFailed,
    ExplorersLost,
    NonFiniteError,
    OutOfMemory,
    RankLost,
    RewardOutOfMemory,
    ServerError,
    UserError,
    WriteError,
    causes_of,
    is_out_of_memory,
    is_out_of_threads,
    sentence,
)

EXPECTED = (UserError, NonFiniteError, WriteError, ServerError, ExplorersLost, RankLost, OutOfMemory, CheckFailed)
"""Errors that a user can act on."""
_CURES: dict[type[Exception], str] = {
    WriteError: "Free space, make the folder writable, or move away what has this name",
    ServerError: "Start or correct the server",
    ExplorersLost: "Start the cluster again",
    RankLost: "Read its message (a rank that the system kills for its memory leaves none)",
    OutOfMemory: "Set model.gradient_checkpointing=true or a smaller model.micro_batch (task=plan prints what fits)",
    RewardOutOfMemory: "Set a smaller model.rollout_batch, whose images are scored at once",
}
_NO_VARIABLE = re.compile("Environment variable '(.+?)' not found")  # of OmegaConf
_NO_KEY = re.compile("Interpolation key '(.+?)' not found")  # of OmegaConf
_IN_EXPERIMENT = re.compile(r"Multiple values for (\w+)\.|Could not \w+ 'experiment/(\w+)[/@]")  # of Hydra
_NO_SPACE = re.compile(r"(?<!\S)(\S+): failed to map segment from shared object(?!: Operation not permitted)")
_LOST_RANK = re.compile(r"gloo.* by peer", re.DOTALL)  # closed or reset by peer
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_NOTES = ("object_type=", "Config search path:", "provider=")  # of OmegaConf and Hydra


def first_lines(error: Exception) -> str:
    """Return a message of Hydra or OmegaConf in one line, without its notes on object types."""
    text = str(error) or str(error.__cause__)
    if match := _NO_VARIABLE.search(text):
        key = getattr(error, "full_key", None) or "an option"
        return f"{key} reads the environment variable {match[1]}, which is not set. Run export {match[1]}=<value>."
    if match := _NO_KEY.search(text):
        key = getattr(error, "full_key", None) or "an option"
        return f"{key} has the value of {match[1]}, which is missing. Leave out what removes it, or give {key} a value."
    if text.startswith("GrammarParseError raised while") and (key := getattr(error, "full_key", None)):
        rule = "the text that its ${...} gives, as of a variable of the environment, must be a value and not empty"
        return f"{key} is invalid: {rule}. Correct that text."
    if text.startswith("Error merging override") and error.__cause__ is not None:
        text += f": {error.__cause__}"
    text, _, _ = text.partition(" To override a value use")  # in an experiment, that line needs a slash
    if match := _IN_EXPERIMENT.search(text):
        first, _, others = text.partition("\n")
        fix = f"In the defaults list of an experiment write `- override /{match[1] or match[2]}: <option>`."
        text = f"{first.rstrip('.')}. {fix}\n{others}"
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_NOTES))


def _is_raised_by_hydra(error: Exception) -> bool:
    """Return whether ``error`` comes from Hydra, a plugin of it, or a library that reads its files and values."""
    names = _packages(error)
    *_, library = [name for name in names if name not in sys.stdlib_module_names]
    return library in {"hydra", "omegaconf", "yaml", "antlr4"} or "hydra_plugins" in names


def _packages(error: Exception) -> list[str]:
    """Return the package of each frame of a traceback, the innermost last."""
    return [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]


def _plugin_of(error: Exception) -> str | None:
    """Return the name of the package below ``hydra_plugins`` whose import has raised ``error``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    names = [frame.f_globals["__name__"].split(".") for frame in frames]
    return next((name[1] for name in names if name[0] == "hydra_plugins" and len(name) > 1), None)


def _is_in(file: Path | str, folder: Path | None) -> bool:
    return folder is not None and Path(file).absolute().is_relative_to(folder.absolute())


def report_error(
    error: Exception, folder: Path | None = None, *, in_job: bool = True, resumable: bool = False
) -> Exception:
    """Print and return the cause that a user can act on, of the run in ``folder``; raise an error that has none.

    Outside of a job, what Hydra itself raises is about the command line. ``resumable``: ``ckpt=auto`` begins the run
    again.
    """
    causes = causes_of(error)
    failure = next((e for e in causes if isinstance(e, EXPECTED)), None)
    library = next((match[1] for e in causes if (match := _NO_SPACE.search(str(e)))), None)
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if library or (limited and any(isinstance(e, MemoryError | SystemError) for e in causes)):
        rule = "a process must have address space for its libraries, and this one has a limit"
        failure = UserError(f"{library or 'a library'} cannot be loaded: {rule}. Raise it with `ulimit -v unlimited`.")
    io = next((e for e in causes if isinstance(e, OSError) and (e.filename or e.errno in _DISK_ERRORS)), None)
    if failure is None and io is not None:
        file = io.filename or folder or "The run's folder, or what the output goes to,"
        if _is_in(file, folder) or io.errno in _DISK_ERRORS:  # of TensorBoard, Hydra or logging
            failure = WriteError.of(file, io)
        else:
            failure = UserError(f"{file}: {io.strerror}. Give a path that this user can read and write.")
    full = next((e for e in causes if is_out_of_memory(e)), None)
    if failure is None and full is not None:
        failure = OutOfMemory(f"the device has no memory left: {sentence(full)}")
    if failure is None and any(map(is_out_of_threads, causes)):
        rule = "this process can start no thread: a limit on processes is reached"
        failure = UserError(f"{rule}. Raise it (ulimit -u, or pids.max of a container), or end other processes.")
    if failure is None and any(isinstance(e, RuntimeError) and _LOST_RANK.search(str(e)) for e in causes):
        failure = RankLost("another rank of this run has ended.")
    if failure is None and folder is None and isinstance(error, HydraException | OmegaConfBaseException):
        failure = UserError(first_lines(error))  # about an option of Hydra's
    elif failure is None and type(error).__module__.partition(".")[0] == "submitit":  # of a job elsewhere
        reason = f"{type(error).__name__}: {sentence(error)} Its output is in .submitit of the sweep's folder"
        fix = "Continue one that has trained with ckpt=last hydra.run.dir=<its folder>."
        failure = UserError(f"a job of the sweep has no result: {reason}. {fix}")
    elif failure is None and (plugin := _plugin_of(error)):
        fix = f"Update it, or run pip uninstall {plugin.replace('_', '-')}"
        failure = UserError(
            f"Hydra cannot import the plugin {plugin}: {type(error).__name__}: {sentence(error)} {fix}."
        )
    elif failure is None and not in_job and _is_raised_by_hydra(error):  # which does not check all that it is given
        *_, library = [name for name in _packages(error) if name not in sys.stdlib_module_names]
        reason = f"{type(error).__name__} in {library}{f': {sentence(error)}' if str(error) else '.'}"
        failure = UserError(
            f"Hydra cannot use this command line: {reason} Correct the value or the hydra.* option that causes it."
        )
    if failure is None:
        raise error
    fix = ""
    if type(failure) in _CURES:
        again = "give the same command again"
        elsewhere = isinstance(failure, WriteError) and not _is_in(failure.path, folder)
        if folder is not None and (folder / LAST).is_file():
            again = f"continue the run with ckpt=last {path_option('hydra.run.dir', folder)}"
        elif folder is not None and (resumable or not elsewhere):
            here = path_option("hydra.run.dir", folder)
            again = f"{again} with ckpt=auto {here}" if resumable else f"remove {folder} and {again}"
        fix = f" {_CURES[type(failure)]}, then {again}."
    elif isinstance(failure, NonFiniteError) and folder is not None and (folder / LAST).is_file():
        fix = (
            f" Then continue the run with ckpt=last {path_option('hydra.run.dir', folder)}; if it has diverged, lower "
            "optimizer.lr and branch from ckpt=best."
        )
    end = "" if str(failure).endswith((".", "?")) or not fix else "."
    print(f"error: {failure}{end}{fix}", file=sys.stderr)
    return failure


def silence_libraries() -> None:
    """Hide messages of libraries that a user cannot act on. ``build.hide_loading_bars`` hides their bars."""
    # Lightning 2.6 asks torch for a class that newer versions deprecate. Values are reduced over the ranks before they
    # are logged. A resumed run has checkpoints in its folder; a run from the checkpoint of another has another folder.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "It is recommended to use `self.log.*sync_dist=True")
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    warnings.filterwarnings("ignore", "The dirpath has changed from")
    # diffusers' transformers change no result of a block in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "The `srun` command is available on your system but is not used")
    # torchao registers classes in a way that torch deprecates, diffusers misses classes that newer versions of torchao
    # do not have, and its AutoencoderTiny warns about a key that it has written itself.
    # urllib3 logs every retry before the error that ends them, transformers each call of a processor in a way of 5.6.
    quiet = "torch.utils._pytree diffusers.quantizers.torchao.torchao_quantizer diffusers.configuration_utils"
    quiet += " urllib3.connectionpool transformers.processing_utils"
    for name in quiet.split():
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("diffusers.models.modeling_utils").setLevel(logging.CRITICAL)  # it logs errors that it raises
    logging.getLogger("huggingface_hub").propagate = False  # it prints messages that it logs
    logging.raiseExceptions = False  # a full disk ends the run at its next file
    threading.excepthook = _report_thread


def _report_thread(args: threading.ExceptHookArgs) -> None:
    """Print the error of a thread, unless the main thread raises it too, as with TensorBoard's writer."""
    if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in _DISK_ERRORS):
        threading.__excepthook__(args)
