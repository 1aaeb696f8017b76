"""From a configuration to objects: what a user's own classes and this machine's devices can get wrong."""

import dataclasses
import errno
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import utils as hub
from lightning.fabric.plugins.environments import LSFEnvironment, MPIEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from nano import MAX_WORDS, save_nano
from transformers.utils import logging as transformers_logging

from solrl_lightning import build, targets
from solrl_lightning.__main__ import prepare
from solrl_lightning.artifacts.loggers import has_wandb_key, trackers_of
from solrl_lightning.build import (
    build_model,
    build_rewards,
    build_trainer,
    build_training,
    build_tried_rewards,
    device_of,
    instantiate_trainer,
    prepare_device,
)
from solrl_lightning.cli.checks import check_machine, devices_of
from solrl_lightning.errors import UserError
from solrl_lightning.machine import allocator, attention
from solrl_lightning.objectives.nft import NFT
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rollout.scoring_worker import background_worker
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.tasks import doctor
from solrl_lightning.tasks.train import train

Compose = Callable[..., Run]
CPU = torch.device("cpu")
CSV, IDENTITY = "lightning.pytorch.loggers.CSVLogger", "torch.nn.Identity"
ACCUMULATE = "lightning.pytorch.callbacks.GradientAccumulationScheduler"
AVERAGE = "lightning.pytorch.callbacks.EMAWeightAveraging"
TIMER = "lightning.pytorch.callbacks.Timer"
RICH = "lightning.pytorch.callbacks.RichProgressBar"
MIXED = "{_target_:lightning.pytorch.plugins.MixedPrecision,precision:bf16-mixed,device:cpu}"
PLUGIN = f"+trainer.plugins=[{MIXED}]"
STRATEGY = "trainer.strategy={_target_:lightning.pytorch.strategies.ModelParallelStrategy}"
ERRORS = {  # maker -> arguments and message
    "rewards": [
        (
            "+reward.mine={_target_:nowhere.Mine,weight:1.0}",
            "reward.mine: nowhere.Mine could not be made: No module named 'nowhere'. .*PYTHONPATH",
        ),
        (
            f"+reward.mine={{_target_:{__name__}.Plain,weight:1.0}}",
            "Plain is invalid: .*solrl_lightning.rewards.base.Rew",
        ),
        (
            f"+reward.mine={{_target_:{__name__}.Unfinished,weight:1.0}}",
            "Unfinished could not be made: Can't instantiate abstract class .* Define score in it.",
        ),
        (
            f"+reward.mine={{_target_:{__name__}.redness,weight:1.0}}",
            "redness is invalid: .* which lack images. Name a class, or a function that returns an object of one",
        ),
        (
            "+reward.mine={_target_:modular.Mine,weight:1.0}",
            "modular.Mine could not be made: Mine .* write class Mine.Reward, Module., in .*modular.py, line 4. Corr",
        ),
        (
            "+reward.mine={_target_:solrl_lightning.rewards.shapes.ShapesReward,weight:1.0,temperature:2}",
            "reward.mine.temperature=2 is invalid: nothing reads that key. Leave it out with ~reward.mine.temperature",
        ),
    ],
    "machine": [
        ("optimizer._target_=torch.optim.Foo", "Foo could not be made: module 'torch.optim' .* 'Foo'. Name"),
        (f"optimizer._target_={IDENTITY}", "it must be a torch.optim.optimizer.Optimizer"),
        (
            "objective._target_=mistaken.loss",
            "name 'Tensor' is not defined, in .*mistaken.py, line 2. Correct its",
        ),
        (
            "objective._target_=lacking.loss",
            "lacking.loss .* named 'nowhere_else', in .*lacking.py, line 1. Correct its",
        ),
        (
            "objective._target_=mine.part.loss",
            "part.loss .* import name 'Nowhere' from 'torch' .*, in .*part.py, line 1. Correct its",
        ),
    ],
    "trainer": [
        (f"logger.tensorboard._target_={CSV}", "that key. CSV.* takes .* with ~logger.tensorboard.default_hp"),
        (f"logger.tensorboard._target_={IDENTITY}", "must be a lightning.fabric.loggers.logger.Logger"),
        ("+logger.tensorboard.log_dir=x", "multiple values for .* 'log_dir'.* with ~logger.tensorboard.<name>"),
        (f"+callbacks.mine._target_={IDENTITY}", "callbacks.mine: .*must be a lightning.pytorch.callbacks"),
        (f"+callbacks.g={{_target_:{ACCUMULATE},scheduling:{{0:2}}}}", "callbacks.g is invalid: .* with ~callbacks.g"),
        (f"+callbacks.g={{_target_:{AVERAGE}}}", "callbacks.g is invalid: .*callbacks.ema averages"),
        (
            f"+callbacks.t={{_target_:{TIMER},duration:'00:01:00:00'}}",
            "callbacks.t is invalid: max_seconds=<seconds> limits",
        ),
        (
            f"+callbacks.rich._target_={RICH}",
            "callbacks.rich is invalid: .*, unless ~callbacks.progress leaves that out",
        ),
        ("+trainer.barebones=true", "trainer: lightning.Trainer could not be made: .*barebones"),
        (PLUGIN, "Lightning casts nothing, but this one is for bf16-mixed"),
        (STRATEGY, "must be a DDPStrategy or a SingleDeviceStrategy"),
    ],
}


