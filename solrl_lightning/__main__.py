"""The command line: check it as a whole, then let Hydra run one verb of ``solrl_lightning.tasks`` per job.

Everything a user can get wrong on the command line is found here, before a model library is imported and before
anything is written, and is said in one message without a traceback.
"""

import errno
import logging
import os
import sys
import threading
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from solrl_lightning.config import (
    CONFIG_MODULE,
    ConfigTree,
    application_config,
    check_machine,
    check_needs,
    check_prompts,
    check_values,
    first_lines,
)
from solrl_lightning.errors import CheckFailed, NonFiniteError, UserError, WriteError
from solrl_lightning.hub import check_hub
from solrl_lightning.kinds import check_kinds
from solrl_lightning.launch import check_launched, is_first
from solrl_lightning.run_folder import (
    LAST,
    check_contents,
    check_free,
    check_new,
    check_writable,
    claimed,
    finished_runs,
    own_sources,
    remove_unused,
    resume,
    searched,
)

_FAILED = 1
_USER_ERROR = 2  # as argparse
_INTERRUPTED, _TERMINATED = 130, 143  # as shells report Ctrl-C and SIGTERM
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_RANK_VARIABLES = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_TOLD = (UserError, NonFiniteError, WriteError, CheckFailed)  # what a user can do something about
_NO_RECORD = ("hydra.output_subdir=null", f"hydra.job_logging.handlers.file.filename={os.devnull}")  # rank 0 has it
_TEXT_KEYS = (  # paths and prompts: no names for folders
    "ckpt",
    "data.train",
    "data.eval",
    "model.pretrained",
    "reward.pretrained",
    "task.prompts",
    "task.prompt_file",
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit status; of a sweep, that of the worst job."""
    failed: list[Exception] = []  # what jobs of this process have told

    def job(cfg: DictConfig) -> Any:
        try:
            return run(cfg)
        except _TOLD as error:
            failed.append(error)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # a sweeper, and a launcher of other processes, know by it
            return None  # Hydra would print more around it

    try:
        silence_libraries()
        sys.argv[1:], claims = prepare(sys.argv[1:] if arguments is None else arguments)
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to us instead of being printed by Hydra
        with ExitStack() as held:
            for folder, new in claims.items():
                held.enter_context(claimed(folder, new))
            hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name="config", version_base="1.3")(job)()
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code is None and "lightning" in sys.modules:
            from lightning.pytorch.utilities.exceptions import SIGTERMException

            if isinstance(stop, SIGTERMException):
                print("terminated", file=sys.stderr)
                return _TERMINATED
        # Lightning ends a run that Ctrl-C stopped with exit(1)
        if not isinstance(stop, KeyboardInterrupt) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if error not in failed:
            failed.append(report_error(error))
    return max((_USER_ERROR if isinstance(error, UserError) else _FAILED for error in failed), default=0)


def run(cfg: DictConfig) -> Any:
    """One job: calls the chosen task with the resolved configuration and returns what it returns.

    Raises:
        UserError, NonFiniteError, WriteError: what ended it, already printed and in its log.
    """
    OmegaConf.resolve(cfg)
    sweeps = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if sweeps:
            silence_libraries()  # a launcher may have started this process
            check_values(cfg)  # a sweeper may have chosen them
        task = _task(cfg.task._target_)
        with isolated_sweep_job(Path(cfg.run_dir)) if sweeps else nullcontext():
            return task(cfg)
    except Exception as error:
        logging.getLogger("solrl_lightning.record").exception("the task ended with an error")  # in the run's log
        told = report_error(error, Path(cfg.run_dir))
        if isinstance(told, UserError) and is_first():
            remove_unused(Path(cfg.run_dir))
        raise told from None
    except (KeyboardInterrupt, SystemExit):
        if is_first():
            remove_unused(Path(cfg.run_dir))
        raise


def _task(target: str) -> Callable[[DictConfig], Any]:
    try:
        return get_method(target)
    except (ImportError, ValueError, HydraException) as error:
        raise UserError(
            f"task._target_={target} is invalid: it must be a function that Python finds ({first_lines(error)}). Leave "
            "it out, and choose what to do with task=<option>."
        ) from error


def report_error(error: Exception, folder: Path | None = None) -> Exception:
    """Prints and returns the cause that a user can do something about; raises an error without one.

    Args:
        folder: of the run that ended with it.
    """
    told = next((e for e in _causes(error) if isinstance(e, _TOLD)), None)
    place = next(
        (e for e in _causes(error) if isinstance(e, OSError) and (e.filename or e.errno in _DISK_ERRORS)), None
    )
    if told is None and place is not None:
        file = place.filename or folder or "The run's folder"
        if place.errno in _DISK_ERRORS or (
            folder is not None and Path(file).absolute().is_relative_to(folder.absolute())
        ):
            told = WriteError.of(file, place)  # TensorBoard's and Hydra's files, and the log
        else:
            told = UserError(f"{file}: {place.strerror}. Give a path that this user can read and write.")
    if told is None and folder is None and isinstance(error, HydraException | OmegaConfBaseException):
        told = UserError(first_lines(error))  # before a job: of an option of Hydra's
    if told is None:
        raise error
    way_out = ""
    if isinstance(told, WriteError):
        again = "give the same command again"
        if folder is not None and (folder / LAST).is_file():
            again = f"continue the run with ckpt=last hydra.run.dir={folder}"
        elif folder is not None:
            again = f"remove {folder} and {again}"
        way_out = f" Free space or make the folder writable, then {again}."
    print(f"error: {told}{way_out}", file=sys.stderr)
    return told


def silence_libraries() -> None:
    """Leaves out what libraries say to each other, and nothing that a user of ours can act on.

    ``build.hide_loading_bars`` does it for their bars.
    """
    # Lightning 2.6 asks torch for a class that newer ones deprecate.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
    # A run that goes on finds its own checkpoints there.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # A run that starts in a new folder from a checkpoint of another.
    warnings.filterwarnings("ignore", "The dirpath has changed from")
    # torchao registers classes with torch in a way that newer ones deprecate, and diffusers misses classes that newer
    # torchaos do not have: for models that are stored quantised, which are none of ours. diffusers' AutoencoderTiny
    # wonders at a key of its configuration that it has written itself.
    for name in (
        "torch.utils._pytree",
        "diffusers.quantizers.torchao.torchao_quantizer",
        "diffusers.configuration_utils",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("diffusers.models.modeling_utils").setLevel(logging.CRITICAL)  # it logs what it raises
    logging.getLogger("huggingface_hub").propagate = False  # it prints what it logs itself
    logging.raiseExceptions = False  # a full disk ends the run at its next file; each line of the log is no news
    threading.excepthook = _thread_ended


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. --hydra-help lists the flags.")


def _flags() -> ArgumentParser:
    """The flags of Hydra's command line, as documented in https://hydra.cc/docs/1.3/advanced/hydra-command-line-flags."""
    parser = _Parser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for names in ("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m"):
        parser.add_argument(*names.split(), action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    for names in ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd", "--experimental-rerun"):
        parser.add_argument(*names.split())
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    info = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=info)
    return parser


def prepare(arguments: list[str]) -> tuple[list[str], dict[Path, bool]]:
    """Checks a command line. Returns it with its checkpoint resolved, and the folders to claim: whether each is new.

    Raises:
        UserError: a run that it asks for cannot be.
    """
    flags = _flags().parse_intermixed_args(arguments)  # -m may stand anywhere
    if flags.hydra_help or flags.version or flags.shell_completion or flags.experimental_rerun:
        return arguments, {}
    if flags.config_dir is not None and not Path(flags.config_dir).is_dir():
        raise UserError(f"--config-dir must be a folder; there is none at {flags.config_dir}.")
    try:
        with ConfigTree(flags.config_name, flags.config_dir) as tree:
            return _checked(tree, arguments, flags)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(first_lines(error)) from error


def _checked(tree: ConfigTree, arguments: list[str], flags: Namespace) -> tuple[list[str], dict[Path, bool]]:
    for override in tree.parse(flags.overrides):
        sources = override.value()
        if override.key_or_group == "hydra.searchpath" and isinstance(sources, list):
            tree.look_in(sources)
    resumed = resume(tree, flags.overrides, flags.multirun)
    jobs = {}
    composed = tree.jobs(resumed.arguments, flags.multirun)
    common = set.intersection(*(set(cfg.hydra.overrides.task) for cfg in composed))
    for cfg in composed:
        check_kinds(tree, cfg)
        home = cfg.hydra.sweep if tree.sweeps else cfg.hydra.run
        check_launched(OmegaConf.to_yaml(home), OmegaConf.select(cfg, "trainer.num_nodes") or 1)
        folder = Path(home.dir)
        if folder == Path():
            raise UserError("A run needs a folder of its own; hydra.run.dir is empty. Name one, or leave it out.")
        own = " ".join(override for override in cfg.hydra.overrides.task if override not in common)
        jobs[own] = application_config(cfg, folder)
    _each(jobs, check_values)
    if len(jobs) > 1 and not OmegaConf.is_interpolation(home, "subdir"):
        raise UserError(
            f"hydra.sweep.subdir={home.subdir} is invalid: every run of a sweep needs a folder of its own. Use "
            "'hydra.sweep.subdir=${hydra.job.num}', or leave it out."
        )
    other = [argument for argument in arguments if argument not in flags.overrides]
    if flags.help or flags.cfg or flags.info:
        return [*other, *resumed.arguments], {}
    folders = {Path(cfg.run_dir): Path(cfg.run_dir).resolve() != resumed.folder for cfg in jobs.values()}
    claims = folders if is_first() else {}
    for folder, new in claims.items():
        check_free(folder)
        if new:
            check_new(folder)
        check_writable(folder)
    told: list[str] = []
    _each(jobs, _check_runs)
    _each(jobs, check_needs)
    _each(jobs, lambda cfg: told.extend(check_hub(cfg)))
    _each(jobs, check_machine)
    message = resumed.message
    if resumed.checkpoint is not None:
        iterations = min(cfg.iterations for cfg in jobs.values())
        done = check_contents(resumed.checkpoint, iterations if resumed.training else None)
        if resumed.training:
            message += f"; iterations done: {done}"
    if told and is_first():
        print(*dict.fromkeys(told), sep="\n", flush=True)
    _each(jobs, check_prompts)
    if message and is_first():
        print(message, flush=True)
    names = [_folder_names(tree, resumed.arguments)] if tree.sweeps else []
    return [*other, *resumed.arguments, *names, *([] if is_first() else _NO_RECORD)], claims


def _each(jobs: dict[str, DictConfig], check: Callable[[DictConfig], None]) -> None:
    """Checks every job; of a sweep, an error begins with what is the job's own."""
    for own, cfg in jobs.items():
        try:
            check(cfg)
        except UserError as error:
            raise UserError(f"{own}: {error}" if own else str(error)) from error


def _check_runs(cfg: DictConfig) -> None:
    if "runs" in cfg.task:
        finished_runs(cfg.task.runs)


def _folder_names(tree: ConfigTree, arguments: list[str]) -> str:
    """Runs of a sweep are named by what is swept, and by nothing else."""
    fixed = [o.key_or_group for o in tree.parse(arguments) if not o.is_sweep_override()]
    unnamed = ",".join(f"'{key}'" for key in dict.fromkeys([*fixed, *_TEXT_KEYS]))
    return f"hydra.job.config.override_dirname.exclude_keys=[{unnamed}]"


@contextmanager
def isolated_sweep_job(folder: Path) -> Iterator[None]:
    """Shows a job of a sweep to Lightning as a run of its own, in a folder that it claims.

    Lightning starts further ranks with this process's program and command line, which may be a launcher's, in the
    folder that Hydra would have given a single run, and leaves its ranks in the environment, where the next job would
    take them for its own.
    """
    from torch import distributed  # here: --help and mistakes do without

    settings: Any = HydraConfig.get()
    with read_write(settings), open_dict(settings):
        settings.run.dir = settings.runtime.output_dir
    program = sys.modules["__main__"]
    spec, arguments, environment = program.__spec__, sys.argv[1:], dict(os.environ)
    program.__spec__ = find_spec("solrl_lightning.__main__")
    sys.argv[1:] = [*settings.overrides.task, *searched(own_sources(settings))]
    try:
        with claimed(folder, new=False) if is_first() else nullcontext():
            yield
    finally:
        program.__spec__ = spec
        sys.argv[1:] = arguments
        for name in _RANK_VARIABLES - environment.keys():
            os.environ.pop(name, None)
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    """Prints what ended a thread, unless the main thread raises it too, as it does for TensorBoard's writer."""
    if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in _DISK_ERRORS):
        threading.__excepthook__(args)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    sys.exit(main())
