"""task=train by its command: what a run leaves behind, interruption, and resumes."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from solrl_lightning.machine import interrupts
from solrl_lightning.policies.config_files import ASSETS
from solrl_lightning.rewards.base import Reward
from solrl_lightning.training.module import SolRLModule

Command = Callable[..., Any]

TAGS = {
    *("reward/mean", "reward/std", "explore/proxy_reward", "eval/shapes"),
    *(f"rank/{name}" for name in ("spearman", "kendall", "top_overlap", "bottom_overlap")),
    *("rank/top_mean_rank", "rank/bottom_mean_rank"),
    *(f"time/{stage}" for stage in ("explore", "regenerate", "train", "requantize", "iteration", "probe")),
    *("train/loss", "train/kl", "train/grad_norm", "policy/base_distance", "policy/old_distance"),
    *("reward/group_std", "reward/zero_std_fraction"),
}


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def test_a_run_leaves_everything_that_the_readme_lists(command: Command, tmp_path: Path) -> None:
    done, run = command("experiment=smoke", "hydra.run.dir=run"), tmp_path / "run"
    assert done.status == 0, done.err
    summary = summary_of(run)
    assert (summary["status"], summary["iterations"]) == ("completed", 2)
    assert summary["precision_backend"] == "nvfp4 (emulated)"
    assert 0 < summary["base_reward"] < 1 and 0 < summary["final_reward"] < 1
    assert {"explore", "regenerate", "train", "requantize"} <= summary["seconds_per_stage"].keys()
    assert -1 <= summary["rank_fidelity"]["last"]["spearman"] <= 1
    assert summary["peak_memory_bytes"] > 0
    errors = summary["evaluations"][-1]
    assert errors["change_error"]["shapes"] > 0 < errors["standard_error"]["shapes"]
    for file in ("checkpoints/last.ckpt", "lora/pytorch_lora_weights.safetensors", ".hydra/overrides.yaml"):
        assert (run / file).is_file()
    assert {path.suffix for path in (run / "samples").iterdir()} == {".png"}
    report = (run / "report.html").read_text()
    for name in ("train/drift", "lr", "explore/proxy_reward", "rank correlation of a probe", "data:image/png"):
        assert name in report
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= TAGS and "epoch" not in tags
    assert [row["iteration"] for row in summary["evaluations"]] == [0, 1, 2]
    for tag in tags:  # one iteration has one number
        first = 0 if tag.startswith(("eval/", "images/")) else 2 if tag.startswith("summary/") else 1
        assert [event.step for event in events.Scalars(tag)] == list(range(first, 3)), tag
    assert [event.step for event in events.Images("samples/grid")] == [1, 2]
    table, lines = "transformer_blocks.0.attn.to_q", ("before training | held-out shapes 0.", "NVFP4 is emulated")
    for text in (*lines, "with report.html", "shapes reward", "linear layers quantised"):
        assert text in done.out
    assert table not in done.out and table in (run / "solrl_lightning.log").read_text()


LONG = (
    "experiment=smoke prompts_per_iteration=1 family.pool=4 family.keep=2 model.full_steps=2 model.preview_steps=1 "
    "model.eval_steps=1 data.eval_prompts=1 callbacks.sample_grid.every=0 callbacks.rank_correlation.probe_every=0"
).split()


def test_a_run_takes_over_what_a_resume_was_given_once_that_has_started(command: Command, tmp_path: Path) -> None:
    record = tmp_path / "run" / ".hydra"
    names = {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert command(*LONG, "iterations=1", "hydra.run.dir=run").status == 0
    before = {file.name: file.read_bytes() for file in record.iterdir()}
    summary = (tmp_path / "run" / "summary.json").read_text()
    done = command("ckpt=last", "hydra.run.dir=run")
    assert done.status == 2 and "last.ckpt is invalid" in done.err and "has done 1 iteration." in done.err
    other = ("optimizer._target_=torch.optim.NAdam", "iterations=2", "hydra.run.dir=other")
    done = command("ckpt=run/checkpoints/last.ckpt", *other)
    assert done.status == 2 and "holds the state of AdamW" in done.err and not (tmp_path / "other").exists()
    (tmp_path / "prompts.txt").write_text("a dog on a sofa\n")
    done = command("ckpt=last", "hydra.run.dir=run", "iterations=9", "data.eval=prompts.txt")
    assert done.status == 2 and "'a dog on a sofa'" in done.err
    assert (record / "next").is_dir()
    assert {name: (record / name).read_bytes() for name in names} == before
    assert (tmp_path / "run" / "summary.json").read_text() == summary
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["precision_backend"] == "nvfp4 (emulated)"
    torch.save(checkpoint | {"precision_backend": "fp8 (torch)"}, tmp_path / "run" / "checkpoints" / "last.ckpt")
    resumed = command("ckpt=last", "hydra.run.dir=run", "iterations=2")
    assert resumed.status == 0, resumed.err
    assert "precision=auto: fp8, in which the run of the checkpoint began; a new run here" in resumed.out
    assert summary_of(tmp_path / "run")["precision_backend"] == "fp8 (emulated)"
    overrides = OmegaConf.load(record / "overrides.yaml")
    assert "iterations=2" in overrides and not any("prompts.txt" in line for line in overrides)
    assert OmegaConf.load(record / "config.yaml").iterations == 2
    assert {file.name for file in record.iterdir()} == names


def test_a_text_encoder_that_a_pipeline_does_without_has_changed() -> None:
    model = SimpleNamespace(base_digest="same", optional=("text_encoder_3",))
    module: Any = SimpleNamespace(model=model, model_files={"text_encoder/config.json": "1"})
    files = {"text_encoder/config.json": "1", "text_encoder_3/config.json": "2", "vae/other.json": "3"}
    changed = SolRLModule.changed_files(module, {"base_weights": "same", "weight_files": files})
    assert changed == ["text_encoder_3/config.json"]


class FromFile(Reward):
    def __init__(self, pretrained: str, device: str) -> None:
        super().__init__(device)
        self.weight = load_file(Path(pretrained) / "model.safetensors")["weight"].sum()

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:  # type: ignore[override]
        return images.mean((1, 2, 3)) * self.weight


def test_text_encoders_and_rewards_are_those_of_the_checkpoint(command: Command, tmp_path: Path) -> None:
    shutil.copytree(ASSETS / "tiny", tmp_path / "tiny_files")
    (tmp_path / "scorer").mkdir()
    save_file({"weight": torch.ones(10**6)}, tmp_path / "scorer" / "model.safetensors")
    (tmp_path / "scorer" / "preprocessor_config.json").write_text('{"size": 224}')
    shutil.copytree(ASSETS / "tiny" / "preview_decoder", tmp_path / "preview")
    scorer = f"+reward.own={{_target_:{__name__}.FromFile,weight:1,pretrained:scorer}}"
    parts = ("model.pretrained=tiny_files", "model.preview_decoder=preview", scorer)
    assert command(*LONG, "iterations=1", "hydra.run.dir=run", *parts).status == 0
    settings = {
        "scheduler/scheduler_config.json": tmp_path / "tiny_files" / "scheduler" / "scheduler_config.json",
        "reward.own.pretrained/preprocessor_config.json": tmp_path / "scorer" / "preprocessor_config.json",
    }
    for name, file in settings.items():
        before = file.read_text()
        file.write_text(before.replace('"shift": 1.0', '"shift": 2.0').replace("224", "225"))
        resumed = command("ckpt=last", "hydra.run.dir=run", "iterations=2")
        assert resumed.status == 2 and f"error: {name}: this is not what the run in" in resumed.err
        file.write_text(before)
    files = {
        "text_encoder/model.safetensors": tmp_path / "tiny_files" / "text_encoder" / "model.safetensors",
        "model.preview_decoder/diffusion_pytorch_model.safetensors": next((tmp_path / "preview").glob("*.safetensors")),
        "reward.own.pretrained/model.safetensors": tmp_path / "scorer" / "model.safetensors",
    }
    for name, file in files.items():
        before = file.read_bytes()
        save_file({key: 1.1 * value for key, value in load_file(file).items()}, file, {"format": "pt"})
        resumed = command("ckpt=last", "hydra.run.dir=run", "iterations=2")
        assert resumed.status == 2 and f"error: {name}: this is not what the run in" in resumed.err
        file.write_bytes(before)
    file.write_bytes(before[:-1] + b"A")
    branch = command("ckpt=run/checkpoints/last.ckpt", "iterations=2", "hydra.run.dir=branch")
    assert branch.status == 0 and "the rewards or files of models differ from the checkpoint's" in branch.out
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint.pop("weight_files").keys() > {*files, *settings, "text_encoder_2/model.safetensors"}
    torch.save(checkpoint, last)  # of an older version
    resumed = command("ckpt=last", "hydra.run.dir=run", "iterations=2")
    assert resumed.status == 0, resumed.err


def test_base_weights_and_alpha_are_those_of_the_checkpoint(command: Command, tmp_path: Path) -> None:
    lora, run = "run/lora/pytorch_lora_weights.safetensors", "hydra.run.dir=on_lora"
    checkpoint = "on_lora/checkpoints/last.ckpt"
    assert command(*LONG, "iterations=1", "hydra.run.dir=run").status == 0
    assert command(*LONG, "iterations=1", f"model.fused_lora={lora}", run).status == 0
    before = (tmp_path / lora).read_bytes()
    with safe_open(tmp_path / lora, framework="pt") as file:  # as if the first run had trained on
        more = {name: 1.1 * file.get_tensor(name) for name in file.keys()}
        save_file(more, tmp_path / lora, file.metadata())
    resumed = command("ckpt=last", run, "iterations=2")
    changed = "model.pretrained with model.fused_lora and model.dtypes: this is not what"
    assert resumed.status == 2 and changed in resumed.err
    branch = command(f"ckpt={checkpoint}", "iterations=2", "hydra.run.dir=branch")
    assert branch.status == 0 and "or files of models differ from the checkpoint's: base reward, best" in branch.out
    assert summary_of(tmp_path / "branch")["evaluations"][0]["iteration"] == 1
    export = command("task=export", f"ckpt={checkpoint}", "hydra.run.dir=export")
    assert export.status == 0 and f"{changed} {tmp_path / checkpoint} was trained with" in export.out
    (tmp_path / lora).write_bytes(before)
    resumed = command("ckpt=last", run, "iterations=2")
    assert resumed.status == 0, resumed.err
    (tmp_path / lora).rename(tmp_path / "moved.safetensors")
    gone = command("ckpt=last", run, "iterations=3")
    rule = f"model.fused_lora={lora} is invalid: run/lora must be a hub id or a local folder; it holds no pytorch_lora"
    assert gone.status == 2 and rule in gone.err and "Set model.fused_lora=<hub id or folder>/<file>." in gone.err
    moved = command("ckpt=last", run, "iterations=3", "model.fused_lora=moved.safetensors")
    assert moved.status == 0, moved.err
    other = command("task=export", f"ckpt={checkpoint}", "model.lora.alpha=1", "hydra.run.dir=other")
    assert other.status == 2 and "model.lora.alpha=1 is invalid: the checkpoint's LoRA was trained with" in other.err
    assert "Set model.lora.alpha=64." in other.err


class CtrlC(Callback):
    """Interrupts the process in its second iteration, as a terminal does."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_a_checkpoint_and_a_summary(command: Command, tmp_path: Path) -> None:
    # A test run in the background of a shell script ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done = command(*LONG, "iterations=1000", f"+callbacks.ctrl_c._target_={__name__}.CtrlC", "hydra.run.dir=run")
    signal.signal(signal.SIGINT, before)  # Lightning ignores further ones from then on
    assert done.status == 130, done.err
    run = tmp_path / "run"
    summary = summary_of(run)
    assert (summary["status"], summary["iterations"]) == ("interrupted", 1)
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "lora" / "pytorch_lora_weights.safetensors").is_file()
    assert "interrupted after" in done.out and "Traceback" not in done.out + done.err


