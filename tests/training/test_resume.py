"""A resume is exact: a run that resumes from a checkpoint equals, bit for bit, the one that saved it.

Processes that are killed are in cli/test_faults.py, several ranks in test_sharded_full.py.
"""

import csv
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from test_loop import Run, fit, make
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import keystr, tree_flatten_with_path

from solrl_lightning.artifacts.files import iterations_done, read_checkpoint
from solrl_lightning.errors import UserError
from solrl_lightning.training.sharding import ShardedBase

SHARDS = "trainer=fsdp family=diffusionnft callbacks.sample_grid.every=0"
CONFIGURATIONS = {
    "sol_rl": "",
    "race, warm-up": "family=race family.explore.rungs=[{step:1,keep:4},{step:2,keep:3}] "
    "scheduler=cosine scheduler.iterations=4 scheduler.warmup=2",
    "prefix, two optimiser steps": "family=prefix model.prefix_steps=2 objective=ram optimizer_steps=2",
    "GRPO": "family=diffusionnft model.full_steps=4 objective=flow_grpo",
    "GRPO, KL, two optimiser steps": "objective=dance_grpo objective.kl_weight=0.1 optimizer_steps=2 "
    "reward.combine=gdpo",
    "full": "model.train=full optimizer.lr=0.001",
    "shards": SHARDS,
    "full, shards": f"{SHARDS} model.train=full optimizer.lr=0.001",
}


class SaveWithin(Callback):
    """Saves checkpoints in the middle of iteration 1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        run_stage = pl_module.run_stage

        def saved_before(*args: Any, **kwargs: Any) -> Any:
            if trainer.current_epoch == 1 and not (self.folder / "while exploring").exists():
                self.save(trainer, "while exploring")
            return run_stage(*args, **kwargs)

        pl_module.run_stage = saved_before

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 0):
            self.save(trainer, "between two micro-batches")
        if (trainer.current_epoch, batch_idx) == (0, 1):
            self.save(trainer, "before the average has the step")

    def save(self, trainer: Trainer, when: str) -> None:
        trainer.save_checkpoint(self.folder / when / "epoch=0.ckpt")


class SaveAtEvaluation(ModelCheckpoint):
    """Has a name of its own in checkpoints."""


SAVES: dict[str, Callable[..., ModelCheckpoint]] = {
    "at the end of an iteration": partial(ModelCheckpoint, every_n_epochs=1, save_on_train_epoch_end=True),
    "at the end of an evaluation": partial(SaveAtEvaluation, every_n_epochs=1, save_on_train_epoch_end=False),
    "after the optimiser step": partial(ModelCheckpoint, every_n_train_steps=1),
}
WITHIN = ("while exploring", "between two micro-batches", "before the average has the step")
MOMENTS = [
    *(("sol_rl", when) for when in (*SAVES, *WITHIN)),
    *((name, "at the end of an iteration") for name in CONFIGURATIONS if name != "sol_rl"),
    ("race, warm-up", "while exploring"),
]


class Straight(NamedTuple):
    """Two iterations without interruption, and the folders of its checkpoints by when they were taken."""

    run: Run
    folder: Path
    results: dict[str, Any]


def started(folder: Path, name: str, *savers: Callback, ahead: tuple[Callback, ...] = ()) -> Run:
    """A run of a configuration in ``folder``, before its first iteration; ``ahead`` are called before the average."""
    options: dict[str, Any] = {"strategy": ShardedBase()} if "shards" in name else {}
    options |= {"logger": CSVLogger(folder, name="metrics"), "log_every_n_steps": 1}
    run = make(folder, *CONFIGURATIONS[name].split(), callbacks=savers, max_epochs=2, **options)
    run.trainer.callbacks[:0] = ahead
    return run


def results(run: Run, folder: Path) -> dict[str, Any]:
    """The last rollouts and what a run has come to: trained, old and averaged weights, moments and counters."""
    run.trainer.save_checkpoint(folder / "end.ckpt")
    state = torch.load(folder / "end.ckpt", weights_only=True)
    loop = state["loops"]["fit_loop"]["state_dict"]
    counters = {name: loop[name] for name in ("iterations_done", "evaluations", "samples")}
    parts = {name: state[name] for name in ("epoch", "global_step", "state_dict", "optimizer_states")}
    return parts | counters | {"average": state["callbacks"]["WeightEMA"], "rollouts": run.loop.rollouts._asdict()}


def logged(folder: Path, steps: int) -> list[dict[str, str]]:
    """The rows of the metrics after so many iterations."""
    with open(folder / "metrics/version_0/metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["step"]) > steps]


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def straight_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Straight]:
    """straight_of(name) is the run of a configuration that saves at all its moments."""

    @cache
    def straight(name: str) -> Straight:
        folder = tmp_path_factory.mktemp("straight")
        savers = [
            make_saver(folder / when, "{epoch}", save_top_k=-1)
            for when, make_saver in SAVES.items()
            if (name, when) in MOMENTS
        ]
        run = fit(started(folder, name, *savers, ahead=(SaveWithin(folder),)))
        return Straight(run, folder, results(run, folder))

    return straight


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning misses the savers; FSDP2 warns of what one rank has not
@pytest.mark.parametrize(("name", "when"), MOMENTS)
def test_a_resume_is_exact(name: str, when: str, straight_of: Callable[[str], Straight], tmp_path: Path) -> None:
    straight = straight_of(name)
    run = fit(started(tmp_path, name), straight.folder / when / "epoch=0.ckpt")
    assert run.recorder.events[0] == "requantize"
    assert isinstance(run.module.transformers.trained.transformer, FSDPModule) == ("shards" in name)
    assert differences(results(run, tmp_path), straight.results) == []
    assert logged(tmp_path, 0) == logged(straight.folder, 1) != []
    (row, *_), (expected, *_) = (each.module.evaluation.history[::-1] for each in (run, straight.run))
    assert all(row[name] == expected[name] for name in ("iteration", "evaluations", "samples", "shapes"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_run_resumes_from_between_two_steps_of_an_iteration(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False)
    fit(started(tmp_path, "prefix, two optimiser steps", saver))
    assert [iterations_done(read_checkpoint(tmp_path / f"{step}.ckpt")) for step in (2, 4)] == [1, 2]
    for step, done in ((1, "0.5"), (3, "1.5")):
        message = rf"ckpt=.*{step}.ckpt is invalid.* number of iterations, {done}, as it was saved between two steps"
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path / f"{step}.ckpt")


class StopAfterAStep(Callback):
    """Asks for the end of the run after the first optimiser step, and saves where the last checkpoint is saved."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop |= trainer.global_step == 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.file)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_stopped_run_takes_all_steps_of_its_iteration(tmp_path: Path) -> None:
    run = fit(started(tmp_path, "prefix, two optimiser steps", StopAfterAStep(tmp_path / "last.ckpt")))
    assert (run.trainer.global_step, run.loop.iterations_done) == (2, 1)
    assert iterations_done(read_checkpoint(tmp_path / "last.ckpt")) == 1


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The places where two trees are not equal, tensors bit for bit."""
    leaves, others = (dict(tree_flatten_with_path(tree)[0]) for tree in (actual, expected))
    assert leaves.keys() == others.keys()
    return [
        keystr(place)
        for place, value in leaves.items()
        if not (torch.equal(value, others[place]) if isinstance(value, Tensor) else value == others[place])
    ]