class Plain:
    """Scores, but is no reward."""

    def __init__(self, device: str) -> None:
        pass


class Fails:
    def __init__(self, error: Exception) -> None:
        raise error


class Unfinished(Reward):
    """Has no ``score``."""


def redness(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
    """Scores, and makes no reward."""
    return images[:, 0].mean((1, 2))


def trainer_of(cfg: Run) -> Trainer:
    return build_trainer(cfg.trainer, cfg.callbacks, cfg.logger)


@pytest.mark.parametrize(
    ("maker", "argument", "message"), [(maker, *case) for maker, cases in ERRORS.items() for case in cases]
)
def test_error_names_a_part_that_cannot_be_made(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str, argument: str, message: str
) -> None:
    (tmp_path / "lacking.py").write_text("import nowhere_else\n")
    (tmp_path / "mistaken.py").write_text("\ndef loss(images: Tensor): ...\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part.py").write_text("from torch import Nowhere\n")
    imports = "from torch.nn import Module\nfrom solrl_lightning.rewards.base import Reward"
    (tmp_path / "modular.py").write_text(f"{imports}\n\nclass Mine(Module, Reward): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = compose("trainer=cpu", argument, *(("~trainer.precision",) if argument in (PLUGIN, STRATEGY) else ()))
    rewards = partial(build_rewards, cfg.reward, cfg.model.frames, CPU)
    makers: dict[str, Callable[[], Any]] = {"rewards": rewards, "machine": lambda: check_machine(cfg)}
    with pytest.raises(UserError, match=message):
        (makers | {"trainer": lambda: trainer_of(cfg)})[maker]()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        OSError(errno.ENOSPC, "No space"),
        RuntimeError("can't start new thread"),
    ],
)
def test_error_of_the_machine_is_not_about_the_values_of_a_part(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])):
        targets.make("model.policy", {"_target_": f"{__name__}.Fails"}, error=error)


def test_a_broken_package_is_named_in_place_of_the_part_that_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def of_diffusers(name: str) -> None:
        try:
            import_module("broken")
        except ImportError as error:
            raise RuntimeError("Failed to import diffusers.models because of the following error") from error

    monkeypatch.setattr(targets, "_import_module_of", of_diffusers)
    fix = "Reinstall the package of that file and what it imports, or remove it"
    with pytest.raises(UserError, match=rf"undefined symbol: \w+, in {tmp_path}/broken.py, line 1\. {fix}"):
        targets.locate("callbacks.timings", {"_target_": "solrl_lightning.callbacks.timings.StageTimings"})


def test_error_of_one_word_has_its_class() -> None:
    with pytest.raises(UserError, match="Fails could not be made: KeyError: 'node'. Correct the values below model"):
        targets.make("model.policy", {"_target_": f"{__name__}.Fails"}, error=KeyError("node"))


SGD = ("optimizer._target_=torch.optim.SGD", "~optimizer.betas", "~optimizer.eps", "+optimizer.momentum=0.9")
MUON = ("optimizer._target_=torch.optim.Muon", "~optimizer.betas")  # for matrices only, as LoRA's weights are


@pytest.mark.parametrize("arguments", [(), ("objective=pepg", "reward.combine=gdpo"), SGD, MUON])
def test_an_optimiser_of_ones_own_passes(compose: Compose, arguments: tuple[str, ...]) -> None:
    check_machine(compose(*arguments))


