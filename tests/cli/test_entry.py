"""The command line: what a job gets, sweeps, resuming, and what is refused with nothing written."""

import importlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.quantizers.torchao import torchao_quantizer
from hydra.core.plugins import Plugins
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.cli.launch import is_first
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.options.run import Run

Command = Callable[..., Any]


def record(cfg: Run) -> None:
    """A task that writes what it was given, and the checkpoint and summary that a training run would leave."""
    folder = Path(cfg.run_dir)
    spec = sys.modules["__main__"].__spec__
    program = {"name": spec and spec.name, "argv": sys.argv[1:]}
    facts = {"cfg": cfg.tree(), **program, "cwd": os.getcwd()}
    (folder / "record.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "checkpoints").mkdir(exist_ok=True)
    checkpoint = {"pytorch-lightning_version": "2.6", "global_step": 1, "optimizer_states": []}
    checkpoint |= {"state_dict": {}, "callbacks": {}, "loops": {}}
    torch.save(checkpoint, folder / "checkpoints" / "last.ckpt")
    summary = {"status": "completed", "iterations": 1, "final_reward": 0.5, "evaluations": [], "config": {}}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def refuse(cfg: Run) -> None:
    """A task that finds out late that what the user asked for cannot be."""
    try:
        raise UserError("late, but clear")
    except UserError as error:
        raise RuntimeError("instantiating something") from error


def refuse_after_work(cfg: Run) -> None:
    """The same, when it has already written something."""
    (Path(cfg.run_dir) / "summary.json").write_text("{}", encoding="utf-8")
    raise UserError("late, but clear")


def refuse_the_first_seed(cfg: Run) -> None:
    """A task that a sweep cannot do for all of its jobs."""
    if cfg.seed == 1:
        raise UserError("not with seed 1")
    record(cfg)


def halve(cfg: Run) -> float:
    """A task whose outcome a sweeper goes by."""
    record(cfg)
    return cfg.optimizer["lr"] / 2


def negate(cfg: Run) -> float:
    """A task whose outcome is no value to try next."""
    record(cfg)
    return -cfg.optimizer["lr"]


def look(cfg: Run) -> None:
    """A task that leaves nothing."""
    print(cfg.run_dir)


def chatter(cfg: Run) -> None:
    """A task in which libraries say what no user of ours can act on, and what is for all."""
    for logger in (logging.getLogger("torch.utils._pytree"), torchao_quantizer.logger):
        logger.warning("between libraries")
    warnings.warn("The dirpath has changed from 'a' to 'b', therefore", stacklevel=1)
    logging.getLogger("library.of.interest").warning("for all")


def break_down(cfg: Run) -> None:
    """A task with a bug."""
    raise ZeroDivisionError("a bug")


def stop(cfg: Run) -> None:
    """A task that Ctrl-C stops."""
    raise KeyboardInterrupt


def stop_in_lightning(cfg: Run) -> None:
    """The same inside Lightning's trainer, which catches it and exits."""
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[StopAtOnce()]
    )
    trainer.fit(BoringModel())