@pytest.mark.parametrize(("number", "evaluations"), [(signal.SIGTERM, 0), (signal.SIGHUP, 1), (signal.SIGXCPU, 1)])
def test_a_signal_during_an_evaluation_ends_the_run_with_its_results(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, evaluations: int
) -> None:
    validation_step = SolRLModule.validation_step

    def signalled(self: SolRLModule, prompts: list[str], batch_idx: int) -> None:
        if self.trainer.global_step == evaluations:
            os.kill(os.getpid(), number)
        validation_step(self, prompts, batch_idx)

    monkeypatch.setattr(SolRLModule, "validation_step", signalled)
    before = {
        each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGHUP, signal.SIGXCPU)
    }  # nohup ignores one
    interrupts.restore()
    done = command(*LONG, "iterations=2", "hydra.run.dir=run")
    for each, handler in before.items():
        signal.signal(each, handler)
    assert done.status == 143 and "terminated\n" in done.err
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["iterations"]) == ("interrupted", evaluations)
    assert (tmp_path / "run" / "lora").is_dir() == (evaluations > 0)
    assert done.out.count("none was written yet; the same overrides with ckpt=auto hydra.run.dir=") == evaluations
    assert "resume with" not in done.err
    if number == signal.SIGXCPU:  # before the first checkpoint, though there is a LoRA
        monkeypatch.setattr(SolRLModule, "validation_step", validation_step)
        assert "Begin it again with" in command("ckpt=last", "hydra.run.dir=run").err
        again = command(*LONG, "iterations=2", "ckpt=auto", "hydra.run.dir=run")
        assert again.status == 0, again.err
        assert summary_of(tmp_path / "run")["status"] == "completed"


def test_a_program_of_nohup_goes_on_without_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.restore()
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