def test_a_run_without_the_callback_progress_has_no_bar(compose: Compose) -> None:
    assert trainer_of(compose("trainer=cpu")).progress_bar_callback is not None
    assert trainer_of(compose("trainer=cpu", "~callbacks.progress")).progress_bar_callback is None


def test_a_callback_of_ones_own_precedes_those_that_write_what_it_logs(compose: Compose) -> None:
    mine = "+callbacks.mine={_target_:lightning.pytorch.callbacks.LambdaCallback}"
    kinds = [type(callback).__name__ for callback in trainer_of(compose("trainer=cpu", mine)).callbacks]
    place = kinds.index("LambdaCallback")
    assert kinds[place : place + 3] == ["LambdaCallback", "MetricHistory", "RunSummary"]


@dataclasses.dataclass
class Dataclass(Callback):
    every: int = 1


def test_a_callback_may_be_a_dataclass(compose: Compose) -> None:
    trainer = trainer_of(compose("trainer=cpu", f"+callbacks.mine={{_target_:{__name__}.Dataclass,every:2}}"))
    assert Dataclass(2) in trainer.callbacks


@pytest.mark.parametrize("version", ["null", "all", "''", "3"])
def test_a_logger_keeps_the_file_of_an_earlier_part(compose: Compose, tmp_path: Path, version: str) -> None:
    for step in range(3):
        plain = f"+logger.own={{_target_:{CSV},save_dir:'{tmp_path}',name:own,version:{version}}}"
        options = f"hydra.run.dir={tmp_path}", "logger=csv", f"+logger.csv.version={version}", plain
        for tracker in trackers_of(trainer_of(compose("trainer=cpu", *options))):
            tracker.log_metrics({"a": 1.0}, step)
            tracker.save()
    for name in ("csv", "own"):
        files = [*tmp_path.glob(f"{name}/**/metrics.csv")]
        assert sorted(file.read_text().splitlines()[1] for file in files) == ["1.0,0", "1.0,1", "1.0,2"]


def test_loggers_are_composed_by_name(compose: Compose) -> None:
    def names(*arguments: str) -> list[str]:
        trainer = trainer_of(compose("trainer=cpu", *arguments))
        return [type(tracker.logger).__name__ for tracker in trackers_of(trainer)]

    overrides = "+logger.mine={_target_:lightning.pytorch.loggers.CSVLogger,save_dir:${run_dir}}"
    assert names() == ["TensorBoard"]
    assert names("logger=[tensorboard,csv]", overrides) == ["TensorBoard", "CSV", "CSVLogger"]
    assert names("logger=none") == names("~logger") == []


def test_wandb_has_a_key_from_the_environment_or_the_netrc_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    address, other = "https://api.wandb.ai", "https://wandb.example.org"
    assert not has_wandb_key(address)
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert has_wandb_key(address) and not has_wandb_key(other)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_key(other)


def test_missing_gpu_is_an_error_of_one_sentence(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="trainer cannot run here: .* trainer=auto takes what there is"):
        instantiate_trainer(compose("trainer.accelerator=cuda").trainer)


