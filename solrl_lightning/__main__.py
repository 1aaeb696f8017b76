"""The command line: check all of it, then let Hydra run one task of ``solrl_lightning.tasks`` per job.

A mistake is reported in one message without a traceback, before a model library is imported and before a file is
written.
"""

from solrl_lightning.machine import allocator, interrupts, threads  # first: they act while the others are loaded

# isort: split
import logging
import math
import os
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_method
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

import solrl_lightning
from solrl_lightning.artifacts.finished_runs import end_of
from solrl_lightning.artifacts.formatting import counted, path_option
from solrl_lightning.artifacts.run_folder import (
    LAST,
    NEXT_RECORD,
    OTHER_FOLDER,
    RECORD,
    branch_elsewhere,
    check_free,
    check_new,
    check_writable,
    claimed,
    is_utf8,
    remember,
    remove_unused,
)
from solrl_lightning.cli.config import CONFIG_MODULE, EXPERIMENT, ConfigTree, as_written, check_choices, resolvable
from solrl_lightning.cli.console import EXPECTED, first_lines, report_error, silence_libraries
from solrl_lightning.cli.launch import check_launched, end_together, end_with_first, is_first, launched, ranks_here
from solrl_lightning.cli.resume import (
    Resumed,
    check_contents,
    check_left,
    check_sweep,
    record_digests,
    recorded_contents,
    resume,
)
from solrl_lightning.errors import UserError
from solrl_lightning.machine.packages import check_not_hidden

interrupts.restore()
os.environ["MPLBACKEND"] = "agg"  # pictures are files; a notebook's ! names a backend that this environment may lack

if TYPE_CHECKING:  # a mistyped name is reported before pydantic is loaded
    from solrl_lightning.options.run import Run

_commands = count()  # of this process
_FAILED, _USER_ERROR = 1, 2  # 2 as argparse
_INTERRUPTED, _TERMINATED, _BROKEN_PIPE = 130, 143, 141  # as shells report Ctrl-C, SIGTERM and SIGPIPE
# What rank 0 writes and prints; warnings are of the rank itself.
_NO_RECORD = (
    "hydra.output_subdir=null",
    f"hydra.job_logging.handlers.file.filename={os.devnull}",
    "++hydra.job_logging.handlers.console.level=WARNING",
)
# Names of files and prompts: a folder's name has none of them, nor a value with a slash.
_TEXT_KEYS = "ckpt data.train data.eval model.pretrained reward.pretrained task.prompts task.prompt_file".split()


