"""The command line: what a job gets, sweeps, resuming, and errors that leave every file as it was."""

import importlib
import json
import logging
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from diffusers.quantizers.torchao import torchao_quantizer
from forks import Forks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from safetensors.torch import save_file
from small_runs import SMALL, Command, files_of
from take_away import POINTER
from torch.distributed import TCPStore

import solrl_lightning
from solrl_lightning.__main__ import _Job, _print_stop, main
from solrl_lightning.artifacts.run_folder import claimed, run_of
from solrl_lightning.build import with_option
from solrl_lightning.cli import launch
from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.cli.launch import check_alone, check_launched, check_world, is_first
from solrl_lightning.cli.resume import recorded_contents, resume
from solrl_lightning.errors import NonFiniteError, ServerError, UserError
from solrl_lightning.machine import interrupts
from solrl_lightning.options.run import Run
from solrl_lightning.tasks.audit import command_without_selection

# Tasks


def record(cfg: Run) -> None:
    """Writes its configuration and process, and the checkpoint and summary that a training run would leave."""
    folder = Path(cfg.run_dir)
    spec = sys.modules["__main__"].__spec__
    facts = {
        "began": solrl_lightning.BEGAN,
        "cfg": cfg.tree(),
        "name": spec and spec.name,
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
    }
    (folder / "record.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "checkpoints").mkdir(exist_ok=True)
    checkpoint = {"pytorch-lightning_version": "2.6", "global_step": 1, "optimizer_states": []}
    checkpoint |= {"state_dict": {}, "callbacks": {}, "loops": {}}
    torch.save(checkpoint, folder / "checkpoints" / "last.ckpt")
    summary = {"status": "completed", "iterations": 1, "final_reward": 0.5, "evaluations": [], "config": {}}
    summary["last_checkpoint_iterations"] = 1
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def fail(cfg: Run) -> None:
    try:
        raise UserError("late, but clear")
    except UserError as error:
        raise RuntimeError("instantiating something") from error


def fail_after_a_write(cfg: Run) -> None:
    (Path(cfg.run_dir) / "summary.json").write_text("{}", encoding="utf-8")
    raise UserError("late, but clear")


def fail_with_the_first_seed(cfg: Run) -> None:
    if cfg.seed == 1:
        raise UserError("not with seed 1")
    record(cfg)


def halve(cfg: Run) -> float:
    record(cfg)
    return cfg.optimizer["lr"] / 2


def negate(cfg: Run) -> float:
    return -halve(cfg)


def show_folder(cfg: Run) -> None:
    logging.getLogger("solrl_lightning").info("a note of each rank")
    print(cfg.run_dir)


def chatter(cfg: Run) -> None:
    for logger in (logging.getLogger("torch.utils._pytree"), torchao_quantizer.logger):
        logger.warning("between libraries")
    warnings.warn("The dirpath has changed from 'a' to 'b', therefore", stacklevel=1)
    warnings.warn("The `srun` command is available on your system but is not used. HINT: between", stacklevel=1)
    logging.getLogger("library.of.interest").warning("for all")


def break_down(cfg: Run) -> None:
    raise ZeroDivisionError("a bug")


def miss_a_file(cfg: Run) -> None:
    (Path(cfg.run_dir) / "checkpoints").mkdir()
    raise UserError("no file " + os.fsdecode(b"caf\xe9"))


def stop(cfg: Run) -> None:
    raise KeyboardInterrupt


class StopAtOnce(Callback):
    def setup(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def stop_after_a_checkpoint(cfg: Run) -> None:
    record(cfg)
    raise KeyboardInterrupt


def stop_in_lightning(cfg: Run) -> None:
    """Lightning's trainer catches the interrupt and exits."""
    options: dict[str, Any] = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    Trainer(**options, callbacks=[StopAtOnce()]).fit(BoringModel())


def task(function: Callable[[Run], None]) -> str:
    """Return the argument that puts ``function`` in the place of the chosen task."""
    return f"task._target_={__name__}.{function.__name__}"


RECORD = task(record)


def server_is_down(cfg: Run) -> None:
    raise ServerError("The reward server does not answer.")


def recorded(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


def config(folder: Path) -> dict[str, Any]:
    return recorded(folder)["cfg"]


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def error_of(command: Command, *arguments: str) -> str:
    """Return the message; asserts that it is one, without a traceback, and that every file is as it was."""
    before = files_of(Path.cwd())
    result = command(*arguments)
    assert result.status == 2 and result.err.startswith("error: ") and "Traceback" not in result.err
    assert files_of(Path.cwd()) == before
    return result.err


# A run


def test_job_gets_the_resolved_configuration_in_its_own_folder(command: Command, tmp_path: Path) -> None:
    arguments = [RECORD, "family=diffusionnft", "iterations=3"]
    assert command(*arguments).status == 0
    folder = only(tmp_path, "outputs/train/*_tiny_diffusionnft_shapes")
    cfg = config(folder)
    assert recorded(folder)["cwd"] == str(tmp_path)
    assert (cfg["run_dir"], cfg["trainer"]["max_epochs"]) == (str(folder), 3)
    assert cfg["callbacks"]["checkpoint"]["dirpath"] == str(folder / "checkpoints")
    assert OmegaConf.load(folder / ".hydra" / "overrides.yaml") == arguments
    assert command(*arguments).status == 0  # within the same second
    assert len(list(tmp_path.glob("outputs/train/*"))) == 2


def test_sweep_runs_every_combination_in_its_own_folder(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, "-m", "family=sol_rl,diffusionnft", "seed=1,2", "iterations=5").status == 0
    folders = sorted(tmp_path.glob("outputs/multirun/*/[0-9]*"))
    pairs = [(family, seed) for family in ("sol_rl", "diffusionnft") for seed in (1, 2)]
    assert [folder.name for folder in folders] == [f"{i}_family-{f}_seed-{s}" for i, (f, s) in enumerate(pairs)]
    cfg = config(folders[3])
    assert (cfg["seed"], cfg["family"]["pool"], cfg["iterations"]) == (2, 24, 5)
    assert recorded(folders[0])["began"] < recorded(folders[3])["began"]
    # What a rank that Lightning starts would run: this job only, by the name of the program.
    assert recorded(folders[3])["argv"] == [RECORD, "family=diffusionnft", "seed=2", "iterations=5"]
    assert recorded(folders[3])["name"] == "solrl_lightning.__main__"


def test_folder_of_a_job_has_no_path_in_its_name(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, "-m", "seed=1,2", "model.embeddings=some/a,some/b", "hydra.sweep.dir=sweep").status == 0
    folders = [file.parent.parent.name for file in tmp_path.glob("sweep/**/.hydra/overrides.yaml")]
    assert sorted(folders) == ["0_seed-1", "1_seed-1", "2_seed-2", "3_seed-2"]


@pytest.mark.parametrize("argument", ['+hydra.sweeper.params.seed="1,2"', 'hydra.sweeper.params={seed: "1,2"}'])
def test_sweep_by_a_key_of_hydra_s_is_an_error(command: Command, argument: str) -> None:
    message = error_of(command, RECORD, "-m", argument)
    assert f"{argument} is invalid: Hydra reads what a sweep varies from options and files. Write it as" in message


def test_jobs_of_a_sweep_with_one_folder_are_an_error(command: Command, tmp_path: Path, sweeper: list[str]) -> None:
    """The second would continue the first, as a job that is started again does."""
    sweep = ["-m", "family=sol_rl,race", "seed=1,2", "hydra.sweep.dir=sweep"]
    line = error_of(command, *sweep, "hydra.sweep.subdir=at/../seed${seed}")
    fix = "Use 'hydra.sweep.subdir=${hydra.job.num}', or leave it out."
    assert f"own folder, and jobs 0 and 2 have the folder seed1. {fix}" in line
    assert "jobs 0 and 1 have the folder same." in error_of(command, *sweep, "hydra.sweep.subdir=same")
    searched = (task(halve), *sweeper, "optimizer.lr=interval(0.1,1)")
    assert "jobs 0 and 1 have the folder lr0.1." in error_of(command, *searched, "hydra.sweep.subdir=lr${optimizer.lr}")
    line = error_of(command, *searched, "+hydra.sweeper.direction=[maximize,minimize]")
    assert "a run returns one value, its last held-out reward. Set hydra.sweeper.direction=maximize." in line
    assert command(RECORD, *sweep, "hydra.sweep.subdir=${hydra:runtime.choices.family}_${seed}").status == 0
    assert {file.name for file in (tmp_path / "sweep").glob("*_*")} == {"sol_rl_1", "sol_rl_2", "race_1", "race_2"}


SWEEPER = """
from forks import Forks
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Climber(Sweeper):
    def setup(self, **options):
        self.config, self.launcher = options["config"], Plugins.instance().instantiate_launcher(**options)

    def sweep(self, arguments):
        value = 0.5
        for number in range(2):
            job = [f"optimizer.lr={value}" if "interval" in argument else argument for argument in arguments]
            (done,) = self.launcher.launch([job], initial_job_idx=number)
            value = done.return_value
            if value is None:
                raise RuntimeError("no value to climb by")
"""


@pytest.fixture
def sweeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that choose a sweeper of another package, which tries 0.5 and then the result of that."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "climber.py").write_text(SWEEPER, encoding="utf-8")
    folder = tmp_path / "options" / "hydra" / "sweeper"
    folder.mkdir(parents=True)
    (folder / "climber.yaml").write_text("_target_: hydra_plugins.climber.Climber\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    Plugins.instance().register(importlib.import_module("hydra_plugins.climber").Climber)  # Hydra looks once a process
    return ["--config-dir", "options", "-m", "hydra/sweeper=climber", "hydra.sweep.dir=sweep"]


def test_another_sweeper_gets_what_the_jobs_return(command: Command, tmp_path: Path, sweeper: list[str]) -> None:
    assert "Did you mean optimizer.lr?" in error_of(command, *sweeper, "optimzer.lr=interval(0.1,1)")
    message = "model.solver=heun is invalid: it must be one of"
    assert message in error_of(command, *sweeper, "model.solver=choice(heun,euler)")
    assert command(task(halve), *sweeper, "optimizer.lr=interval(0.1,1)", "seed=3").status == 0
    folders = sorted((tmp_path / "sweep").glob("[0-9]*"))
    assert [folder.name for folder in folders] == ["0_optimizer.lr-0.5", "1_optimizer.lr-0.25"]
    assert [config(folder)["seed"] for folder in folders] == [3, 3]
    result = command(task(negate), *sweeper, "optimizer.lr=interval(0.1,1)", "hydra.sweep.dir=other")
    assert result.status == 2
    assert "error: optimizer.lr=-0.25 is invalid: it must be a finite number above 0. Leave it out" in result.err
    assert [folder.name for folder in (tmp_path / "other").glob("[0-9]*")] == ["0_optimizer.lr-0.5"]
    (line,) = command(RECORD, *sweeper, "optimizer.lr=interval(0.1,1)", "hydra.sweep.dir=third").err.splitlines()
    assert "RuntimeError in hydra_plugins: no value to climb by. Correct the value or the hydra.* option" in line


def test_error_of_a_job_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("not finite", 3)))
    assert (str(error), error.row) == ("not finite", 3)


def test_late_user_error_is_one_line_and_keeps_only_a_folder_with_results(command: Command, tmp_path: Path) -> None:
    result = command(task(fail), "hydra.run.dir=run")
    first = "run folder: run; loading libraries\n"
    assert (result.status, result.out, result.err) == (2, first, "error: late, but clear\n")
    assert list(tmp_path.iterdir()) == []
    result = command(task(fail_after_a_write), "hydra.run.dir=run")
    assert (result.status, result.err) == (2, "error: late, but clear\n")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {".hydra", "solrl_lightning.log", "summary.json"}
    assert "UserError: late, but clear" in (tmp_path / "run" / "solrl_lightning.log").read_text(encoding="utf-8")


def test_failed_job_of_a_sweep_does_not_stop_the_others(command: Command, tmp_path: Path) -> None:
    result = command(task(fail_with_the_first_seed), "-m", "seed=1,2", "hydra.sweep.dir=sweep")
    assert result.status == 2
    message, job = result.err.splitlines()
    assert message == "error: not with seed 1" and "'seed=1'" in job  # Hydra's words
    assert sorted(file.name for file in (tmp_path / "sweep").iterdir()) == ["1_seed-2", "multirun.yaml"]


def test_messages_between_libraries_are_hidden(command: Command) -> None:
    result = command(task(chatter))
    assert not any(word in result.out + result.err for word in ("between", "dirpath", "srun"))
    assert "for all" in result.out + result.err


def test_bug_keeps_its_traceback(command: Command) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        command(task(break_down))


@pytest.mark.parametrize("function", [stop, stop_in_lightning])
def test_ctrl_c_ends_with_status_130_and_no_folder(command: Command, function: Callable[[Run], None]) -> None:
    interrupts = signal.getsignal(signal.SIGINT)
    result = command(task(function))
    signal.signal(signal.SIGINT, interrupts)  # Lightning ignores further ones from then on
    assert result.status == 130
    assert result.err.endswith("interrupted\n")
    assert not list(Path("outputs").glob("*/*"))


def test_ctrl_c_before_the_options_are_read(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """When Hydra has made the folder, which it no longer knows after the job."""
    monkeypatch.setattr("solrl_lightning.__main__.record_digests", stop)
    result = command("experiment=smoke")
    assert (result.status, result.err) == (130, "interrupted\n")
    assert not list(Path("outputs").glob("*/*"))


def test_error_about_a_file_whose_name_is_no_text_is_in_the_log(command: Command) -> None:
    command(task(miss_a_file), "hydra.run.dir=run")
    assert "no file caf\\udce9" in Path("run/solrl_lightning.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["run", "it's a, (run) = [1]"])
def test_ctrl_c_prints_the_command_that_resumes(command: Command, tmp_path: Path, name: str) -> None:
    quoted_name = name.replace("'", "\\'")
    result = command(task(stop_after_a_checkpoint), f"hydra.run.dir='{quoted_name}'")
    *_, last = result.err.splitlines()
    program, words = last.split("python -m solrl_lightning ")
    assert (result.status, program) == (130, "resume with: ")
    assert command(RECORD, *shlex.split(words), "iterations=7").status == 0
    assert config(tmp_path / name)["iterations"] == 7


def leave(cfg: Run) -> None:
    sys.exit(0)


def test_a_run_that_its_own_code_leaves_has_failed(command: Command) -> None:
    result = command(task(leave))
    assert (result.status, result.err) == (1, "error: sys.exit(0) ended the run\n")


def test_ctrl_c_works_where_the_shell_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(interrupts, "_HANDLER", signal.SIG_IGN)
    try:
        interrupts.restore()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


# Errors before anything is written; test_malformed.py has command lines whose messages are those of libraries


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("model.init_lora=nowhere", "model.init_lora=nowhere is invalid: it must be a LoRA file, or a folder with"),
        ("task=generate task.prompts=[a] task.base=false", "this task takes trained weights. Set ckpt=<file>, or"),
        ("task=compare", "outputs/multirun/*/*"),
        ("task=audit task.proxies=[{sampler:shadow,steps:2,precision:fp3}]", "There is no precision named 'fp3'"),
        ("iterations=4,5", "gives several values. Add -m for a run of each.\n"),
        ("optimizer.betas=0.9,0.95", "each, or write 'optimizer.betas=[0.9,0.95]' for a list.\n"),
        ("task=generate task.prompts=[a] task.seeds=1,2", "each, or write 'task.seeds=[1,2]' for a list.\n"),
        ("model.lora.target_modules=to_q,to_k", "each, or write 'model.lora.target_modules=[to_q,to_k]' for a list.\n"),
        ("old_policy.decay_type=3", "error: old_policy.decay_type=3 with start=None"),
        ("reward=shapes,http", "each, or write 'reward=[shapes,http]' for one run of them together.\n"),
        ("family=sol_rl,race", "gives several values. Add -m for a run of each.\n"),
        (
            "task=generate 'task.prompts=a cat, left'",
            "each, or quote a text that has a comma: \"task.prompts='a cat, left'\".\n",
        ),
        (
            "'+logger.a={_target_:b.C,name:x;y,save_dir:~/z,version:null}'",
            f"A text with ';' needs quotes that survive the shell: "
            f'\'+logger.a={{_target_:b.C,name:"x;y",save_dir:"{Path.home()}/z",version:null}}\'.',
        ),
        ("'reward.vlm.answers={yes:~,no:0}'", "survive the shell: 'reward.vlm.answers={yes:null,no:0}'."),
        ("'model.lora.target_modules=[to_q'", "each [ needs a ], or the whole text quotes."),
        ("~optimizer.lr", "optimizer.lr, which is missing. Leave out what removes it, or give "),
        ("'family=glob([pr]*,exclude=pre*)'", 'survive the shell: \'family=glob("[pr]*",exclude="pre*")\'.'),
        ("task.runs=[ab]*", "A text with '[' needs quotes that survive the shell: 'task.runs=\"[ab]*\"'."),
        (
            "'seed=${oc.decode:${oc.env:NOPE,\"[1,2]\"}}'",
            """survive the shell: 'seed="${oc.decode:${oc.env:NOPE,'"'"'[1,2]'"'"'}}"'.""",
        ),
        ('"seed=\\"${oc.decode:\'[\'}\\""', "seed is invalid: the text that its ${...} gives"),
        ("'data.train=a b=c'", "A text with '=' needs quotes that survive the shell: 'data.train=\"a b=c\"'."),
        ("iterations..x=3", "Cannot read 'iterations..x=3': its key must be names with dots between them"),
        ("''=1", "Cannot read '=1': its key must be names"),
        ("\"'optimizer.lr=1e-4'\"", "no shell has read its outer quotes. Write optimizer.lr=1e-4.\n"),
        ('"\'task.prompts=[\\"a cat\\"]\'"', 'no shell has read its outer quotes. Write task.prompts=["a cat"].\n'),
        ("\u201citerations=1\u201d", "its quotes are from a word processor. Write iterations=1.\n"),
        ("'data.train=\u201ca b.txt\u201d'", "a word processor. Write 'data.train=\"a b.txt\"'.\n"),
        ("\u2013m seed=1,2", "its dashes are from a word processor. Write -m.\n"),
        ("\u2014help", "its dashes are from a word processor. Write --help.\n"),
        (
            '\'+reward.vlm.answers={"very good":1,"bad":0}\'',
            "have no quotes here. Write '+reward.vlm.answers={very good:1,bad:0}'.",
        ),
        (
            '\'+reward.vlm.answers={"是":1,"否":0}\'',
            "keys of a mapping are words in ASCII here. Write the mapping in a file",
        ),
        ('"task.cost={\\"explore\\": 0.25}"', "have no quotes here. Write 'task.cost={explore:0.25}'."),
        ("hydra.run.dir=~/a", f"needs quotes that survive the shell: 'hydra.run.dir=\"{Path.home()}/a\"'."),
        ('"task.prompts=[it\'s]"', 'A text with "\'" needs quotes'),
        ("-m family=sol_rl, prefix", "the shell has split it at a space. Write family=sol_rl,prefix."),
        ("reward=[shapes, pickscore] seed=1", "Write 'reward=[shapes,pickscore]'."),
        ("-m seed=1,2,", "it has a comma or space too many. Write seed=1,2."),
        ("-m family=sol_rl,compile family.keep=24,97", "error: family=sol_rl family.keep=97: family.keep=97 is"),
        ("-m seed=1,2 family.keep=97", "error: seed=1: family.keep=97 is invalid: it must be"),
        ("~trainer", "A run has one trainer"),
        ("family=[sol_rl,prefix]", "A run has one family, no list"),
        ("-m seed=1,1", "The sweep has the run of all its values twice."),
        ("-m 'seed=range(1,3,0)'", "nothing beside it. Write seed=<value>,<value>."),
        ("-m hydra.sweep.dir=.", "hydra.sweep.dir=. is invalid"),
        ("-m 'hydra.sweep.dir=${hydra:job.name}'", "only. Write 'hydra.sweep.dir=${hydra.job.name}', or use"),
        ("'hydra.run.dir=\"~elsewhere/a\"'", "and in its name ~ is no home directory. Name one, such as runs/a, or"),
        ("'seed=int(x)'", "Cannot read 'seed=int(x)': ValueError while evaluating"),
        ("reward=null", "There is no reward named None. The options are aesthetic, "),
        ("reward=[shapes,shapes]", "it names an option twice"),
        ("-m ckpt=last", "so that they do not go with -m, or an experiment that sweeps. Name one file"),
        ("-m ckpt=a.ckpt,b.ckpt", "ckpt=a.ckpt,b.ckpt is invalid: it takes one checkpoint"),
        ("ckpt=auto -m hydra.sweep.dir=x", "ckpt=auto is invalid: it takes one checkpoint"),
        ("run_dir=elsewhere", "sets that key. Leave it out; hydra.run.dir=<folder>"),
        ("++callbacks.summary.hparams.pool=3", "hparams.pool=3 is invalid: the program sets that key. Leave it out; "),
        ("task=evaluate task.reads=[]", "task.reads=[] is invalid: the program sets that key."),
        ("hydra.output_subdir=null", "hydra.output_subdir=null is invalid: a run resumes with the options"),
        ("ckpt=auto", "ckpt=auto is invalid: it needs a folder that the same command finds again"),
        ("task=evaluate ckpt=auto hydra.run.dir=x", "Use ckpt=last or ckpt=best for other tasks"),
        ("ckpt=best", "ckpt=best is invalid: no run with checkpoints/best.ckpt is in the record of those"),
    ],
)
def test_wrong_command_line_is_one_message_and_writes_nothing(command: Command, arguments: str, message: str) -> None:
    assert message in error_of(command, *shlex.split(arguments))


@pytest.mark.parametrize("trace", ["summary.json", "checkpoints/", "tensorboard/", ".hydra/"])
def test_folder_that_holds_a_run_is_an_error(command: Command, tmp_path: Path, trace: str) -> None:
    (tmp_path / "old" / "checkpoints" if trace == "checkpoints/" else tmp_path / "old").mkdir(parents=True)
    path = tmp_path / "old" / trace
    path.mkdir(exist_ok=True) if trace.endswith("/") else path.write_text("{}", encoding="utf-8")
    message = error_of(command, "hydra.run.dir=old")
    assert f"already holds a run ({path.name})" in message and "no checkpoint in it" in message
    (tmp_path / "old" / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "old" / "checkpoints" / "best.ckpt").touch()
    if trace != ".hydra/":  # a copy without the record, from which no run resumes
        assert "move or remove it" in error_of(command, "hydra.run.dir=old")
    (tmp_path / "old" / ".hydra").mkdir(exist_ok=True)
    assert "ckpt=old/checkpoints/best.ckpt; checkpoints/last.ckpt is missing" in error_of(command, "hydra.run.dir=old")
    (tmp_path / "old" / "checkpoints" / "last.ckpt").touch()
    message = error_of(command, "hydra.run.dir=old")
    assert "task=train ckpt=last hydra.run.dir=old, or take its weights into another with ckpt=old/check" in message


def test_folder_that_holds_a_sweep_is_an_error(command: Command) -> None:
    assert command(RECORD, "-m", "seed=1,2", "hydra.sweep.dir=sweep").status == 0
    for job in ("0_seed-1", "1_seed-2"):
        Path("sweep", job, "summary.json").write_text(json.dumps({"status": "failed"}))
    message = error_of(command, RECORD, "-m", "seed=3,4", "hydra.sweep.dir=sweep")
    assert "already holds a sweep" in message and "ckpt=last hydra.run.dir=sweep/0_seed-1." in message
    ended = json.dumps({"status": "completed", "final_reward": 1.0, "config": {}, "evaluations": []})
    for job, fix in (("0_seed-1", "sweep/1_seed-2."), ("1_seed-2", "sweep/0_seed-1 iterations=<number>.")):
        Path("sweep", job, "summary.json").write_text(ended)
        assert f"ckpt=last hydra.run.dir={fix}" in error_of(command, RECORD, "-m", "seed=3,4", "hydra.sweep.dir=sweep")


def test_error_names_the_damage_of_a_checkpoint(command: Command, tmp_path: Path) -> None:
    (tmp_path / "best.ckpt").touch()
    for content, fault in ((b"PK", "Take ckpt=best.ckpt, or start"), (POINTER, "cut.ckpt is a pointer of git-lfs")):
        (tmp_path / "cut.ckpt").write_bytes(content)
        assert fault in error_of(command, "ckpt=cut.ckpt")
    (tmp_path / "lora.safetensors").touch()
    fix = "If it is a LoRA, set model.init_lora=lora.safetensors in place of ckpt"
    assert fix in error_of(command, "ckpt=lora.safetensors")
    for folder in ("run/checkpoints", "run/.hydra"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("[]")
    for file, rule in {
        "run/checkpoints/weights.pt": "the checkpoint of a training run has",
        "moved.ckpt": "training resumes with the recorded options",
    }.items():
        torch.save({"weight": torch.zeros(3)}, tmp_path / file)
        assert f"ckpt={file} is invalid: {rule}" in error_of(command, f"ckpt={file}")
    (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "run" / "lora").mkdir()
    (tmp_path / "run" / "lora" / "adapter_model.safetensors").touch()
    for path, fix in {
        "run": "Use ckpt=run/checkpoints/last.ckpt.",
        "run/checkpoints": "Use ckpt=run/checkpoints/last.ckpt.",
        "run/checkpoints/lost.ckpt": "Use ckpt=run/checkpoints/last.ckpt.",
        "run/lora": "set model.init_lora=run/lora in place of ckpt.",
        "nowhere": "Name a checkpoint file, or use ckpt=last.",
    }.items():
        message = error_of(command, f"ckpt={path}")
        assert message.startswith(f"error: ckpt={path} is invalid: ") and message.strip().endswith(fix)


def test_run_in_progress_without_a_checkpoint_is_in_use(command: Command, tmp_path: Path) -> None:
    with claimed(tmp_path / "run", new=True):
        assert "in use" in error_of(command, "ckpt=last", "hydra.run.dir=run")
    assert "there is no run. Name the folder of a" in error_of(command, "ckpt=last", "hydra.run.dir=run")
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("[seed=3, 'data.train=a b.txt']")
    rule = "is no run's folder, as it has no .hydra. Name the folder of a run with hydra.run.dir, such as run.\n"
    assert error_of(command, "ckpt=last", "hydra.run.dir=.").endswith(rule)
    message = error_of(command, "ckpt=last", "hydra.run.dir=run")
    assert message.endswith("Begin it again with seed=3 'data.train=a b.txt' ckpt=auto hydra.run.dir=run.\n")


@pytest.mark.parametrize("ckpt", ["last", "auto"])
def test_a_run_whose_checkpoints_were_removed_keeps_its_results(command: Command, tmp_path: Path, ckpt: str) -> None:
    (tmp_path / "run" / "lora").mkdir(parents=True)
    for fix in ("set model.init_lora=run/lora in place of ckpt.\n", "with ckpt=run/checkpoints/best.ckpt.\n"):
        message = error_of(command, f"ckpt={ckpt}", "hydra.run.dir=run")
        assert "run has trained, and its checkpoints/last.ckpt was removed" in message and message.endswith(fix)
        (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "run" / "checkpoints" / "best.ckpt").touch()
    facts = {"status": "completed", "final_reward": 1, "config": {}, "evaluations": [], "last_checkpoint_iterations": 2}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(facts))
    assert "last.ckpt was removed" in error_of(command, f"ckpt={ckpt}", "hydra.run.dir=run")


def test_a_run_begins_with_a_checkpoint_or_with_a_lora(command: Command, tmp_path: Path, earlier: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "lora.safetensors")
    for line in (["ckpt=last"], ["ckpt=last", f"hydra.run.dir={earlier}"], ["ckpt=last", "task=evaluate"]):
        message = error_of(command, RECORD, *line, "model.init_lora=lora.safetensors", "iterations=4")
        assert "model.init_lora=lora.safetensors is invalid: the weights come from ckpt=" in message
    first = (RECORD, "model.init_lora=lora.safetensors", "iterations=2", "hydra.run.dir=begun")
    assert command(*first).status == 0
    assert command(*first, "ckpt=last", "iterations=4").status == 0


# Resuming


@pytest.fixture
def earlier(command: Command, tmp_path: Path) -> Path:
    """A run of two iterations with some overrides."""
    assert command(RECORD, "family=compile", "iterations=2", "seed=5").status == 0
    return only(tmp_path, "outputs/train/*")


def test_last_run_resumes_in_its_folder_with_its_overrides(command: Command, tmp_path: Path, earlier: Path) -> None:
    result = command(RECORD, "ckpt=last", "iterations=4")
    assert result.status == 0
    assert f"family=compile iterations=2 seed=5; overridden here: {RECORD} iterations=4" in result.out
    assert command(RECORD, "ckpt=last", "iterations=6").status == 0
    assert list(tmp_path.glob("outputs/train/*")) == [earlier]
    cfg = config(earlier)
    assert (cfg["iterations"], cfg["seed"], cfg["family"]["regenerate"]["sampler"]) == (6, 5, "merged")
    assert cfg["ckpt"] == str(earlier / "checkpoints" / "last.ckpt")


@pytest.mark.usefixtures("earlier")
def test_finished_job_of_a_sweep_resumes_only_by_its_name(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, "-m", "seed=8,9").status == 0
    newest = only(tmp_path, "outputs/multirun/*/1_seed-9")
    message = error_of(command, RECORD, "ckpt=last", "iterations=7")
    assert f"the newest run, {newest}, is a job of a sweep" in message and f"hydra.run.dir={newest}, or" in message
    assert command(RECORD, "ckpt=last", "task=audit").status == 0
    assert command(RECORD, "ckpt=last", f"hydra.run.dir={newest}", "iterations=7").status == 0
    assert (config(newest)["iterations"], config(newest)["seed"]) == (7, 9)
    (newest / "summary.json").unlink()  # a killed one
    assert command(RECORD, "ckpt=last", "iterations=8").status == 0
    assert config(newest)["iterations"] == 8


def test_job_of_an_experiment_that_sweeps_resumes_alone(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine" / "experiment" / "seeds.yaml"
    file.parent.mkdir(parents=True)
    file.write_text('# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {seed: "8,9"}}}\n')
    start = (RECORD, "--config-dir", "mine", "experiment=seeds")
    assert command(*start).status == 0
    job = only(tmp_path, "outputs/multirun/*/1_seed-9")
    assert command(RECORD, "ckpt=last", f"hydra.run.dir={job}", "iterations=7").status == 0
    assert (config(job)["iterations"], config(job)["seed"]) == (7, 9)
    assert command(RECORD, f"ckpt={job}/checkpoints/last.ckpt", "iterations=8", "hydra.run.dir=branch").status == 0
    assert (config(tmp_path / "branch")["iterations"], config(tmp_path / "branch")["seed"]) == (8, 9)
    assert len(list(tmp_path.glob("outputs/multirun/*/*/record.json"))) == 2
    message = error_of(command, *start, "ckpt=auto", "hydra.run.dir=again", "seed=8")
    assert "ckpt=last and ckpt=auto continue one run" in message and not (tmp_path / "again").exists()


def test_task_of_an_experiment_gets_a_folder_as_the_task_of_a_command(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    file = tmp_path / "mine" / "experiment" / "look.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\ndefaults: [override /task: audit, _self_]\nmodel: {full_steps: 8}\n")
    look = (RECORD, "--config-dir", "mine", "experiment=look")
    assert command(*look, "ckpt=last").status == 0
    assert config(only(tmp_path, "outputs/audit/*"))["ckpt"] == str(earlier / "checkpoints" / "last.ckpt")
    assert "Use ckpt=last or ckpt=best for other tasks" in error_of(command, *look, "ckpt=auto", "hydra.run.dir=x")
    assert command(RECORD, "experiment=smoke", "hydra.run.dir=small").status == 0
    out = command(*look, "ckpt=small/checkpoints/last.ckpt").out
    assert "experiment=look (in place of experiment=smoke; experiment=[smoke,<other>] has both)" in out


def test_newest_run_is_found_wherever_it_lies(
    command: Command, tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        assert command(RECORD, "seed=3", f"hydra.run.dir=runs/{name}").status == 0
    shutil.rmtree(tmp_path / "runs" / "c")
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "elsewhere"):  # where no run was started
        monkeypatch.chdir(folder)
        out = command(RECORD, "ckpt=last", "task=audit").out
        assert "from " + str(tmp_path / "runs" / "b") in out
        assert ("(no run was started in this folder; it is the newest on this machine)" in out) == (folder != tmp_path)
    assert command(RECORD, "seed=4").status == 0
    started_here = only(tmp_path, "elsewhere/outputs/train/*")
    shutil.copytree(started_here, f"{started_here}_backup", copy_function=shutil.copy)  # with new times, as by cp -r
    (tmp_path / "runs" / "b" / "checkpoints" / "last.ckpt").touch()
    assert f"{started_here.name}/" in command(RECORD, "ckpt=last", "iterations=9").out
    assert "the newest run, outputs" in error_of(command, RECORD, "ckpt=best", "iterations=9", "hydra.run.dir=new")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")  # a record that can be neither read nor written
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "train").rename(tmp_path / "moved")
    (tmp_path / "outputs" / "train").symlink_to(tmp_path / "moved")
    (tmp_path / "moved" / earlier.name / "checkpoints" / "last.ckpt").touch()
    done = command(RECORD, "ckpt=last", "iterations=11")
    assert done.status == 0 and "'/proc/none'): ckpt=last finds this run with hydra.run.dir=" in done.out
    assert config(tmp_path / "moved" / earlier.name)["iterations"] == 11


def test_resume_elsewhere_says_where_a_relative_path_is(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a set.txt").write_text("a cat\na dog\n")
    of_set = [RECORD, "data.train='a set.txt'", "prompts_per_iteration=1"]
    assert command(*of_set, "hydra.run.dir=run").status == 0
    again = [RECORD, "ckpt=last", f"hydra.run.dir={tmp_path}/run", "iterations=40"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    message = error_of(command, *again)
    assert message.endswith(f"The run began in {tmp_path}, where 'a set.txt' is: run cd {tmp_path} first.\n")
    assert "is: run cd" not in error_of(command, *of_set)
    assert "is: run cd" not in error_of(command, *again[:-1], "iterations=0"), "an error of something else"
    monkeypatch.chdir(tmp_path)
    assert command(*again).status == 0


def test_python_without_docstrings_is_an_error(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2, verbose=0))
    assert error_of(command, RECORD).startswith("error: PYTHONOPTIMIZE=2 (python -OO) is invalid")


AUTO = [RECORD, "ckpt=auto", "hydra.run.dir=runs/${hydra:runtime.choices.family}/${seed}", "seed=3"]


def test_auto_begins_a_run_or_continues_it(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "sol_rl" / "3"
    first = command(*AUTO, "iterations=2")
    assert first.status == 0, first.err
    assert "ckpt=auto: runs/sol_rl/3 has no checkpoint, so the run begins\n" in first.out
    assert config(folder)["ckpt"] is None
    continued = command(*AUTO, "iterations=2")
    assert continued.status == 0, continued.err
    last = folder / "checkpoints" / "last.ckpt"
    assert config(folder)["ckpt"] == str(last)
    assert list(folder.parent.iterdir()) == [folder]
    last.unlink()  # then the same command begins again, also with what a resume may change
    assert "already holds a run" in error_of(command, *AUTO, "optimizer.lr=0.1")
    again = command(*AUTO, "iterations=3", "evaluation.every=2")
    assert again.status == 0 and config(folder)["ckpt"] is None, again.err


def test_a_branch_without_a_checkpoint_begins_again_with_its_parent_s(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    parent = earlier / "checkpoints" / "last.ckpt"
    (tmp_path / "branch" / ".hydra").mkdir(parents=True)
    (tmp_path / "branch" / ".hydra" / "hydra.yaml").write_text("hydra: {}")
    (tmp_path / "branch" / ".hydra" / "overrides.yaml").write_text(json.dumps(["seed=3", f"ckpt='{parent}'"]))
    message = error_of(command, "ckpt=last", "hydra.run.dir=branch")
    assert message.endswith(f"Begin it again with seed=3 \"ckpt='{parent}'\".\n")
    assert "already holds a run" in error_of(command, RECORD, "seed=3", "ckpt=auto", "hydra.run.dir=branch")
    resumed = tmp_path / "branch" / "checkpoints" / "last.ckpt"  # of a run that has resumed in its folder
    for start in (f"ckpt='{resumed}'", "ckpt=null"):
        (tmp_path / "branch" / ".hydra" / "overrides.yaml").write_text(json.dumps(["seed=3", start]))
        message = error_of(command, "ckpt=last", "hydra.run.dir=branch")
        assert message.endswith("Begin it again with seed=3 ckpt=auto hydra.run.dir=branch.\n")
    failed = command(task(server_is_down), f"ckpt={parent}", "hydra.run.dir=down")
    assert f"server, then remove {tmp_path}/down and give the same command again." in failed.err
    failed = command(task(server_is_down), "hydra.run.dir=up")
    assert f"server, then give the same command again with ckpt=auto hydra.run.dir={tmp_path}/up." in failed.err


def test_auto_begins_again_what_had_no_overrides(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("[]")
    line = error_of(command, "ckpt=last", "hydra.run.dir=run")
    assert line.endswith("Begin it again with ckpt=auto hydra.run.dir=run.\n")
    with ConfigTree() as tree:
        assert resume(tree, ["ckpt=auto", "hydra.run.dir=run"], False).folder == tmp_path / "run"


def test_auto_does_nothing_for_a_finished_run(command: Command, tmp_path: Path) -> None:
    assert command(*AUTO, "iterations=1").status == 0
    before = files_of(tmp_path)
    again = command(*AUTO, "iterations=1")
    assert (again.status, again.err) == (0, "") and "has ended after 1 iteration; nothing to do" in again.out
    assert files_of(tmp_path) == before
    stopped = {"status": "stopped early", "iterations": 1, "final_reward": 0.5, "evaluations": [], "config": {}}
    (tmp_path / "runs" / "sol_rl" / "3" / "summary.json").write_text(json.dumps(stopped), encoding="utf-8")
    assert "nothing to do" in command(*AUTO, "iterations=9").out


def test_checkpoint_begins_a_new_folder_or_another_task_with_the_overrides_of_its_run(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    last, best = (earlier / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    best.write_bytes(last.read_bytes())
    before = (earlier / "record.json").read_bytes()
    for arguments, folder, file, seed in (
        (["ckpt=best", "iterations=4", "hydra.run.dir=branch"], "branch", best, 5),
        (["ckpt=best", "task=audit", "hydra.run.dir=audited"], "audited", best, 5),
        ([f"ckpt={last.relative_to(tmp_path)}", "seed=6", "hydra.run.dir=other"], "other", last, 6),
        (["ckpt=last", "task=audit"], "outputs/audit/*_tiny_compile_shapes", last, 5),
    ):
        best.touch()  # the newest run
        done = command(*arguments, RECORD)
        assert done.status == 0, done.err
        cfg = config(only(tmp_path, folder))
        assert (cfg["ckpt"], cfg["seed"], cfg["family"]["pool"]) == (str(file), seed, 96)
    best.touch()
    assert "already holds a run" in error_of(command, RECORD, "ckpt=best", "iterations=4", f"hydra.run.dir={earlier}")
    assert (earlier / "record.json").read_bytes() == before


def test_checkpoints_behind_a_link_belong_to_the_run_that_has_the_link(earlier: Path, tmp_path: Path) -> None:
    last = earlier / "checkpoints" / "last.ckpt"
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.ckpt").symlink_to(last)
    (tmp_path / "chain.ckpt").symlink_to("link.ckpt")
    (tmp_path / "folder").symlink_to(last.parent)
    for link in ("link.ckpt", "chain.ckpt", "folder/last.ckpt"):
        assert run_of(tmp_path / link) == earlier
    for place in (last.parent, last):
        place.rename(tmp_path / "disk" / place.name)
        place.symlink_to(tmp_path / "disk" / place.name)
        assert recorded_contents(last) == (1, 0.0)
        whole = (earlier / "summary.json").read_text()
        (earlier / "summary.json").write_text(whole.replace('"iterations": 1', '"iterations": "1"'))
        assert recorded_contents(last) is None
        (earlier / "summary.json").write_text(whole)
        assert run_of(tmp_path / "chain.ckpt") == earlier
        for arguments, folder in (
            (["ckpt=last", f"hydra.run.dir={earlier}"], earlier),
            ([f"ckpt={last}", "task=evaluate"], None),
        ):
            with ConfigTree() as tree:
                resumed = resume(tree, arguments, multirun=False)
            assert "seed=5" in resumed.arguments and resumed.folder == folder


def test_task_on_a_run_with_shards_has_no_shards(earlier: Path, tmp_path: Path) -> None:
    record = earlier / ".hydra" / "overrides.yaml"
    record.write_text(f"{record.read_text()}- trainer=fsdp\n- trainer.devices=2\n- iterations=${{seed}}\n")
    last = f"ckpt={earlier / 'checkpoints' / 'last.ckpt'}"
    with ConfigTree() as tree:
        both = [resume(tree, [last, task], False).arguments for task in ("task=evaluate", "hydra.run.dir=branch")]
    assert all("iterations=${seed}" in lines for lines in both)
    assert [[line for line in lines if line.startswith("trainer")] for lines in both] == [
        [],
        ["trainer=fsdp", "trainer.devices=2"],
    ]


@pytest.mark.parametrize(
    ("arguments", "culprits", "changes"),
    [
        ("iterations=4 seed=6", "seed=6", "seed"),
        (
            "family=compile family.pool=16 reward.shapes.weight=2",
            "pool=16 reward.shapes.weight=2",
            "family.pool, reward",
        ),
        ("family=diffusionnft logger=tensorboard", "family=diffusionnft", "family."),
        ("trainer=cpu trainer.gradient_clip_val=3", "trainer.gradient_clip_val=3", "trainer.gradient_clip_val"),
        ("model=flux1 iterations=60", "model=flux1", "model."),
    ],
)
def test_changed_key_is_an_error_on_a_resume(
    command: Command, earlier: Path, arguments: str, culprits: str, changes: str
) -> None:
    message = error_of(command, RECORD, "ckpt=last", *arguments.split())
    assert f"{culprits} changes {changes}" in message and f"Cannot resume {earlier}: " in message
    state = f"a new folder from that state: ckpt=outputs/train/{earlier.name}/checkpoints/last.ckpt"
    way_out = "a run of that model without ckpt:" if "model=flux1" in arguments else state
    assert f"{way_out} {RECORD} {arguments}. " in message


def test_resume_names_a_key_that_an_edited_file_changes(command: Command, earlier: Path) -> None:
    record = earlier / ".hydra" / "config.yaml"
    record.write_text(record.read_text().replace("kl_weight: ${model.kl_weight}", "kl_weight: 7.5"))
    message = error_of(command, RECORD, "ckpt=last", "iterations=4")
    assert "objective.kl_weight=" in message and "is not the 7.5 that the run has recorded" in message


def test_resume_needs_the_environment_that_its_options_read(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_RATE", "0.005")
    assert command(RECORD, 'optimizer.lr="${oc.decode:${oc.env:MY_RATE}}"').status == 0
    earlier = only(tmp_path, "outputs/train/*")
    assert "0.005" not in (earlier / ".hydra" / "digests.json").read_text()  # another one may be a secret
    assert command(RECORD, "ckpt=last", "iterations=3").status == 0
    monkeypatch.setenv("MY_RATE", "0.05")
    message = error_of(command, RECORD, "ckpt=last", "iterations=4")
    assert "optimizer.lr=${oc.decode:${oc.env:MY_RATE}} is 0.05 now, and was another value when the run" in message
    assert command(RECORD, "ckpt=last", "iterations=4", "optimizer.lr=0.005").status == 0
    assert (config(earlier)["optimizer"]["lr"], config(earlier)["iterations"]) == (0.005, 4)


def test_recorded_overrides_may_be_repeated_on_a_resume(command: Command, earlier: Path) -> None:
    same = ["seed=5", "family=compile", "family.pool=96", "data.train=shapes-train", "optimizer.lr=0.002"]
    result = command(RECORD, "ckpt=last", *same, "iterations=3")
    assert result.status == 0
    assert f"the overrides of its run: {RECORD} family=compile iterations=2 seed=5; overridden" in result.out
    assert result.out.endswith("iterations=3; iterations done: 1\n")
    assert config(earlier)["iterations"] == 3


def test_resumable_keys_may_change_on_a_resume(command: Command, earlier: Path) -> None:
    ways = ["model.micro_batch=8", "family.compile=false", "precision.backend=emulated", "trainer=cpu", "~logger"]
    assert command(RECORD, "ckpt=last", *ways, "evaluation.every=7", "data.eval=compositional").status == 0
    cfg = config(earlier)
    assert (cfg["model"]["micro_batch"], cfg["evaluation"]["every"], "logger" in cfg) == (8, 7, False)


OWN = "+callbacks.g={_target_:a.B,x:1}"
EMA = "+callbacks.ema._target_=a.B"


@pytest.mark.parametrize(
    ("of_run", "new", "kept"),
    [
        (OWN, "~callbacks.g", OWN),
        (OWN, "callbacks.g=null", OWN),
        (OWN, "~callbacks.g +callbacks.g={_target_:c.D}", OWN),
        (f"{OWN} callbacks.g.x=2", "~callbacks.g +callbacks.g={_target_:c.D}", f"{OWN} callbacks.g.x=2"),
        (f"+{OWN} ~callbacks.g", "callbacks.g={x:2}", f"+{OWN}"),
        (f"{OWN} ~callbacks.g", OWN, ""),
        (f"{OWN} ~callbacks.g", "+callbacks.g._target_=c.D", ""),
        (f"~callbacks.ema {EMA}", "task=evaluate", f"~callbacks.ema {EMA}"),
        (f"~callbacks.ema {EMA} ~callbacks.ema", EMA, "~callbacks.ema"),
        (f"~callbacks.ema {EMA}", "~callbacks.ema", ""),
        (f"~callbacks.ema {EMA}", "callbacks.ema=null", f"~callbacks.ema {EMA}"),
        (f"~callbacks.ema {EMA}", "callbacks.ema._target_=c.D", f"~callbacks.ema {EMA}"),
        (f"~callbacks.ema {EMA}", "callbacks=early_stopping", f"~callbacks.ema {EMA}"),
        ("~logger", "logger=csv", ""),
        ("logger=[csv,tensorboard] ~logger.csv ~callbacks.ema", "logger=[tensorboard,csv]", "~callbacks.ema"),
        ("reward=[shapes,shapes_strict] ~reward.shapes", "reward=shapes", ""),
        ("callbacks=early_stopping ~callbacks.early_stopping", "callbacks=early_stopping", ""),
        ("callbacks.guard=null", "callbacks.guard.stop=true", ""),
        ("callbacks.early_stopping=null optimizer.lr=1e-3", "callbacks=early_stopping", "optimizer.lr=1e-3"),
        ("~callbacks.guard", "callbacks.guard.stop=true", ""),
        ("~callbacks.guard", "~callbacks.ema", "~callbacks.guard"),
        (f"{OWN} callbacks.g=null", "+callbacks.g={_target_:c.D}", ""),
        ("logger=csv logger.csv.name=a ~logger.csv.prefix", "logger=tensorboard", ""),
        ("logger.tensorboard.name=a", "~logger", ""),
        ("+logger.tensorboard.max_queue=5 logger.tensorboard.max_queue=6", "logger=csv", ""),
        ("+logger.tensorboard.max_queue=5", "logger=[csv,tensorboard]", "+logger.tensorboard.max_queue=5"),
        ("+model.policy.x=1", "model=sd3", "+model.policy.x=1"),
        ("family.explore.steps=3 family.pool=48", "family=naive_scaling", "family.pool=48"),
    ],
)
def test_recorded_override_is_kept_if_its_key_is_there(earlier: Path, of_run: str, new: str, kept: str) -> None:
    OmegaConf.save(OmegaConf.create(of_run.split()), earlier / ".hydra" / "overrides.yaml")
    with ConfigTree() as tree:
        (*lines, _) = resume(tree, [*new.split(), f"ckpt={earlier / 'checkpoints' / 'last.ckpt'}"], False).arguments
        assert lines == [*kept.split(), *new.split()]
        tree.jobs(lines, multirun=False)


@pytest.mark.parametrize(
    ("new", "line"),
    [
        ("fast", "in place of experiment=smoke,selection; experiment=[smoke,selection,<other>] has both"),
        ("[smoke,fast]", "in place of experiment=smoke,selection; "),
        ("[smoke,selection,fast]", None),
    ],
)
def test_line_names_the_experiments_that_another_one_replaces(earlier: Path, new: str, line: str | None) -> None:
    OmegaConf.save(OmegaConf.create(["experiment=[smoke,selection]"]), earlier / ".hydra" / "overrides.yaml")
    with ConfigTree() as tree:
        checkpoint = f"ckpt={earlier / 'checkpoints' / 'last.ckpt'}"
        message = resume(tree, ["hydra.run.dir=new", f"experiment={new}", checkpoint], False).message
    assert line in message if line else "in place of" not in message


def test_failed_resume_keeps_the_record_of_the_run(command: Command, earlier: Path) -> None:
    record = {file.name: file.read_bytes() for file in (earlier / ".hydra").iterdir()}
    for iterations in (40, 50):
        assert command(task(fail), "ckpt=last", f"iterations={iterations}").status == 2
    assert {file.name: file.read_bytes() for file in (earlier / ".hydra").glob("*.yaml")} == record
    assert command(RECORD, "ckpt=last").status == 0
    assert config(earlier)["iterations"] == 2


JUDGE = (
    "{_target_: solrl_lightning.rewards.vlm.VLMReward, url: 'http://a/v1', model: m, concurrency: 2, weight: 1.0, "
    "question: hands, answers: {'yes': 1.0, 'no': 0.0}}"
)


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    """The folder of options "it's mine", with family=small, reward=bright or hands, and experiment=quick."""
    for path, text in {
        "family/small.yaml": "defaults: [diffusionnft]\npool: 6\nkeep: 6\n",
        "reward/bright.yaml": "# @package reward\nbright: {_target_: a.B, weight: 1.0}\n",
        "reward/hands.yaml": f"# @package reward\nhands: {JUDGE}\n",
        "experiment/quick.yaml": "# @package _global_\niterations: 3\n",
    }.items():
        file = tmp_path / "it's mine" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path / "it's mine"


def test_run_resumes_with_the_options_of_its_config_dir(command: Command, tmp_path: Path, config_dir: Path) -> None:
    assert command("--config-dir", "it's mine", RECORD, "family=small", "hydra.run.dir=run").status == 0
    for iterations in (20, 30):
        assert command(RECORD, "ckpt=last", "hydra.run.dir=run", f"iterations={iterations}").status == 0
        cfg = config(tmp_path / "run")
        assert (cfg["family"]["pool"], cfg["iterations"]) == (6, iterations)
    assert command("task=audit", RECORD, "ckpt=run/checkpoints/last.ckpt", "hydra.run.dir=other").status == 0
    assert config(tmp_path / "other")["family"]["pool"] == 6
    config_dir.rename(tmp_path / "moved")
    again = [RECORD, "ckpt=last", "hydra.run.dir=run", "iterations=40"]
    assert "Name their folder with --config-dir <folder>" in error_of(command, *again)
    assert command("--config-dir", "moved", *again).status == 0


@pytest.mark.usefixtures("config_dir")
def test_server_of_a_reward_of_any_name_may_move(command: Command, tmp_path: Path) -> None:
    run = ["--config-dir", "it's mine", RECORD, "reward=hands", "hydra.run.dir=run"]
    assert command(*run, "ckpt=auto").status == 0
    moved = ["iterations=20", "reward.hands.url=http://b/v1", "reward.hands.concurrency=4"]
    assert command(RECORD, "ckpt=last", "hydra.run.dir=run", *moved).status == 0
    assert config(tmp_path / "run")["reward"]["hands"]["url"] == "http://b/v1"
    message = error_of(command, RECORD, "ckpt=last", "hydra.run.dir=run", *moved, "reward.hands.question=feet")
    assert "reward.hands.question=feet changes reward.hands.question. " in message
    for name in ("checkpoints/last.ckpt", "summary.json"):
        (tmp_path / "run" / name).unlink()
    assert command(*run, "ckpt=auto", "reward.hands.url=http://c/v1").status == 0


def choose_small(cfg: Run) -> None:
    """Records a copy of the options with another option of a group."""
    record(with_option(cfg, "family", "small"))


@pytest.mark.usefixtures("config_dir")
def test_job_finds_other_options_in_its_config_dir(command: Command, tmp_path: Path) -> None:
    options = ["--config-dir", "it's mine", task(choose_small)]
    assert command(*options, "family=race", "hydra.run.dir=run").status == 0
    assert command(*options, "-m", "seed=1,2", "hydra.sweep.dir=sweep").status == 0
    for folder in ("run", "sweep/1_seed-2"):
        family = config(tmp_path / folder)["family"]
        assert (family["pool"], family["regenerate"]["steps"]) == (6, 10)
    assert "There is no family named 'small'. The options are compile" in command(task(choose_small)).err


def print_command(cfg: Run) -> None:
    print(command_without_selection(cfg))


@pytest.mark.parametrize("folders", ["--config-dir=it's mine", "hydra.searchpath=[file://empty,file://mine]"])
@pytest.mark.parametrize("chosen", [["task=plan"], ["task=audit", task(print_command)]])
def test_printed_command_finds_options_in_the_folders_of_the_run(
    command: Command, tmp_path: Path, config_dir: Path, chosen: list[str], folders: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").symlink_to(config_dir)
    printed = command(folders, *chosen, "experiment=quick", "hydra.run.dir=run")
    assert printed.status == 0, printed.err
    words = shlex.split(printed.out.rpartition("python -m solrl_lightning ")[2].splitlines()[0])
    assert "experiment=quick" in words
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    composed = command(*words, "--cfg", "job")
    assert composed.status == 0 and "iterations: 3" in composed.out


def test_advice_to_begin_again_names_the_folder_of_options(command: Command, tmp_path: Path, config_dir: Path) -> None:
    assert command("--config-dir", "it's mine", RECORD, "family=small", "hydra.run.dir=run").status == 0
    (tmp_path / "run" / "checkpoints" / "last.ckpt").unlink()
    message = error_of(command, "ckpt=last", "hydra.run.dir=run")
    words = shlex.split(message.rpartition("Begin it again with ")[2].strip().removesuffix("."))
    assert words[0] == f"--config-dir={config_dir}"
    assert command(*words).status == 0


@pytest.mark.usefixtures("config_dir")
def test_rank_of_a_sweep_has_the_options_of_its_config_dir(command: Command, tmp_path: Path) -> None:
    assert command("--config-dir", "it's mine", RECORD, "-m", "family=small", "seed=1,2").status == 0
    arguments = recorded(only(tmp_path, "outputs/multirun/*/0_seed-1"))["argv"]
    assert command(*arguments, "hydra.run.dir=child").status == 0
    assert config(tmp_path / "child")["family"]["pool"] == 6


def test_finished_run_does_not_resume(command: Command) -> None:
    assert command(RECORD, "iterations=1", "hydra.run.dir=run").status == 0
    last, file = ["ckpt=last", "hydra.run.dir=run"], "ckpt=run/checkpoints/last.ckpt"
    for arguments in (last, [file], [*last, "trainer=cpu"]):
        assert "1 iteration. Raise its length, as in iterations=11" in error_of(command, RECORD, *arguments)
    assert command(RECORD, "task=audit", file).status == 0
    summary = Path("run", "summary.json")
    assert recorded_contents(Path("run", "checkpoints", "last.ckpt")) == (1, 0.0)
    os.utime(Path("run", "checkpoints", "last.ckpt"), (2e9, 2e9))  # another file
    assert recorded_contents(Path("run", "checkpoints", "last.ckpt")) is None
    assert command(RECORD, *last, "iterations=2").status == 0
    summary.write_text(summary.read_text().replace("completed", "interrupted"))
    checkpoint = torch.load(Path("run", "checkpoints", "last.ckpt"), weights_only=True)
    torch.save(checkpoint | {"global_step": 7}, Path("run", "checkpoints", "last.ckpt"))
    assert "needs something left to do, and this one has done 7" in error_of(command, RECORD, *last, "iterations=3")


# Ranks that something else starts


def test_further_ranks_join_the_run_of_the_first_and_write_no_record(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    for arguments in (["seed=5"], ["ckpt=last", "iterations=7"]):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        assert command(RECORD, "hydra.run.dir=run", *arguments).status == 0
        of_first_rank = recorded(folder)["argv"]
        written = {file: file.stat().st_mtime_ns for file in (folder / ".hydra").rglob("*")}
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert command(*of_first_rank, f'hydra.run.dir="{folder}"', "hydra.output_subdir=null").status == 0
        assert {file: file.stat().st_mtime_ns for file in (folder / ".hydra").rglob("*")} == written
    assert (config(folder)["iterations"], config(folder)["seed"]) == (7, 5)


def test_each_job_of_a_sweep_by_torchrun_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True)
    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent.port), TORCHELASTIC_USE_AGENT_STORE="True")
    set_all(monkeypatch, TORCHRUN | address | {"RANK": "0"})
    monkeypatch.setattr(launch, "_expired", [])
    ports = []
    try:
        for _ in range(3):
            launch.renew_store()
            ports.append(int(os.environ["MASTER_PORT"]))
            TCPStore("127.0.0.1", ports[-1], is_master=False).set("address", str(ports))
            launch.expire_store()
    finally:
        launch.renew_store.cache_clear()
        launch._store_of_torchrun.cache_clear()
    assert ports[0] == agent.port and len(set(ports)) == 3
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"


SRUN = dict(SLURM_JOB_ID="4711", SLURM_STEP_ID="0", SLURM_JOB_NAME="train", SLURM_LOCALID="0")
SRUN |= dict(SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="2", SLURM_NNODES="2")
BATCH = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
JSRUN, OPEN_MPI, MPICH = {"JSM_NAMESPACE_SIZE": "4"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "4"}
TORCHRUN = dict(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", WORLD_SIZE="4", LOCAL_RANK="0")
OF_RANK_0 = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "solrl_lightning.log"}
ON_TWO_NODES = ["trainer.num_nodes=2", "trainer.devices=2", "trainer=ddp"]


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def files(folder: Path) -> set[str]:
    return {name for name, content in files_of(folder).items() if content is not None}


def test_ranks_of_srun_share_one_folder_that_rank_0_records(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts, suffix in (("0", ""), ("1", "-restart1")):  # SLURM counts how often a job went back to its queue
        folder = tmp_path / "outputs" / "train" / f"slurm-4711.0{suffix}_tiny_sol_rl_shapes"
        for rank in ("3", "0"):
            set_all(monkeypatch, SRUN | {"SLURM_PROCID": rank, "SLURM_RESTART_COUNT": restarts})
            ended = command(task(show_folder), *ON_TWO_NODES)
            assert ended.out.splitlines()[-1] == str(folder)
            assert ("a note of each rank" in ended.out + ended.err) == (rank == "0")
            assert files(folder) == (OF_RANK_0 if rank == "0" else set())
    assert "already holds a run" in error_of(command, task(show_folder), *ON_TWO_NODES)


@pytest.mark.parametrize("changed", [{"SLURM_JOB_NAME": "interactive"}, {"SLURM_NTASKS": "1"}])
def test_commands_one_after_the_other_in_a_slurm_job_have_two_folders(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    set_all(monkeypatch, SRUN | {"SLURM_PROCID": "0"} | changed)
    assert command(RECORD).status == command(RECORD).status == 0
    assert len(list(tmp_path.glob("outputs/train/*"))) == 2


def test_first_rank_of_a_sweep_may_come_last(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = [task(show_folder), *ON_TWO_NODES, "-m", "seed=1,2", "hydra.sweep.dir=sweep"]
    for rank in ("3", "0"):  # Hydra writes multirun.yaml in each
        set_all(monkeypatch, SRUN | {"SLURM_PROCID": rank})
        assert command(*sweep).status == 0
    assert "already holds a sweep (multirun.yaml)" in error_of(command, *sweep)


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        (SRUN | {"SLURM_PROCID": "2"}, False),
        (SRUN | TORCHRUN | {"SLURM_PROCID": "1", "RANK": "0"}, True),  # torchrun numbers its nodes by itself
        (SRUN | TORCHRUN | {"SLURM_PROCID": "0", "RANK": "2"}, False),
        (JSRUN | {"JSM_NAMESPACE_RANK": "2"}, False),
        (SRUN | JSRUN | {"SLURM_PROCID": "2", "JSM_NAMESPACE_RANK": "0"}, False),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, False),
        (MPICH | {"PMI_RANK": "2"}, False),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "LOCAL_RANK": "1"}, False),
    ],
)
def test_first_process_is_rank_0_of_the_launcher_that_lightning_sees(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first: bool
) -> None:
    set_all(monkeypatch, environment)
    assert is_first() == first


SUBPROCESS = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", NODE_RANK="0", LOCAL_RANK="1", WORLD_SIZE="2")
LEFT = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", NODE_RANK="0", LOCAL_RANK="0")  # by Lightning in a first rank
POD = dict(MASTER_ADDR="10.0.0.1", MASTER_PORT="1", WORLD_SIZE="2", RANK="1")  # of a PyTorchJob


@pytest.mark.parametrize(
    ("environment", "ranks", "message"),
    [
        ({}, (1, 2, 0), ""),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (1, 2, 0), ""),
        ({"LOCAL_RANK": "0"}, (1, 1, 0), ""),
        ({"LOCAL_RANK": "0"}, (1, 2, 0), "LOCAL_RANK=0 is invalid here: .* unset these variables: Lightning then"),
        (SUBPROCESS, (1, 2, 1), ""),
        (SUBPROCESS, (1, 1, 0), "WORLD_SIZE=2 NODE_RANK=0 LOCAL_RANK=1 is invalid here: no launcher has started this"),
        (LEFT, (1, 2, 0), "NODE_RANK=0 LOCAL_RANK=0 is .* an earlier command of .* 0. Start each command in a new pro"),
        (POD, (1, 1, 0), "WORLD_SIZE=2 RANK=1 is invalid here: .* the trainer takes 1, .* unset these variables"),
        ({"RANK": "1"}, (1, 1, 0), "RANK=1 is invalid here: no launcher has started this .*, this one for rank 0. St"),
        ({"WORLD_SIZE": "two"}, (1, 1, 0), "WORLD_SIZE=two is invalid: a launcher sets it to a whole number"),
        (SRUN | {"SLURM_PROCID": "3"}, (2, 2, 3), ""),
        (SRUN | {"SLURM_PROCID": "3"}, (1, 1, 0), "=4 SLURM_PROCID=3 is .*.num_nodes=2 trainer.devices=2. Each"),
        (SRUN | {"SLURM_PROCID": "0"}, (4, 1, 0), "the trainer takes 4, .* Set trainer.num_nodes=2 trainer.devices=2."),
        (
            SRUN | {"SLURM_NTASKS": "1"},
            (1, 8, 0),
            "srun has started 1 processes, .* set SLURM_JOB_NAME=interactive SLURM",
        ),
        (SRUN | {"SLURM_NTASKS": "1"}, (1, 1, 0), ""),
        (
            BATCH,
            (2, 2, 0),
            "SLURM_NTASKS=4 is invalid here: this one process is sbatch's script.* Write srun before py",
        ),
        (BATCH | {"SLURM_NTASKS": "1"}, (1, 1, 0), ""),
        (BATCH | TORCHRUN | {"RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (2, 2, 1), ""),
        (SRUN | {"SLURM_JOB_NAME": "interactive"}, (1, 1, 0), ""),
        (TORCHRUN | {"RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (2, 2, 1), ""),
        (TORCHRUN | {"RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 1, 0), "torchrun has started 4 .*.num_nodes=2 tr"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1"}, (1, 4, 0), "takes 4, this one for rank 0. Lightning .* mpi4py."),
    ],
)
def test_ranks_of_the_trainer_are_the_processes_that_were_started(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: tuple[int, int, int], message: str
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)  # Lightning leaves them in a process that has trained on several ranks
    set_all(monkeypatch, environment)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_world(*ranks, is_launched=True)


@pytest.mark.parametrize("name", "audit benchmark compare doctor export generate plan prove serve".split())
def test_tasks_of_one_process_are_not_repeated_by_a_launcher(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    set_all(monkeypatch, TORCHRUN | {"RANK": "0"})
    prompts = ["task.prompts=[a star]"] if name == "generate" else []
    message = error_of(command, f"task={name}", "hydra.run.dir=run", *prompts)
    assert "WORLD_SIZE=4 is invalid here: torchrun has started 4 processes, and this task takes one." in message
    for variable in TORCHRUN:
        monkeypatch.delenv(variable)
    set_all(monkeypatch, BATCH)
    check_alone()
    set_all(monkeypatch, SRUN)
    with pytest.raises(UserError, match="srun has started 4 processes, and this task takes one"):
        check_alone()


def test_tasks_of_srun_in_a_job_that_lightning_takes_for_interactive_are_an_error(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_NAME": "interactive"}
    set_all(monkeypatch, tasks)
    message = error_of(command, "experiment=smoke")
    assert "SLURM_JOB_NAME=interactive is invalid here: srun has started 4 tasks" in message
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    check_launched("runs/${launched:%H}", 1)
    set_all(monkeypatch, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_NAME": "solrl"})
    check_launched("runs/${launched:%H}", 2)


def test_port_of_the_first_rank_that_another_program_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        check_world(1, 1, 0, is_launched=False)
        with pytest.raises(UserError, match=f"MASTER_PORT={port} is invalid: .* Unset it, or set a free port."):
            check_world(1, 2, 0, is_launched=False)
    check_world(1, 2, 0, is_launched=False)


@pytest.mark.parametrize(
    ("environment", "rank", "message"),
    [
        ({"MASTER_ADDR": "10.0.0.1"}, "NODE_RANK", "Name one for all with hydra.run.dir=<folder>"),
        (JSRUN, "JSM_NAMESPACE_RANK", "With mpirun or jsrun the ranks"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "With mpirun or jsrun the ranks"),
        (MPICH, "PMI_RANK", "With mpirun or jsrun the ranks"),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, "RANK", "With torchrun the ranks"),
    ],
    ids=["Lightning", "jsrun", "Open MPI", "MPICH", "torchrun"],
)
def test_ranks_that_cannot_agree_on_a_folder_need_its_name(
    command: Command, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: str, message: str
) -> None:
    set_all(monkeypatch, environment)
    assert message in error_of(command, task(show_folder), *ON_TWO_NODES)
    for number in ("1", "0"):
        monkeypatch.setenv(rank, number)
        assert command(task(show_folder), *ON_TWO_NODES, "hydra.run.dir=run").status == 0
        assert files(Path("run")) == (OF_RANK_0 if number == "0" else set())


@pytest.mark.parametrize(("name", "value"), [("RANK", ""), ("SLURM_PROCID", "none")])
def test_rank_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}={value} is invalid: a launcher sets it to a whole number"):
        check_launched("", 1)


def test_several_nodes_without_a_launcher_are_an_error(command: Command) -> None:
    for folder in ([], ["hydra.run.dir=run"]):
        message = error_of(command, task(show_folder), *ON_TWO_NODES, *folder)
        assert "trainer.num_nodes=2 is invalid here: no launcher" in message and "set trainer.num_nodes=1." in message


# The program as a user starts it


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], SMALL], ids=["help", "run"])
def test_reader_that_closes_the_output_causes_no_message(forks: Forks, tmp_path: Path, arguments: list[str]) -> None:
    ended = forks.run(tmp_path, *arguments, target="cli/closed_output:to_no_reader")
    assert (ended.status, ended.output) == (141, "")


@pytest.mark.slow
def test_run_whose_reader_ends_says_how_to_resume(forks: Forks, tmp_path: Path) -> None:
    """With the summary in its log; a broken pipe of a callback is an error like others."""
    arguments = ("experiment=smoke", "trainer=cpu", "iterations=3", "hydra.run.dir=run")
    ended = forks.run(tmp_path, *arguments, target="cli/closed_output:to_leaving_reader")
    assert ended.status == 141, ended.output
    resume = f"resume with: python -m solrl_lightning ckpt=last hydra.run.dir={tmp_path}/run\n"
    assert ended.output.endswith(f"terminated: nobody reads the output\n{resume}") and "Traceback" not in ended.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert "  status  " in (tmp_path / "run" / "solrl_lightning.log").read_text()
    ended = forks.run(tmp_path, *arguments[:-1], target="cli/closed_output:to_a_reader_and_to_none")
    assert ended.status == 1 and re.search(r'closed_output.py", line \d+, in on_train_epoch_end', ended.output)


@pytest.mark.parametrize(("nodes", "how"), [(1, "python -m solrl_lightning"), (2, "the same launcher, and")])
def test_a_run_of_several_nodes_resumes_by_its_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: int, how: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    _print_stop("terminated", [_Job(tmp_path, nodes > 1)])
    assert capsys.readouterr().err == f"terminated\nresume with: {how} ckpt=last hydra.run.dir={tmp_path}\n"


@pytest.mark.slow
def test_command_without_an_output_runs(forks: Forks, tmp_path: Path) -> None:
    for target in ("to_nowhere", "to_lost_terminal"):
        ended = forks.run(tmp_path, *SMALL, f"hydra.run.dir={target}", target=f"cli/closed_output:{target}")
        assert ended.status == 0 and "Traceback" not in ended.output, ended.output
        assert (tmp_path / target / "summary.json").is_file()


def test_version_is_printed_beside_the_version_of_hydra(command: Command) -> None:
    ended = command("--version")
    assert (ended.status, ended.out) == (
        0,
        f"solrl_lightning {solrl_lightning.__version__}\nHydra {hydra.__version__}\n",
    )


def test_value_of_a_sweep_is_named_once(command: Command) -> None:
    (line,) = command("-m", "optimizer.lr=0.1,-1").err.splitlines()
    assert line.startswith("error: optimizer.lr=-1 is invalid: it must be a finite number above 0.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--resolve", "ValueError in hydra: The --resolve flag can only be used in conjunction with --cfg or"),
        ("hydra.verbose=5", "hydra.verbose=5 is invalid: it must be true, false, or the name of a logger"),
        (
            "-m hydra.sweeper.max_batch_size=0",
            "cannot use this command line: AssertionError in hydra. Correct the value",
        ),
        ("--seed=3", "--seed=3 is no flag (--hydra-help lists them), and an option has no dashes. Write seed=3, if "),
        ("--local-rank=0", "an option has no dashes. Start the command by torchrun, which adds"),
        ("seed=3 --prompts-per-iteration 4", "Write prompts_per_iteration=<value>, if --help has that key."),
        ("--config-path runs/a/.hydra --config-name config", "--config-name=config is invalid: a run resumes by its"),
    ],
)
def test_flag_of_hydra_that_lacks_something_is_an_error(command: Command, flags: str, message: str) -> None:
    assert message in error_of(command, *flags.split())


@pytest.mark.usefixtures("command")
def test_main_takes_a_list_also_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text: Any = "experiment=smoke seed=1"
    assert main(text) == 2
    assert "it takes a list. Write main(['experiment=smoke', 'seed=1'])." in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    assert main() == 2
    assert "arguments: -f. In a notebook write main([<option>, ...])." in capfd.readouterr().err


def test_a_process_runs_one_command_at_a_time(command: Command) -> None:
    """As in two threads, or in a program of Hydra."""
    with hydra.initialize_config_module("solrl_lightning.conf", version_base="1.3"):
        ended = command("experiment=smoke")
        assert ended.status == 2 and ended.err == (
            "error: A process runs one command at a time, and a command or a program of Hydra runs in this one. Start "
            "another process: python -m solrl_lightning <option> ...\n"
        )
        assert GlobalHydra.instance().is_initialized()


CTRL_C_AT_AN_IMPORT = """
import runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *others):
        if name == "hydra":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("solrl_lightning", run_name="__main__")
"""


def test_ctrl_c_while_libraries_are_loaded_ends_without_a_traceback(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", CTRL_C_AT_AN_IMPORT], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


HEAVY = {"torch", "diffusers", "transformers", "lightning"}


def test_help_reads_like_a_manual_and_loads_no_library(tmp_path: Path) -> None:
    program = [sys.executable, "-X", "importtime", "-m", "solrl_lightning", "--help"]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    headings = ("USAGE", "GROUPS", "COMMON KNOBS", "EXAMPLES", "RESULTS")
    options = ("family: compile, diffusionnft, naive_quant", "ckpt=last")
    knobs = ("  trainer ", "  base_weights ", "  encode_on ")  # for small GPUs
    assert all(part in result.stdout for part in headings + options + knobs)
    assert "???" not in result.stdout and "${" not in result.stdout
    assert HEAVY.isdisjoint(line.rpartition(" ")[2] for line in result.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_backend_of_a_notebook_that_is_not_installed_here_does_not_matter() -> None:
    program = "import solrl_lightning.__main__, matplotlib; print(matplotlib.get_backend())"
    environment = os.environ | {"MPLBACKEND": "module://notebook_backend_of_another_environment"}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True) == "agg\n"


def test_wrong_value_is_an_error_before_libraries_are_loaded(tmp_path: Path) -> None:
    lines = [
        ("famly=sol_rl", "Did you mean family?"),
        ("task=generate", "got neither"),
        ("task=compare", "matches 0 files or folders"),
        ("task=export", "ckpt=last or ckpt=best of the newest run"),
        ("data.train=nowhere.txt", "the prompt source nowhere.txt is invalid"),
        ("family.pool=10", "family.keep=24 is invalid: it must be at most family.pool=10"),
        (
            "trainer=gpu trainer.accelerator=cuda",
            "trainer.accelerator=cuda trainer.devices=1 is invalid: torch finds 0",
        ),
    ]
    program = (
        "import sys\nfrom solrl_lightning.__main__ import main\nfor line in sys.argv[1:]:\n"
        f"    print(main(line.split()), {HEAVY} & set(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *(line for line, _ in lines)],
        cwd=tmp_path,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    printed = result.stderr.splitlines()
    assert all(message in printed[2 * number] for number, (_, message) in enumerate(lines)), result.stderr
    assert printed[1::2] == ["2 set()"] * 6 + ["2 {'torch'}"]
    assert list(tmp_path.iterdir()) == []