class StopAtOnce(Callback):
    def setup(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def task(function: Callable[[Run], None]) -> str:
    """The argument that puts ``function`` in the place of the chosen task."""
    return f"task._target_={__name__}.{function.__name__}"


RECORD = task(record)


def recorded(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


# A run


def test_job_gets_the_resolved_configuration_in_a_folder_of_its_own(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, "family=diffusionnft", "iterations=3").status == 0
    folder = only(tmp_path, "outputs/train/*_tiny_diffusionnft_shapes")
    facts = recorded(folder)
    assert facts["cwd"] == str(tmp_path)
    assert facts["cfg"]["run_dir"] == str(folder)
    assert facts["cfg"]["trainer"]["max_epochs"] == 3
    assert facts["cfg"]["callbacks"]["checkpoint"]["dirpath"] == str(folder / "checkpoints")
    assert OmegaConf.load(folder / ".hydra" / "overrides.yaml") == [RECORD, "family=diffusionnft", "iterations=3"]


def test_two_runs_of_one_second_have_two_folders(command: Command, tmp_path: Path) -> None:
    assert command(RECORD).status == command(RECORD).status == 0
    assert len(list(tmp_path.glob("outputs/train/*"))) == 2


def test_sweep_runs_every_combination_in_its_own_folder(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, "-m", "family=sol_rl,diffusionnft", "seed=1,2", "iterations=5").status == 0
    folders = sorted(folder.name for folder in tmp_path.glob("outputs/multirun/*/[0-9]*"))
    assert folders == [
        "0_family-sol_rl_seed-1",
        "1_family-sol_rl_seed-2",
        "2_family-diffusionnft_seed-1",
        "3_family-diffusionnft_seed-2",
    ]
    facts = recorded(only(tmp_path, "outputs/multirun/*/3_*"))
    assert (facts["cfg"]["seed"], facts["cfg"]["family"]["pool"], facts["cfg"]["iterations"]) == (2, 24, 5)


def test_process_started_from_a_sweep_repeats_its_own_job_only(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, "-m", "seed=1,2").status == 0
    facts = [recorded(folder) for folder in sorted(tmp_path.glob("outputs/multirun/*/[0-9]*"))]
    assert [fact["argv"] for fact in facts] == [[RECORD, "seed=1"], [RECORD, "seed=2"]]
    assert {fact["name"] for fact in facts} == {"solrl_lightning.__main__"}  # not that of a launcher


SWEEPER = """
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Climber(Sweeper):
    def setup(self, **given):
        self.config, self.launcher = given["config"], Plugins.instance().instantiate_launcher(**given)

    def sweep(self, arguments):
        value = 0.5
        for number in range(2):
            job = [f"optimizer.lr={value}" if "interval" in argument else argument for argument in arguments]
            (done,) = self.launcher.launch([job], initial_job_idx=number)
            value = done.return_value
"""


@pytest.fixture
def sweeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that choose a sweeper of another package: 0.5 first, then what came of that."""
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "climber.py").write_text(SWEEPER, encoding="utf-8")
    (tmp_path / "own" / "hydra" / "sweeper").mkdir(parents=True)
    file = tmp_path / "own" / "hydra" / "sweeper" / "climber.yaml"
    file.write_text("_target_: hydra_plugins.climber.Climber\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    Plugins.instance().register(importlib.import_module("hydra_plugins.climber").Climber)  # Hydra looks once a process
    return ["--config-dir", "own", "-m", "hydra/sweeper=climber", "hydra.sweep.dir=sweep"]


def test_another_sweeper_chooses_by_what_the_jobs_return(command: Command, tmp_path: Path, sweeper: list[str]) -> None:
    assert command(task(halve), *sweeper, "optimizer.lr=interval(0.1,1)", "seed=3").status == 0
    folders = sorted((tmp_path / "sweep").glob("[0-9]*"))
    assert [folder.name for folder in folders] == ["0_optimizer.lr-0.5", "1_optimizer.lr-0.25"]
    assert [recorded(folder)["cfg"]["seed"] for folder in folders] == [3, 3]


def test_what_another_sweeper_may_choose_is_checked_before_and_in_its_jobs(
    command: Command, tmp_path: Path, sweeper: list[str]
) -> None:
    assert "Did you mean optimizer.lr?" in refused(command, *sweeper, "optimzer.lr=interval(0.1,1)")
    assert "model.solver=heun is invalid: it must be one of" in refused(
        command, *sweeper, "model.solver=choice(heun,euler)"
    )
    result = command(task(negate), *sweeper, "optimizer.lr=interval(0.1,1)")
    assert result.status == 2
    assert (
        "error: optimizer.lr=-0.5 is invalid: it must be a finite number above 0. Leave it out for the default.\n"
        in result.err
    )
    assert [folder.name for folder in (tmp_path / "sweep").glob("[0-9]*")] == ["0_optimizer.lr-0.5"]


def test_what_ended_a_job_can_be_told_by_another_process() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("not finite", 3)))
    assert (str(error), error.row) == ("not finite", 3)


def test_folder_of_own_options_is_found(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "family").mkdir(parents=True)
    (tmp_path / "mine" / "family" / "small.yaml").write_text(
        "defaults: [diffusionnft]\npool: 6\nkeep: 6\n", encoding="utf-8"
    )
    assert command("--config-dir", "mine", RECORD, "family=small").status == 0
    assert recorded(only(tmp_path, "outputs/train/*_small_*"))["cfg"]["family"]["pool"] == 6


def test_mistake_beside_options_of_own_is_told_by_its_own_name(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "reward").mkdir(parents=True)
    (tmp_path / "mine" / "reward" / "bright.yaml").write_text(
        "# @package reward\nbright: {_target_: a.B, weight: 1.0}\n", encoding="utf-8"
    )
    own = ["--config-dir", "mine", "reward=bright"]
    assert "Did you mean reward.bright.weight" in refused(command, *own, "reward.bright.wait=2")
    assert "There is no key iteration. Did you mean iterations?" in refused(command, *own, "iteration=2")
    assert "Did you mean reward=bright?" in refused(command, "--config-dir", "mine", "reward=brigt")


def test_late_user_error_is_one_message_and_leaves_no_folder(command: Command, tmp_path: Path) -> None:
    for _ in range(2):
        result = command(task(refuse), "hydra.run.dir=run")
        assert (result.status, result.out, result.err) == (2, "", "error: late, but clear\n")
        assert list(tmp_path.iterdir()) == []


def test_user_error_after_a_write_keeps_the_folder_and_its_log(command: Command, tmp_path: Path) -> None:
    result = command(task(refuse_after_work), "hydra.run.dir=run")
    assert (result.status, result.err) == (2, "error: late, but clear\n")
    assert {file.name for file in (tmp_path / "run").iterdir()} == {".hydra", "solrl_lightning.log", "summary.json"}
    assert "UserError: late, but clear" in (tmp_path / "run" / "solrl_lightning.log").read_text(encoding="utf-8")


def test_failed_job_of_a_sweep_does_not_stop_the_others(command: Command, tmp_path: Path) -> None:
    result = command(task(refuse_the_first_seed), "-m", "seed=1,2", "hydra.sweep.dir=sweep")
    assert result.status == 2
    told, which = result.err.splitlines()
    assert told == "error: not with seed 1" and "'seed=1'" in which  # Hydra's words
    assert sorted(file.name for file in (tmp_path / "sweep").iterdir()) == ["1_seed-2", "multirun.yaml"]


def test_messages_between_libraries_are_hidden(command: Command) -> None:
    result = command(task(chatter))
    assert "between libraries" not in result.out + result.err
    assert "for all" in result.out + result.err


def test_bug_keeps_its_traceback(command: Command) -> None:
    with pytest.raises(ZeroDivisionError, match="a bug"):
        command(task(break_down))


@pytest.mark.parametrize("task_function", [stop, stop_in_lightning])
def test_ctrl_c_ends_with_the_status_that_shells_know(command: Command, task_function: Callable[[Run], None]) -> None:
    interrupts = signal.getsignal(signal.SIGINT)
    result = command(task(task_function))
    signal.signal(signal.SIGINT, interrupts)  # Lightning ignores further ones from then on
    assert result.status == 130
    assert result.err.endswith("interrupted\n")
    assert not list(Path("outputs").glob("*/*"))  # nothing was done, so nothing stays


# What is refused, with nothing written


def refused(command: Command, *arguments: str) -> str:
    """The message; asserts that it is one, without a traceback, and that the working folder is as it was."""
    before = {file: file.read_bytes() if file.is_file() else None for file in Path.cwd().rglob("*")}
    result = command(*arguments)
    after = {file: file.read_bytes() if file.is_file() else None for file in Path.cwd().rglob("*")}
    assert result.status == 2
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    assert after == before
    return result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.init_lora=nowhere"], "model.init_lora=nowhere is invalid: it must be a LoRA file of diffusers"),
        (["reward=imagereward", "reward.imagereward.tokenizer=./nowhere"], "it must be a hub id, a local folder"),
        (["task=generate", "task.prompt_file=nowhere.txt"], "the path nowhere.txt does not exist"),
        (["task=generate", "task.prompts=[a cat]", "task.base=false"], "leaves only the trained weights"),
        (["task=compare"], "outputs/multirun/*/*"),
        (["precision.backend=transformer_engine", "trainer=cpu"], "needs an NVIDIA GPU"),
        (["optimizer._target_=torch.optim.SGD"], "unexpected keyword argument 'betas'"),
        (["reward.shape.weight=2"], "Did you mean reward.shapes.weight?"),
        (["iterations=4,5"], "Add -m"),
        (["data.train=a b=c"], "need quotes"),
        (["-m", "family=sol_rl,solrl"], "Did you mean family=sol_rl?"),
        (
            ["-m", "family=sol_rl,compile", "family.keep=24,97"],
            "error: family=sol_rl family.keep=97: family.keep=97 is",
        ),
        (["-m", "seed=1,2", "family.keep=97"], "error: seed=1: family.keep=97 is invalid: it must be"),
        (["-m", "data.eval=shapes-eval,nowhere.txt"], "error: data.eval=nowhere.txt: the prompt source"),
        (["-m", "prompts_per_iteration=2,1000000"], "error: prompts_per_iteration=1000000: prompts_per_iteration=10"),
        (["~trainer"], "A run needs a trainer"),
        (["-m", "ckpt=last"], "does not go with -m"),
        (["-m", "ckpt=a.ckpt,b.ckpt"], "ckpt takes one file"),
        (["run_dir=elsewhere"], "hydra.run.dir=<folder>"),
    ],
)
def test_wrong_command_line_is_one_message_and_writes_nothing(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in refused(command, *arguments)


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"a red circle\nca\xe9"], ids=["empty", "blank", "latin1"])
def test_prompt_file_that_is_empty_or_not_utf8_is_an_error(command: Command, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "prompts.txt").write_bytes(content)
    assert "prompts.txt" in refused(command, "data.train=prompts.txt")


@pytest.mark.parametrize("trace", ["summary.json", "checkpoints", "tensorboard", ".hydra"])
def test_folder_that_holds_a_run_is_an_error(command: Command, tmp_path: Path, trace: str) -> None:
    (tmp_path / "old").mkdir()
    if "." in trace[1:]:
        (tmp_path / "old" / trace).write_text("{}", encoding="utf-8")
    else:
        (tmp_path / "old" / trace).mkdir()
    message = refused(command, "hydra.run.dir=old")
    assert f"already holds a run ({trace})" in message and "no checkpoint in it" in message
    (tmp_path / "old" / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "old" / "checkpoints" / "last.ckpt").touch()
    assert "ckpt=last hydra.run.dir=old" in refused(command, "hydra.run.dir=old")


def test_folder_that_holds_a_sweep_is_an_error(command: Command) -> None:
    assert command(RECORD, "-m", "seed=1,2", "hydra.sweep.dir=sweep").status == 0
    assert "already holds a run" in refused(command, RECORD, "-m", "seed=3,4", "hydra.sweep.dir=sweep")


def test_missing_folder_of_configurations_is_an_error(command: Command) -> None:
    assert "--config-dir must be a folder; there is none at nowhere" in refused(command, "--config-dir", "nowhere")


def test_empty_folder_may_be_given(command: Command, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert command(RECORD, "hydra.run.dir=new").status == 0
    assert recorded(tmp_path / "new")["cfg"]["run_dir"] == str(tmp_path / "new")


def good_checkpoint(file: Path) -> bytes:
    torch.save({"pytorch-lightning_version": "2.6", "state_dict": {"weight": torch.arange(1000.0)}}, file)
    return file.read_bytes()


def test_checkpoint_that_was_cut_short_is_an_error(command: Command, tmp_path: Path) -> None:
    content = good_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt").write_bytes(content[: len(content) // 2])
    assert "damaged or cut short" in refused(command, "ckpt=a.ckpt")


def test_checkpoint_with_a_flipped_bit_is_an_error(command: Command, tmp_path: Path) -> None:
    content = bytearray(good_checkpoint(tmp_path / "a.ckpt"))
    content[content.index(torch.arange(1000.0).numpy().tobytes()) + 400] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    assert "is damaged at" in refused(command, "ckpt=a.ckpt")


def test_file_that_is_no_checkpoint_of_a_run_is_an_error(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("[]")
    (tmp_path / "run" / "checkpoints").mkdir()
    file = "run/checkpoints/weights.pt"
    torch.save({"weight": torch.zeros(3)}, tmp_path / file)
    assert f"ckpt={file} is invalid: the checkpoint of a training run has" in refused(command, f"ckpt={file}")


def test_training_from_a_checkpoint_without_the_record_of_its_run_is_an_error(command: Command, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "moved.ckpt")
    assert "ckpt=moved.ckpt is invalid: training resumes with the recorded options" in refused(
        command, "ckpt=moved.ckpt"
    )


def test_run_in_progress_without_a_checkpoint_is_in_use(command: Command, tmp_path: Path) -> None:
    with claimed(tmp_path / "run", new=True):
        assert "in use" in refused(command, "ckpt=last", "hydra.run.dir=run")
    assert "it was stopped before its first checkpoint" in refused(command, "ckpt=last", "hydra.run.dir=run")


# Going on


@pytest.fixture
def earlier(command: Command, tmp_path: Path) -> Path:
    """A run of two iterations with some overrides."""
    assert command(RECORD, "family=compile", "iterations=2", "seed=5").status == 0
    return only(tmp_path, "outputs/train/*")


def test_last_run_resumes_in_its_folder_with_its_overrides(command: Command, tmp_path: Path, earlier: Path) -> None:
    result = command(RECORD, "ckpt=last", "iterations=4")
    assert result.status == 0
    assert list(tmp_path.glob("outputs/train/*")) == [earlier]
    cfg = recorded(earlier)["cfg"]
    assert (cfg["iterations"], cfg["seed"], cfg["family"]["regenerate"]["sampler"]) == (4, 5, "merged")
    assert cfg["ckpt"] == str(earlier / "checkpoints" / "last.ckpt")
    assert f"family=compile iterations=2 seed=5; overridden here: {RECORD} iterations=4" in result.out


def test_last_run_resumes_twice(command: Command, tmp_path: Path, earlier: Path) -> None:
    for iterations in (4, 6):
        assert command(RECORD, "ckpt=last", f"iterations={iterations}").status == 0
    cfg = recorded(earlier)["cfg"]
    assert (cfg["iterations"], cfg["seed"]) == (6, 5)
    assert list(tmp_path.glob("outputs/train/*")) == [earlier]


def test_newest_of_several_runs_resumes(command: Command, tmp_path: Path, earlier: Path) -> None:
    assert command(RECORD, "-m", "seed=8,9").status == 0
    newest = only(tmp_path, "outputs/multirun/*/1_seed-9")
    assert command(RECORD, "ckpt=last", "iterations=7").status == 0
    assert (recorded(newest)["cfg"]["iterations"], recorded(newest)["cfg"]["seed"]) == (7, 9)


def test_run_named_by_its_folder_resumes(command: Command, tmp_path: Path, earlier: Path) -> None:
    assert command(RECORD, "seed=8").status == 0
    assert command(RECORD, "ckpt=last", f"hydra.run.dir={earlier.relative_to(tmp_path)}", "iterations=4").status == 0
    assert (recorded(earlier)["cfg"]["iterations"], recorded(earlier)["cfg"]["seed"]) == (4, 5)


AUTO = ["ckpt=auto", "hydra.run.dir=runs/${seed}", "seed=3"]


def test_auto_begins_a_run_and_continues_it_when_the_command_is_given_again(command: Command, tmp_path: Path) -> None:
    begun = command(RECORD, *AUTO, "iterations=2")
    assert begun.status == 0, begun.err
    assert "ckpt=auto: runs/3 has no checkpoint, so the run begins\n" in begun.out
    assert recorded(tmp_path / "runs" / "3")["cfg"]["ckpt"] is None
    continued = command(RECORD, *AUTO, "iterations=2")
    assert continued.status == 0, continued.err
    last = tmp_path / "runs" / "3" / "checkpoints" / "last.ckpt"
    assert recorded(tmp_path / "runs" / "3")["cfg"]["ckpt"] == str(last)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["3"]


def test_auto_leaves_a_finished_run_as_it_is(command: Command, tmp_path: Path) -> None:
    assert command(RECORD, *AUTO, "iterations=1").status == 0
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    again = command(RECORD, *AUTO, "iterations=1")
    assert (again.status, again.err) == (0, "") and "has ended after 1 iteration; nothing to do" in again.out
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    stopped = {"status": "stopped early", "iterations": 1, "final_reward": 0.5, "evaluations": [], "config": {}}
    (tmp_path / "runs" / "3" / "summary.json").write_text(json.dumps(stopped), encoding="utf-8")
    assert "nothing to do" in command(RECORD, *AUTO, "iterations=9").out


def test_auto_begins_again_only_what_the_same_command_left_without_a_checkpoint(
    command: Command, tmp_path: Path
) -> None:
    assert command(RECORD, *AUTO, "iterations=2").status == 0
    (tmp_path / "runs" / "3" / "checkpoints" / "last.ckpt").unlink()
    assert "already holds a run" in refused(command, RECORD, *AUTO, "iterations=3")
    again = command(RECORD, *AUTO, "iterations=2")
    assert again.status == 0 and recorded(tmp_path / "runs" / "3")["cfg"]["ckpt"] is None, again.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ckpt=auto"], "ckpt=auto is invalid: it needs a folder that the same command finds again"),
        (["ckpt=auto", "-m", "hydra.sweep.dir=x"], "ckpt=auto continues one run"),
        (["task=evaluate", "ckpt=auto", "hydra.run.dir=x"], "Use ckpt=last or ckpt=best for other tasks"),
        (["ckpt=best"], "ckpt=best takes the newest run that has checkpoints/best.ckpt; there is none under"),
        (["callbacks.best.monitor=hpsv2"], "it must be one of the run's rewards, shapes, or null"),
    ],
)
def test_what_auto_and_best_cannot_find_is_an_error(command: Command, arguments: list[str], message: str) -> None:
    assert message in refused(command, *arguments)


def test_best_checkpoint_starts_a_new_folder_and_serves_other_tasks(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    best = earlier / "checkpoints" / "best.ckpt"
    best.write_bytes((earlier / "checkpoints" / "last.ckpt").read_bytes())
    for arguments in (["iterations=4", "hydra.run.dir=branch"], ["task=audit", "hydra.run.dir=audited"]):
        done = command(*arguments, RECORD, "ckpt=best")
        assert done.status == 0, done.err
        cfg = recorded(tmp_path / arguments[-1].partition("=")[2])["cfg"]
        assert (cfg["ckpt"], cfg["seed"]) == (str(best), 5)
    assert "already holds a run" in refused(command, RECORD, "ckpt=best", "iterations=4", f"hydra.run.dir={earlier}")


def test_checkpoint_file_starts_a_new_folder_with_the_overrides_of_its_run(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    before = (earlier / "record.json").read_bytes()
    file = earlier.relative_to(tmp_path) / "checkpoints" / "last.ckpt"
    assert command(RECORD, f"ckpt={file}", "seed=6", "hydra.run.dir=branch").status == 0
    cfg = recorded(tmp_path / "branch")["cfg"]
    assert (cfg["iterations"], cfg["seed"], cfg["ckpt"]) == (2, 6, str(tmp_path / file))
    assert (earlier / "record.json").read_bytes() == before


def test_another_task_takes_the_overrides_of_the_run_but_not_its_folder(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    assert command("task=audit", RECORD, "ckpt=last").status == 0
    cfg = recorded(only(tmp_path, "outputs/audit/*_tiny_compile_shapes"))["cfg"]
    assert (cfg["seed"], cfg["task"]["pool"]) == (5, 96)
    assert cfg["ckpt"] == str(earlier / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(
    ("arguments", "culprits", "changes"),
    [
        (["iterations=4", "seed=6"], "seed=6", "seed"),
        (
            ["family=compile", "family.pool=16", "reward.shapes.weight=2"],
            "family.pool=16 reward.shapes.weight=2",
            "family.pool, reward",
        ),
        (["family=diffusionnft", "logger=tensorboard"], "family=diffusionnft", "family."),
        (["experiment=smoke"], "experiment=smoke", "family.keep, family.pool, "),
        (["+optimizer.amsgrad=true"], "+optimizer.amsgrad=true", "optimizer.amsgrad"),
        (["model.iterations=4"], "model.iterations=4", "model.iterations"),
        (["reward.combine=gdpo"], "reward.combine=gdpo", "reward.combine"),
    ],
)
def test_changed_key_is_an_error_on_a_resume(
    command: Command, earlier: Path, arguments: list[str], culprits: str, changes: str
) -> None:
    before = {file: file.read_bytes() for file in earlier.rglob("*") if file.is_file()}
    result = command(RECORD, "ckpt=last", *arguments)
    assert result.status == 2
    assert f"{culprits} changes {changes}" in result.err
    assert f"Cannot resume {earlier}: " in result.err
    assert f"a new folder from that state: ckpt=outputs/train/{earlier.name}/checkpoints/last.ckpt" in result.err
    assert {file: file.read_bytes() for file in earlier.rglob("*") if file.is_file()} == before


def test_recorded_overrides_may_be_repeated_on_a_resume(command: Command, earlier: Path) -> None:
    same = ["seed=5", "family=compile", "family.pool=96", "data.train=shapes-train", "optimizer.lr=0.001"]
    result = command(RECORD, "ckpt=last", *same, "iterations=3")
    assert result.status == 0
    assert f"the overrides of its run: {RECORD} family=compile iterations=2 seed=5; overridden" in result.out
    assert result.out.endswith("iterations=3; iterations done: 1\n")
    assert recorded(earlier)["cfg"]["iterations"] == 3


def test_resumable_keys_may_change_on_a_resume(command: Command, earlier: Path) -> None:
    ways = ["model.micro_batch=8", "family.compile=false", "precision.backend=emulated", "trainer=cpu", "~logger"]
    assert command(RECORD, "ckpt=last", *ways, "evaluation.every=7", "data.eval=compositional").status == 0
    cfg = recorded(earlier)["cfg"]
    assert (cfg["model"]["micro_batch"], cfg["evaluation"]["every"], "logger" in cfg) == (8, 7, False)


def test_resume_that_fails_leaves_the_record_of_the_run_as_it_was(
    command: Command, tmp_path: Path, earlier: Path
) -> None:
    record = {file.name: file.read_bytes() for file in (earlier / ".hydra").iterdir()}
    for iterations in (40, 50):
        assert command(task(refuse), "ckpt=last", f"iterations={iterations}").status == 2
    assert {file.name: file.read_bytes() for file in (earlier / ".hydra").glob("*.yaml")} == record
    assert command(RECORD, "ckpt=last").status == 0
    assert recorded(earlier)["cfg"]["iterations"] == 2


@pytest.fixture
def own_family(tmp_path: Path) -> Path:
    folder = tmp_path / "it's mine"
    (folder / "family").mkdir(parents=True)
    (folder / "family" / "small.yaml").write_text("defaults: [diffusionnft]\npool: 6\nkeep: 6\n", encoding="utf-8")
    return folder


def test_run_resumes_with_the_options_of_its_config_dir(command: Command, tmp_path: Path, own_family: Path) -> None:
    assert command("--config-dir", "it's mine", RECORD, "family=small", "hydra.run.dir=run").status == 0
    for iterations in (20, 30):
        assert command(RECORD, "ckpt=last", "hydra.run.dir=run", f"iterations={iterations}").status == 0
        assert recorded(tmp_path / "run")["cfg"]["family"]["pool"] == 6
        assert recorded(tmp_path / "run")["cfg"]["iterations"] == iterations
    assert command("task=audit", RECORD, "ckpt=run/checkpoints/last.ckpt", "hydra.run.dir=other").status == 0
    assert recorded(tmp_path / "other")["cfg"]["family"]["pool"] == 6
    own_family.rename(tmp_path / "moved")
    again = ["ckpt=last", "hydra.run.dir=run", "iterations=40"]
    assert "Name their folder with --config-dir <folder>" in refused(command, RECORD, *again)
    assert command("--config-dir", "moved", RECORD, *again).status == 0


def test_process_started_from_a_sweep_finds_the_options_of_its_config_dir(
    command: Command, tmp_path: Path, own_family: Path
) -> None:
    assert command("--config-dir", "it's mine", RECORD, "-m", "family=small", "seed=1,2").status == 0
    arguments = recorded(only(tmp_path, "outputs/multirun/*/0_seed-1"))["argv"]
    assert command(*arguments, "hydra.run.dir=child").status == 0
    assert recorded(tmp_path / "child")["cfg"]["family"]["pool"] == 6


def test_search_path_is_looked_up_for_names_too(command: Command, own_family: Path) -> None:
    path = str(own_family).replace("'", "\\'")
    own = [f"hydra.searchpath=['file://{path}']", "family=small"]
    assert "There is no key iteration. Did you mean iterations?" in refused(command, *own, "iteration=2")


@pytest.mark.parametrize("arguments", [["ckpt=last"], ["ckpt=run/checkpoints/last.ckpt"], ["ckpt=last", "trainer=cpu"]])
def test_finished_run_does_not_resume(command: Command, arguments: list[str]) -> None:
    assert command(RECORD, "iterations=1", "hydra.run.dir=run").status == 0
    told = refused(command, RECORD, *arguments, *(["hydra.run.dir=run"] if "ckpt=last" in arguments else []))
    assert "has done 1. Raise it, as in iterations=11" in told
    assert command(RECORD, "task=audit", RECORD, "ckpt=run/checkpoints/last.ckpt").status == 0


def test_folder_name_with_every_awkward_character_resumes(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "it's a, (run) = [1]"
    folder.mkdir()
    quoted = str(folder).replace("'", "\\'")
    assert command(RECORD, f"hydra.run.dir='{quoted}'", "seed=3").status == 0
    assert command(RECORD, f"hydra.run.dir='{quoted}'", "ckpt=last", "iterations=9").status == 0
    assert (recorded(folder)["cfg"]["iterations"], recorded(folder)["cfg"]["seed"]) == (9, 3)


def test_further_ranks_do_not_take_the_run_of_the_first_for_an_old_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(RECORD, "hydra.run.dir=run").status == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command(RECORD, "hydra.run.dir=run", "hydra.run.dir=run", "hydra.output_subdir=null").status == 0


def test_further_ranks_of_a_run_that_resumes_write_no_record(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(RECORD, "hydra.run.dir=run", "seed=5").status == 0
    assert command(RECORD, "ckpt=last", "hydra.run.dir=run", "iterations=7").status == 0
    of_first_rank = recorded(tmp_path / "run")["argv"]
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / ".hydra").rglob("*")}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command(*of_first_rank, f'hydra.run.dir="{tmp_path / "run"}"', "hydra.output_subdir=null").status == 0
    cfg = recorded(tmp_path / "run")["cfg"]
    assert (cfg["iterations"], cfg["seed"]) == (7, 5)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run" / ".hydra").rglob("*")} == written


# Ranks that something else starts

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_LOCALID": "0",
}
JSRUN = {"JSM_NAMESPACE_SIZE": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
OF_RANK_0 = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "solrl_lightning.log"}
ON_TWO_NODES = ["trainer.num_nodes=2", "trainer.devices=2", "trainer=ddp"]


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_ranks_of_srun_share_one_folder_that_rank_0_records(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts, suffix in (("0", ""), ("1", "-restart1")):  # SLURM counts how often a job went back to its queue
        folder = tmp_path / "outputs" / "train" / f"slurm-4711.0{suffix}_tiny_sol_rl_shapes"
        for rank in ("3", "0"):
            for name, value in (SRUN | {"SLURM_PROCID": rank, "SLURM_RESTART_COUNT": restarts}).items():
                monkeypatch.setenv(name, value)
            assert command(task(look), *ON_TWO_NODES).out.strip() == str(folder)
            assert files(folder) == (OF_RANK_0 if rank == "0" else set())
    assert "already holds a run" in refused(command, task(look), *ON_TWO_NODES)


@pytest.mark.parametrize("changed", [{"SLURM_JOB_NAME": "interactive"}, {"SLURM_NTASKS": "1"}])
def test_commands_one_after_the_other_in_a_slurm_job_have_folders_of_their_own(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    for name, value in (SRUN | {"SLURM_PROCID": "0"} | changed).items():
        monkeypatch.setenv(name, value)
    assert command(RECORD).status == command(RECORD).status == 0
    assert len(list(tmp_path.glob("outputs/train/*"))) == 2


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"NODE_RANK": "1"}, False),
        (SRUN | {"SLURM_PROCID": "0"}, True),
        (SRUN | {"SLURM_PROCID": "2"}, False),
        (SRUN | TORCHRUN | {"SLURM_PROCID": "1", "RANK": "0"}, True),  # torchrun numbers its nodes by itself
        (SRUN | TORCHRUN | {"SLURM_PROCID": "0", "RANK": "2"}, False),
        (SRUN | {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "2"}, True),
        (JSRUN | {"JSM_NAMESPACE_RANK": "0"}, True),
        (JSRUN | {"JSM_NAMESPACE_RANK": "2"}, False),
        (SRUN | JSRUN | {"SLURM_PROCID": "2", "JSM_NAMESPACE_RANK": "0"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, False),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, False),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "LOCAL_RANK": "1"}, False),
    ],
)
def test_first_process_is_rank_0_of_the_launcher_that_lightning_sees(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], first: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_first() == first


def test_commands_on_several_nodes_need_the_name_of_their_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Name one for all with hydra.run.dir=<folder>" in refused(command, RECORD, *ON_TWO_NODES)
    for rank in ("1", "0"):
        monkeypatch.setenv("NODE_RANK", rank)
        assert command(task(look), *ON_TWO_NODES, "hydra.run.dir=run").status == 0
        assert files(tmp_path / "run") == (OF_RANK_0 if rank == "0" else set())


@pytest.mark.parametrize("environment", [JSRUN, {"OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_SIZE": "4"}])
def test_jsrun_and_mpirun_need_the_name_of_a_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert "jsrun and mpirun let the ranks" in refused(command, RECORD)
    assert command(task(look), "hydra.run.dir=run").status == 0


def test_torchrun_without_its_store_needs_the_name_of_a_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}).items():
        monkeypatch.setenv(name, value)
    assert "torchrun without a store of its own" in refused(command, RECORD)
    assert command(RECORD, "hydra.run.dir=run").status == 0


# The program as a user starts it


def python_m(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "solrl_lightning", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_output_that_is_not_read_to_its_end_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "solrl_lightning", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as of `--help | head`
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()


def test_help_reads_like_a_manual_and_loads_no_library(tmp_path: Path) -> None:
    result = python_m(tmp_path, "--help")
    assert result.returncode == 0
    for part in (
        "USAGE",
        "GROUPS",
        "COMMON KNOBS",
        "EXAMPLES",
        "RESULTS",
        "family: adaptive, compile, diffusionnft",
        "ckpt=last",
    ):
        assert part in result.stdout
    assert "???" not in result.stdout and "${" not in result.stdout
    assert not any(line.endswith((" torch", " diffusers", " lightning")) for line in result.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("famly=sol_rl", "Did you mean family?"),
        ("task=generate", "got neither"),
        ("task=compare", "matches nothing"),
        ("task=export", "ckpt=last or ckpt=best of the newest run"),
        ("data.train=nowhere.txt", "the path nowhere.txt does not exist"),
        ("family.pool=10", "family.keep=24 is invalid: it must be at most family.pool=10"),
    ],
)
def test_wrong_value_is_told_before_torch_is_loaded(tmp_path: Path, argument: str, message: str) -> None:
    result = python_m(tmp_path, argument)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not any(line.endswith((" torch", " diffusers", " lightning")) for line in result.stderr.splitlines())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_missing_gpu_is_told_before_lightning_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = python_m(tmp_path, "trainer=gpu", "trainer.accelerator=cuda")
    assert result.returncode == 2
    assert "trainer.accelerator=cuda trainer.devices=1 is invalid: torch finds 0 GPUs" in result.stderr
    loaded = {line.rpartition(" ")[2] for line in result.stderr.splitlines()}
    assert "torch" in loaded and loaded.isdisjoint({"diffusers", "lightning", "transformers"})
    assert list(tmp_path.iterdir()) == []


def test_resume_names_a_key_that_an_edited_file_changes(command: Command, earlier: Path) -> None:
    record = earlier / ".hydra" / "config.yaml"
    record.write_text(record.read_text().replace("kl_weight: ${model.kl_weight}", "kl_weight: 7.5"))
    result = command(RECORD, "ckpt=last", "iterations=4")
    assert result.status == 2
    assert "objective.kl_weight=" in result.err and "is not the 7.5 that the run has recorded" in result.err