def main(arguments: list[str] | None = None) -> int:
    """Run a command line. Return its exit status, for a sweep the highest of its jobs."""
    reported: list[Exception] = []  # by the jobs of this process
    jobs: list[_Job] = []  # of this process, so far
    sys.stdout, sys.stderr = interrupts.lasting(sys.stdout), interrupts.lasting(sys.stderr)
    if next(_commands):
        solrl_lightning.BEGAN = time.perf_counter()  # the first command began with the process

    def job(cfg: DictConfig) -> Any:
        jobs.append(_Job(Path(cfg.run_dir), OmegaConf.select(cfg, "trainer.num_nodes") not in (None, 1)))
        try:
            return run(cfg)
        except (*EXPECTED, BrokenPipeError) as error:
            if isinstance(error, BrokenPipeError) and not _is_of_output(error):
                raise  # of a callback, about a pipe to another program
            reported.append(error)
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise  # a sweeper, and a launcher of other processes, need to know
            return None  # Hydra would print a traceback

    launched.cache_clear()  # one time for the lock and for Hydra's folder, a new one for each command
    try:
        end_with_first()
        silence_libraries()
        sys.argv[1:], claims = prepare(sys.argv[1:] if arguments is None else arguments)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them
        with ExitStack() as claimed_folders:
            for folder, new in claims.items():
                claimed_folders.enter_context(claimed(folder, new))
            hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name="config", version_base="1.3")(job)()
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning ends a run with SIGTERMException after SIGTERM, and with exit(1) after Ctrl-C.
        terminated = type(stop).__name__ == "SIGTERMException"
        interrupted = any(isinstance(e, KeyboardInterrupt) for e in (stop, stop.__context__))
        if not (terminated or interrupted or jobs):
            raise
        how = "terminated" if terminated else "interrupted" if interrupted else f"error: sys.exit({stop}) ended the run"
        _print_stop(how, jobs)
        return _TERMINATED if terminated else _INTERRUPTED if interrupted else _FAILED
    except Exception as error:
        if error not in reported:
            in_job = any(frame.f_code is job.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
            reported.append(error if _is_of_output(error) else report_error(error, in_job=in_job))
    if any(isinstance(error, BrokenPipeError) for error in reported):  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python reports it again when it flushes
        if jobs and not interrupts.is_unread():
            _print_stop("terminated: nobody reads the output", jobs)
        return _BROKEN_PIPE
    return max((_USER_ERROR if isinstance(error, UserError) else _FAILED for error in reported), default=0)


def _is_of_output(error: Exception) -> bool:
    """Return whether ``error`` says that nobody reads the output any more."""
    return isinstance(error, BrokenPipeError) and interrupts.is_unread()


class _Job(NamedTuple):
    """What is read at its start: Hydra's part of the configuration is gone when the job has ended."""

    folder: Path
    has_several_nodes: bool


def _print_stop(how: str, jobs: list[_Job]) -> None:
    print(how, file=sys.stderr)
    if jobs and (jobs[-1].folder / LAST).is_file() and is_first():
        options = f"ckpt=last {path_option('hydra.run.dir', jobs[-1].folder)}"
        launch = "the same launcher, and" if jobs[-1].has_several_nodes else "python -m solrl_lightning"
        print(f"resume with: {launch} {options}", file=sys.stderr)


def run(cfg: DictConfig) -> Any:
    """Call the task of one job with the resolved configuration and return the task's result.

    Raises:
        UserError, NonFiniteError, WriteError, ServerError, RankLost, CheckFailed: already reported and logged.
    """
    folder, sweeps = Path(cfg.run_dir), HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if is_first():
            record_digests(cfg)
        OmegaConf.resolve(cfg)
        if sweeps:
            silence_libraries()  # a launcher may have started this process
            threads.configure(ranks_here())
        from solrl_lightning.cli.sweep_job import continued, isolated_sweep_job
        from solrl_lightning.options.run import Run

        options = Run.of(cfg)  # whose values a sweeper may have chosen
        if sweeps and options.trains and (folder / LAST).is_file():
            options = Run.of(continued(cfg, folder))
        task = _task(options.task.target)
        if options.trains and is_first():
            remember(folder)
        if not sweeps:
            result = task(options)
            end_together()
            return result
        with isolated_sweep_job(folder):
            return task(options)
    except Exception as error:
        if _is_of_output(error):
            raise
        logging.getLogger("solrl_lightning.record").exception("the task ended with an error")  # in the run's log
        trains = HydraConfig.get().runtime.choices.get("task") == "train"
        begins_with_base = cfg.get("ckpt") is None  # as ckpt=auto does
        reported = report_error(error, folder, resumable=trains and begins_with_base and not sweeps)
        if isinstance(reported, UserError) and is_first():
            remove_unused(folder)
        raise reported from None
    except (KeyboardInterrupt, SystemExit):
        if is_first():
            remove_unused(folder)
        raise


def _task(target: str) -> "Callable[[Run], Any]":
    try:
        return get_method(target)
    except (ImportError, ValueError, HydraException) as error:
        raise UserError(
            f"task._target_={target} is invalid: it must be a function that Python finds ({first_lines(error)}). Leave "
            "it out, and choose what to do with task=<option>."
        ) from error


# Before a run


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.split() if word.startswith("--")), None)
        if flag is not None and "unrecognized" in message:
            key, _, value = flag.removeprefix("--").partition("=")
            fix = (
                f"Write {key.replace('-', '_')}={value or '<value>'}, if --help has that key."  # --resume is ckpt=last
            )
            if key in ("local-rank", "local_rank"):  # of torch.distributed.launch and DeepSpeed
                fix = "Start the command by torchrun, which adds no argument."
            raise UserError(f"{flag} is no flag (--hydra-help lists them), and an option has no dashes. {fix}")
        notebook = "In a notebook write main([<option>, ...]). " if "ipykernel" in sys.modules else ""
        raise UserError(f"{message}. {notebook}--hydra-help lists the flags.")