def test_mpi4py_without_an_mpi_is_an_error_with_a_fix(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    def detect() -> NoReturn:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setattr(MPIEnvironment, "detect", detect)
    for trainer in ("auto", "cpu"):
        with pytest.raises(UserError, match=r"here: cannot load MPI library .* run pip uninstall mpi4py\.$"):
            instantiate_trainer(compose(f"trainer={trainer}").trainer)


def test_trainer_auto_is_no_way_out_of_itself(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    def detect() -> NoReturn:
        raise RuntimeError("no")

    monkeypatch.setattr(LSFEnvironment, "detect", detect)
    with pytest.raises(UserError, match=r"trainer cannot run here: no\. trainer=cpu takes the CPU\.$"):
        instantiate_trainer(compose().trainer)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_every_rank_of_a_launcher_that_lightning_does_not_find_has_the_same_line(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    for name, value in {"PMI_SIZE": "2", "PMI_RANK": rank, "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    options = compose("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")
    with pytest.raises(UserError) as error:
        instantiate_trainer(options.trainer)
    assert str(error.value) == (
        f"PMI_SIZE=2 PMI_RANK={rank} is invalid here: mpirun or jsrun has started 2 processes, and Lightning has not "
        "found them. Lightning finds the ranks of mpirun by the package mpi4py: run pip install mpi4py."
    )


def test_trainer_is_made_without_a_warning_where_srun_is_installed(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    trainer_of(compose("trainer=cpu", "~logger"))


@pytest.mark.parametrize(
    ("capability", "installed", "kernels", "without_gradients"),
    [
        ((8, 0), True, ["cudnn False"], ["cudnn True", "cudnn False"]),
        ((9, 0), False, ["cudnn False"], ["cudnn True", "cudnn False"]),
        ((9, 0), True, ["FA4", "cudnn False"], []),
        ((10, 3), True, ["FA4", "cudnn False"], []),
    ],
)
def test_a_process_takes_its_gpu_and_kernels_before_anything_is_made_on_it(
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    installed: bool,
    kernels: list[str],
    without_gradients: list[str],
) -> None:
    calls: list[object] = []
    (tmp_path / "flash_attn" / ("cute" if installed else "layers")).mkdir(parents=True)  # FlashAttention 2 has layers
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4" if "FA4" in calls else None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: calls.append(f"cudnn {enabled}"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: calls.append(precision))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 3)

    def made(*args: object, **kwargs: object) -> None:
        calls.append("made")
        raise KeyboardInterrupt

    cfg = compose()
    monkeypatch.setattr(doctor, "device_of", lambda trainer: device)
    for module, name, make in (
        (build, "build_rewards", partial(build_tried_rewards, cfg.reward, cfg.model, prompt_sets(cfg))),
        (build, "build_policy", partial(build_model, cfg)),
        (doctor, "resolve_from", lambda device: next(doctor.check_run(cfg))),
    ):
        monkeypatch.setattr(module, name, made)
        with pytest.raises(KeyboardInterrupt):
            make(device)
        assert calls == [device, *kernels, "high", "made"]
        calls.clear()
    calls.extend(kernels)
    with attention.without_gradients(device):
        pass
    prepare_device(CPU)
    with attention.without_gradients(CPU):
        assert calls == [*kernels, *without_gradients]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose last GPU is the only one with FP8 units."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 3 else (8, 0))


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, "expandable_segments:True"), ("max_split_size_mb:64", None)]
)
def test_the_allocator_is_configured_before_the_first_call_of_cuda(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, configured: str | None, expected: str | None
) -> None:
    at_first_call: list[str | None] = []

    def capability(device: torch.device) -> tuple[int, int]:
        at_first_call.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise KeyboardInterrupt

    for variable in allocator.VARIABLES:
        monkeypatch.setenv(variable, "")  # restored at the end
        monkeypatch.delenv(variable)
    if configured:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", configured)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    with pytest.raises(KeyboardInterrupt):
        prepare(["trainer=gpu"])
    assert at_first_call == [expected]


@pytest.mark.parametrize(
    ("devices", "index", "count"), [("[3]", 3, 1), ("'3,'", 3, 1), ("[3,1]", 3, 2), ("'3,1'", 3, 2), ("2", 0, 2)]
)
def test_tasks_and_checks_take_the_devices_that_the_user_names(
    four_gpus: None, compose: Compose, monkeypatch: pytest.MonkeyPatch, devices: str, index: int, count: int
) -> None:
    cfg = compose(f"trainer.devices={devices}", "precision=fp8", "precision.backend=torch")
    assert device_of(cfg.trainer) == torch.device("cuda", index) and devices_of(cfg.trainer) == count
    if index == 3:
        check_machine(cfg)
    else:
        with pytest.raises(UserError, match="compute capability 8.9 or higher"):
            check_machine(cfg)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"trainer.devices=.* is invalid: torch finds 1 GPUs"):
        check_machine(compose("trainer.accelerator=cuda", f"trainer.devices={devices}"))


def test_a_deterministic_run_lets_cudnn_choose_nothing_by_time(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, **kw: chosen.append(mode))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for arguments, deterministic, by_time in (
        ((), False, True),
        (("trainer.deterministic=true",), True, False),
        (("trainer.benchmark=false",), False, False),
    ):
        instantiate_trainer(compose("trainer=cpu", *arguments).trainer)
        assert (chosen.pop(), torch.backends.cudnn.benchmark) == (deterministic, by_time)


@pytest.mark.parametrize("trainer", ["auto", "ddp"])
def test_ddp_keeps_one_copy_of_the_gradients(compose: Compose, trainer: str) -> None:
    arguments = f"trainer={trainer}", "trainer.accelerator=cpu", "trainer.devices=2"
    assert instantiate_trainer(compose(*arguments).trainer).strategy._ddp_kwargs["gradient_as_bucket_view"]  # type: ignore[attr-defined]


def test_weights_and_combination_reach_the_rewards(compose: Compose) -> None:
    scores = torch.tensor([[[2.0], [4.0]], [[1.0], [7.0]]])
    for combine, expected in (("sum", [[1, 2], [0.5, 3.5]]), ("gdpo", [[-0.5, 0.5], [-0.5, 0.5]])):
        cfg = compose("reward.shapes.weight=0.5", f"reward.combine={combine}")
        rewards = build_rewards(cfg.reward, cfg.model.frames, CPU)
        assert rewards.weights == {"shapes": 0.5} and rewards.name == "shapes"
        for each in (rewards, rewards.for_training):
            assert each.merits(scores).tolist() == expected
            assert each.total(scores).tolist() == [[1, 2], [0.5, 3.5]]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("pipeline"))