def _flags(arguments: list[str]) -> Namespace:
    """Return Hydra's flags (https://hydra.cc/docs/1.3/advanced/hydra-command-line-flags), anywhere among overrides."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in "--help,-h --hydra-help --version --resolve --run,-r --multirun,-m --shell-completion,-sc".split():
        parser.add_argument(*names.split(","), action="store_true")
    for names in "--package,-p --config-path,-cp --config-name,-cn --config-dir,-cd --experimental-rerun".split():
        parser.add_argument(*names.split(","))
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    info = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=info)
    return parser.parse_intermixed_args(arguments)


def prepare(arguments: list[str]) -> tuple[list[str], dict[Path, bool]]:
    """Check a command line. Return it with its checkpoint resolved, and the folders to claim: whether each is new.

    Raises:
        UserError: for the first mistake.
    """
    if isinstance(arguments, str):
        raise UserError(f"main({arguments!r}) is invalid: it takes a list. Write main({arguments.split()}).")
    if GlobalHydra.instance().is_initialized():
        rule = "A process runs one command at a time, and a command or a program of Hydra runs in this one"
        raise UserError(f"{rule}. Start another process: python -m solrl_lightning <option> ...")
    flags = _flags(arguments)
    if flags.version:
        print(f"solrl_lightning {solrl_lightning.__version__}")  # Hydra adds its own
    if flags.hydra_help or flags.version or flags.shell_completion or flags.experimental_rerun:
        return arguments, {}
    # Hydra reports other mistakes in its flags itself, when it runs.
    names = {"--config-name": flags.config_name, "--config-path": flags.config_path}
    misuse = ""
    if flags.resolve and flags.cfg == "hydra":
        misuse = "--resolve needs the keys that Hydra's refer to. Use --cfg all --resolve"
    elif flags.package is not None and not flags.cfg:
        misuse = f"--package goes with --cfg. Use --cfg job --package {flags.package}"
    elif flag := next((f"{name}={value}" for name, value in names.items() if value is not None), None):
        rule = "a run resumes by its options and its --config-dir, in which this flag would not be"
        fix = "Write values into <folder>/experiment/<name>.yaml, and take --config-dir <folder> experiment=<name>"
        misuse = f"{flag} is invalid: {rule}. {fix}"
    if misuse:
        raise UserError(f"{misuse}.")
    try:
        with ConfigTree(flags.config_dir) as tree:
            return _checked(tree, arguments, flags)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(first_lines(error)) from error


def _checked(tree: ConfigTree, arguments: list[str], flags: Namespace) -> tuple[list[str], dict[Path, bool]]:
    notes = threads.configure(ranks_here())  # before torch is loaded: ranks of torchrun agree on a folder by its store
    allocator.configure()
    check_not_hidden()
    topics = [argument for argument in flags.overrides if flags.help and argument in tree.groups()]
    flags.overrides = [argument for argument in flags.overrides if argument not in topics]
    for argument in flags.overrides:
        if not is_utf8(argument):
            rule = "it must be in UTF-8, as prompts are, and the names of files for torch"
            raise UserError(f"Cannot read {ascii(argument)}: {rule}. Set PYTHONUTF8=1.")
    for override in tree.parse(flags.overrides):
        sources = override.value()
        if override.key_or_group == "hydra.searchpath" and isinstance(sources, list):
            tree.look_in(sources)
    if topics:
        _print_manual(tree, topics, flags.overrides)
    resumed = resume(tree, tree.completed(flags.overrides), flags.multirun)
    composed = tree.jobs(resumed.arguments, flags.multirun)
    checked = [argument for argument in arguments if argument not in flags.overrides] + resumed.arguments
    if flags.help or flags.cfg or flags.info:
        return checked, {}
    try:
        return _checked_jobs(tree, checked, resumed, composed, notes)
    except UserError as error:
        advice = (text for path, text in resumed.elsewhere.items() if path in str(error))
        raise UserError(f"{error}{next(advice, '')}") from error


def _checked_jobs(
    tree: ConfigTree, checked: list[str], resumed: Resumed, composed: list[DictConfig], notes: list[str]
) -> tuple[list[str], dict[Path, bool]]:
    if sys.flags.optimize > 1:
        raise UserError("PYTHONOPTIMIZE=2 (python -OO) is invalid: transformers reads docstrings. Set it to 1 or to 0.")
    from solrl_lightning.cli import checks, hub  # after the names are right: pydantic takes 0.1 s

    jobs = _jobs(tree, composed, checks.options_of)
    folders = [Path(cfg.run_dir) for cfg in jobs.values()] if is_first() else []
    claims = {folder: Path(os.path.realpath(folder)) != resumed.folder for folder in folders}
    for folder, new in claims.items():
        other = OTHER_FOLDER if new or resumed.checkpoint is None else branch_elsewhere(folder)
        check_free(folder, other)
        if new:
            check_new(folder)
        check_writable(folder, other)
    if resumed.checkpoint is not None and (recorded := recorded_contents(resumed.checkpoint)) is not None:
        _is_over(resumed, jobs, *recorded)
    _each(jobs, checks.check_needs)
    if not tree.sweeps:
        trained = [cfg.run_dir for cfg in jobs.values() if cfg.trains]
        _print_first(*(f"run folder: {folder}; loading libraries" for folder in trained))
    _each(jobs, checks.check_machine)
    message = resumed.message
    if resumed.checkpoint is not None:
        done, seconds = check_contents(resumed.checkpoint)
        is_over = _is_over(resumed, jobs, done, seconds)
        message += f"; iterations done: {done}" if resumed.training else ""
        if resumed.training and is_over:
            message += ". It was stopped before its results were written: writing them"
    _each(jobs, lambda options: notes.extend(hub.check_hub(options)))  # after what needs no network
    _print_first(*dict.fromkeys(notes))
    from solrl_lightning.data.prompts import forget_files  # with torch, which check_machine has loaded

    forget_files()
    _each(jobs, checks.check_prompts)
    _print_first(message)
    if tree.sweeps:  # folders are named by what is swept, and by nothing else
        fixed = [o.key_or_group for o in tree.parse(resumed.arguments) if not o.is_sweep_override()]
        lines = [line.partition("=") for cfg in composed for line in as_written(cfg.hydra.overrides.task)]
        paths = [key.lstrip("+") for key, _, value in lines if "/" in value]
        unnamed = ",".join(f"'{key}'" for key in dict.fromkeys([*fixed, *paths, *_TEXT_KEYS]))
        checked.append(f"hydra.job.config.override_dirname.exclude_keys=[{unnamed}]")
    return [*checked, *([] if is_first() else _NO_RECORD)], claims


def _is_over(resumed: Resumed, jobs: "dict[str, Run]", done: int, seconds: float) -> bool:
    """Return whether nothing is left to train after these iterations and seconds; the results may be left to write.

    Raises:
        UserError: training has nothing left to do.
        SystemExit: the same with ckpt=auto.
    """
    assert resumed.checkpoint is not None, "only a checkpoint has done something"
    iterations = min(cfg.iterations for cfg in jobs.values())
    limit = min(cfg.max_seconds or math.inf for cfg in jobs.values())
    end = None if resumed.folder is None else end_of(resumed.folder, done)
    is_over = done >= iterations or seconds >= limit
    if resumed.requeued and (end == "stopped early" or (end is not None and is_over)):
        ended = f"has ended after {counted(done, 'iteration')}"
        _print_first(f"ckpt=auto: the run in {resumed.folder} {ended}; nothing to do")
        raise SystemExit(0)
    if resumed.newest and resumed.folder is not None and end is not None:
        check_sweep(resumed.folder, resumed.checkpoint)
    if resumed.training and (resumed.folder is None or end is not None or done > iterations):
        check_left(resumed.checkpoint, done, seconds, iterations, limit)
    return is_over


def _print_manual(tree: ConfigTree, groups: list[str], overrides: list[str]) -> NoReturn:
    from solrl_lightning.cli.manual import describe_experiments, manual  # imports torch

    (cfg,) = tree.jobs(tree.completed(overrides), multirun=False)
    for group in groups:
        print(describe_experiments(tree.experiments()) if group == EXPERIMENT else manual(group, cfg))
    raise SystemExit(0)


def _jobs(
    tree: ConfigTree, composed: list[DictConfig], options_of: "Callable[[DictConfig, str], Run]"
) -> "dict[str, Run]":
    """Return the valid options of every run of a sweep, by the overrides that only this run has."""
    lines = [as_written(cfg.hydra.overrides.task) for cfg in composed]
    common = set.intersection(*map(set, lines))
    jobs = {}
    for cfg, of_job in zip(composed, lines, strict=True):
        check_choices(cfg)
        home = cfg.hydra.sweep if tree.sweeps else cfg.hydra.run
        check_launched(OmegaConf.to_yaml(home), OmegaConf.select(cfg, "trainer.num_nodes"))
        if not isinstance(cfg.hydra.verbose, bool | str | ListConfig):
            rule = "it must be true, false, or the name of a logger or several"
            raise UserError(f"hydra.verbose={cfg.hydra.verbose} is invalid: {rule}. Leave it out for the default.")
        key = f"hydra.{'sweep' if tree.sweeps else 'run'}.dir"
        pattern: Any = OmegaConf.to_container(home, resolve=False)
        if tree.sweeps and "${hydra:" in pattern["dir"]:
            fix = f"Write '{key}={pattern['dir'].replace('${hydra:', '${hydra.')}', or use hydra.sweep.subdir."
            raise UserError(f"{key}={pattern['dir']} is invalid: ${{hydra:...}} has values in a job only. {fix}")
        with resolvable(cfg):
            folder = home.dir
        if folder.startswith("~") or Path(folder) == Path():
            rule = "runs need a folder of their own, and in its name ~ is no home directory"
            raise UserError(f"{key}={folder} is invalid: {rule}. Name one, such as runs/a, or leave it out.")
        overrides = " ".join(override for override in of_job if override not in common)
        if overrides in jobs:
            raise UserError(f"The sweep has the run {overrides or 'of all its values'} twice. Give each value once.")
        with _named(overrides):
            jobs[overrides] = options_of(cfg, folder)
        record = cfg.hydra.output_subdir
        if jobs[overrides].trains and is_first() and record not in (str(RECORD), str(NEXT_RECORD)):
            raise UserError(
                f"hydra.output_subdir={record or 'null'} is invalid: a run resumes with the options that Hydra records "
                f"in {RECORD}. Leave it out."
            )
    if tree.sweeps:
        _check_subdirs(composed)
        direction = OmegaConf.select(composed[0], "hydra.sweeper.direction")  # of Optuna
        if isinstance(direction, ListConfig) and len(direction) > 1:
            rule = "a run returns one value, its last held-out reward"
            raise UserError(
                f"hydra.sweeper.direction={direction} is invalid: {rule}. Set hydra.sweeper.direction=maximize."
            )
    return jobs


def _check_subdirs(composed: list[DictConfig]) -> None:
    """Raise UserError if two jobs of a sweep have one folder: the second would continue the first.

    Of a sweeper that chooses values during the sweep, two jobs with the same values are compared.
    """
    chooses = composed[0].hydra.runtime.choices["hydra/sweeper"] != "basic"
    jobs: dict[str, int] = {}
    for number, cfg in enumerate([*composed, *composed] if chooses else composed):
        with read_write(cfg.hydra), resolvable(cfg):
            cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
            subdir = os.path.normpath(str(cfg.hydra.sweep.subdir))
        first = jobs.setdefault(subdir, number)
        if first != number:
            pattern: Any = OmegaConf.to_container(cfg.hydra.sweep, resolve=False)
            raise UserError(
                f"hydra.sweep.subdir={pattern['subdir']} is invalid: every run of a sweep needs its own folder, and "
                f"jobs {first} and {number} have the folder {subdir}. Use 'hydra.sweep.subdir=${{hydra.job.num}}', or "
                "leave it out."
            )


def _each(jobs: "dict[str, Run]", check: "Callable[[Run], None]") -> None:
    for overrides, options in jobs.items():
        with _named(overrides):
            check(options)


@contextmanager
def _named(overrides: str) -> Iterator[None]:
    """Begin an error with the overrides of the job of a sweep that is checked."""
    try:
        yield
    except UserError as error:
        is_named = not overrides or str(error).startswith(overrides)
        raise UserError(str(error) if is_named else f"{overrides}: {error}") from error


def _print_first(*lines: str) -> None:
    if any(lines) and is_first():
        print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