def test_reading_a_model_shows_no_bars_and_leaves_those_of_downloads(
    compose: Compose, pipeline: str, capfd: pytest.CaptureFixture[str]
) -> None:
    diffusers_logging.enable_progress_bar()
    transformers_logging.enable_progress_bar()
    build_model(compose("experiment=smoke", f"model.pretrained='{pipeline}'"), CPU)
    assert capfd.readouterr().err == ""
    assert not hub.are_progress_bars_disabled()


def test_what_was_left_out_of_the_prompts_is_logged_once(
    compose: Compose, pipeline: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red circle above a blue square\n" * 2, encoding="utf-8")
    overrides = (f"data.train='{file}'", "prompts_per_iteration=1", "trainer=cpu", f"model.pretrained='{pipeline}'")
    cfg = compose("experiment=smoke", *overrides)
    with caplog.at_level(logging.INFO, logger="solrl_lightning"):
        build_training(cfg, prompt_sets(cfg), trainer_of(cfg))
    assert [message for message in caplog.messages if "prompts.txt" in message] == [
        f"{file}: dropped 1 repeated prompts of 2"
    ]


def test_a_run_makes_its_objective_once_and_leaves_its_weights_where_they_are(
    compose: Compose, pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objectives: list[NFT] = []
    init = NFT.__init__

    def recorded(self: NFT, *args: Any, **kwargs: Any) -> None:
        objectives.append(self)
        init(self, *args, **kwargs)

    def moved(self: torch.nn.Module) -> None:
        raise AssertionError("Lightning moves the model to the CPU")

    monkeypatch.setattr(NFT, "__init__", recorded)
    monkeypatch.setattr(torch.nn.Module, "cpu", moved)
    short = f"model.pretrained={pipeline} model.max_sequence_length={MAX_WORDS} trainer=cpu iterations=1 ~logger "
    short += "prompts_per_iteration=1 data.eval_prompts=1 callbacks.sample_grid.every=0"
    train(compose("experiment=smoke", *short.split(), f"hydra.run.dir={tmp_path}"))
    assert len(objectives) == 1


class MainThread(Reward):
    """Scores in the thread in which it was made, as a connection of sqlite allows."""

    def score(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("in another thread")
        return images.mean((1, 2, 3))


def test_rewards_are_tried_in_the_thread_that_will_score(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose("~reward.shapes", f"+reward.mine={{_target_:{__name__}.MainThread,weight:1.0}}")
    build_tried_rewards(cfg.reward, cfg.model, prompt_sets(cfg), CPU)
    monkeypatch.setattr(build, "worker_of", lambda device: partial(background_worker, device))  # as of a GPU
    with pytest.raises(UserError, match="the reward mine raises RuntimeError in .*in another thread"):
        build_tried_rewards(cfg.reward, cfg.model, prompt_sets(cfg), CPU)


def test_only_rank_0_makes_loggers(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose("logger=csv", f"hydra.run.dir={tmp_path}")
    for rank, kind in ((0, CSVLogger), (1, DummyLogger)):
        monkeypatch.setattr(build, "is_first", lambda rank=rank: rank == 0)
        (tracker,) = build_trainer(cfg.trainer, cfg.callbacks, cfg.logger).loggers
        assert isinstance(tracker.logger, kind) and tracker.key == "csv"
        tracker.log_hyperparams({"seed": 1})
        tracker.log_metrics({"a": 1.0}, 1)
