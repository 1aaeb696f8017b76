"""The loop on a small FLUX.1: order of events, what is logged, failures. Detects changes of Lightning's loops."""

import math
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from nano import MAX_WORDS, save_nano, save_preview_decoder
from torch import Tensor

from solrl_lightning.build import build_training
from solrl_lightning.callbacks import ema
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.objectives.advantages import group_advantages
from solrl_lightning.objectives.awm import AWMLoss
from solrl_lightning.objectives.base import Loss, Objective
from solrl_lightning.objectives.grpo import GRPOLoss
from solrl_lightning.objectives.nft import NFT, NFTLoss
from solrl_lightning.objectives.pepg import PEPGLoss
from solrl_lightning.objectives.ram import RAMLoss
from solrl_lightning.options.run import Run as Options
from solrl_lightning.quantization.backends import Hardware
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.weighted import WeightedRewards, gdpo
from solrl_lightning.rollout.records import Candidates, Rollouts, TrainingBatch
from solrl_lightning.rollout.select import select_contrastive
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.study.elsewhere import TABLES
from solrl_lightning.tasks.train import planned_seconds
from solrl_lightning.training.loop import ExploreTrainLoop
from solrl_lightning.training.module import SolRLModule

SMALL = (
    "family.pool=5 family.keep=3 family.compile=false model.full_steps=3 model.preview_steps=2 model.eval_steps=1 "
    "model.micro_batch=4 prompts_per_iteration=2 data.eval_prompts=2 data.eval_images=1 evaluation.every=1"
).split()
MICRO_BATCHES = 2  # 2 prompts x 3 kept x 1 timestep = 6 rows in micro-batches of at most 4


@cache
def pipeline() -> tempfile.TemporaryDirectory[str]:
    """The folder of the model, which is removed with this process."""
    folder = tempfile.TemporaryDirectory()
    save_nano(Path(folder.name))
    return folder


@cache
def composed(*overrides: str) -> Options:
    folder = pipeline().name
    model = [f"model.pretrained={folder}", f"model.embeddings={folder}/embeddings"]
    model += [f"model.max_sequence_length={MAX_WORDS}"]
    with ConfigTree() as tree:
        return Options.of(application_config(tree.compose([*SMALL, *model, *overrides]), "run"))


class Recorder(Callback):
    """Records the events of a run, its stages, learning rates, gradients, metrics and seconds."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.candidates: list[Candidates] = []  # of every stage that ran
        self.stages: list[list[Stage]] = []  # of every optimiser step, as are the rates
        self.rates: list[float] = []
        self.metrics: list[dict[str, float]] = []  # of every iteration
        self.seconds: list[float] = []  # of the stages, at the begin and the end of every evaluation

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for name in ("requantize", "run_stage", "training_step"):
            setattr(pl_module, name, self._recorded(trainer, name, getattr(pl_module, name)))

    def _recorded(self, trainer: Any, name: str, method: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.events.append(args[0].name if name == "run_stage" else name)
            result = method(*args, **kwargs)
            if name == "run_stage":
                self.candidates.append(result)
            return result

        return recorded

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.cost_before = trainer.fit_loop.cost()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.events.append("step")
        self.stages.append(trainer.fit_loop.stages)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in pl_module.trained_parameters()])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        stages = trainer.fit_loop.stopwatch.seconds
        self.seconds.append(sum(stages.get(stage, 0) for stage in ("requantize", "explore", "regenerate", "train")))

    on_validation_end = on_validation_start


class Run(NamedTuple):
    module: SolRLModule
    trainer: Trainer
    loop: ExploreTrainLoop
    recorder: Recorder


def make(tmp_path: Path, *overrides: str, callbacks: tuple[Callback, ...] = (), **trainer_args: Any) -> Run:
    """A run in ``tmp_path``, before its first iteration."""
    cfg, recorder = composed(*overrides), Recorder()
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "gradient_clip_val": 1.0}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(
        **(defaults | quiet | trainer_args),
        default_root_dir=tmp_path,
        enable_checkpointing=checkpoints,
        callbacks=[Requantize(), WeightEMA(), *callbacks, recorder],
    )
    module, loop = build_training(cfg, prompt_sets(cfg), trainer)
    return Run(module, trainer, loop, recorder)


def fit(run: Run, ckpt: Path | None = None) -> Run:
    held_out = RankPrompts(run.module.evaluation.prompts, 0, 1)
    run.trainer.fit(run.module, run.loop.loader, held_out, ckpt_path=ckpt, weights_only=True)
    return run


class RequantizeBefore(Requantize):
    """Requantises before the iterations below ``end`` only."""

    def __init__(self, end: int) -> None:
        self.end = end

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch < self.end:
            super().on_train_epoch_start(trainer, pl_module)


@pytest.mark.parametrize(("end", "weights"), [(0, "None"), (1, "0")])
def test_roll_out_with_weights_of_another_iteration_is_an_error(tmp_path: Path, end: int, weights: str) -> None:
    run = make(tmp_path, "family=diffusionnft", max_epochs=2)
    run.trainer.callbacks[0] = RequantizeBefore(end)
    with pytest.raises(UserError, match=f"after {end} iterations the sampler merged has the weights of {weights}"):
        fit(run)


class Accumulates(Callback):
    """Joins the micro-batches of two optimiser steps."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.accumulate_grad_batches *= 2


def test_callback_that_changes_the_micro_batches_of_a_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="accumulate_grad_batches=.* a callback has set it, .* takes all its"):
        fit(make(tmp_path, "family=diffusionnft", max_epochs=1, callbacks=(Accumulates(),)))


def train(folder: Path, *overrides: str, ckpt: Path | None = None, max_epochs: int = 1, **options: Any) -> Run:
    return fit(make(folder, *overrides, max_epochs=max_epochs, **options), ckpt)


def saved(run: Run, folder: Path) -> Path:
    run.trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


def weights(module: SolRLModule) -> Tensor:
    """Return the learned state of a run: the trained, the old and the averaged adapter."""
    states = [module.policy_state(name) for name in ("default", "old", "ema")]
    return torch.cat([value.flatten() for state in states for value in state.values()])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run of one iteration, for tests that change nothing of it, and its checkpoint."""
    folder = tmp_path_factory.mktemp("finished")
    run = train(folder)
    return run, saved(run, folder)


class Straight(NamedTuple):
    """Three iterations, and the decays of their steps."""

    run: Run
    decays: dict[str, list[float]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    run, decays = make(tmp_path_factory.mktemp("straight"), max_epochs=3), {"old": [], "average": []}
    update_average, old_decay = ema.update_average, run.module.old_decay

    def update(average: Any, current: Any, decay: float) -> None:
        decays["average"].append(decay)
        update_average(average, current, decay)

    run.module.old_decay = lambda step: decays["old"].append(old_decay(step)) or decays["old"][-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ema, "update_average", update)
        fit(run)
    return Straight(run, decays)


def test_old_policy_and_average_use_decays_of_steps_1_2_3(straight: Straight) -> None:
    assert straight.decays["old"] == pytest.approx([0.001, 0.002, 0.003])
    assert straight.decays["average"] == pytest.approx([2 / 11, 3 / 12, 4 / 13])


def test_an_evaluation_records_what_was_spent_until_then(straight: Straight) -> None:
    # 2 prompts: 5 candidates x 2 steps, 3 kept x 3 steps, and 3 rows of the policy, the old policy and the reference
    each = 2 * (5 * 2 + 3 * 3 + 3 * 3)
    images = 2 * (5 + 3)  # 5 explored and 3 regenerated for each prompt
    history, seconds = straight.run.module.evaluation.history, straight.run.recorder.seconds
    assert [row["evaluations"] for row in history] == [each, 2 * each, 3 * each]
    assert [row["samples"] for row in history] == [images, 2 * images, 3 * images]
    assert 0 < history[0]["seconds"] < history[1]["seconds"] < history[2]["seconds"]
    for before, row, after in zip(seconds[::2], history, seconds[1::2], strict=True):
        assert before <= row["seconds"] <= after


def test_single_stage_family_samples_pool_once(tmp_path: Path) -> None:
    run = train(tmp_path, "family=naive_scaling")
    assert run.recorder.events == ["requantize", "regenerate", *["training_step"] * MICRO_BATCHES, "step"]
    assert run.loop.explored is None
    assert torch.equal(run.loop.rollouts.proxy_merits, run.loop.rollouts.rewards)


def test_regenerated_samples_have_same_seeds_and_new_rewards(finished: tuple[Run, Path]) -> None:
    loop = finished[0].loop
    assert loop.explored is not None
    assert not torch.equal(loop.rollouts.proxy_merits, loop.rollouts.rewards)
    assert all(len(set(seeds)) == 3 for seeds in loop.rollouts.seeds.tolist())
    chosen = select_contrastive(loop.explored.rewards, 3)
    assert torch.equal(loop.rollouts.seeds, loop.explored.seeds.gather(1, chosen))
    assert torch.equal(loop.rollouts.proxy_merits, loop.explored.rewards.gather(1, chosen))
    assert torch.equal(loop.rollouts.advantages, group_advantages(loop.rollouts.rewards))
    assert not torch.equal(loop.rollouts.advantages, group_advantages(loop.rollouts.proxy_merits))


class Channel(Reward):
    """The mean of a channel, in some unit."""

    name = "channel"

    def __init__(self, channel: int, unit: float) -> None:
        self.channel, self.unit = channel, unit

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.unit * images[:, self.channel].mean((1, 2))


def rollouts_of(folder: Path, family: str, unit: float) -> tuple[Rollouts, Tensor]:
    """The rollouts of an iteration with a reward of unit 1 and another one, and the weighted sums of its pool."""
    run = make(folder, "reward.combine=gdpo", f"family={family}", max_epochs=1)
    both = {"red": Channel(0, 1.0), "blue": Channel(2, unit)}
    rewards = WeightedRewards(both, {"red": 1.0, "blue": 1.0}, combine=run.module.rewards.combine)
    run.module.rewards = run.module.evaluation.rewards = rewards
    fit(run)
    return run.loop.rollouts, run.loop.rollouts.rewards if run.loop.explored is None else run.loop.explored.rewards


@pytest.mark.parametrize("family", ["sol_rl", "naive_scaling"])
def test_with_gdpo_the_unit_of_a_reward_changes_neither_selection_nor_advantages(tmp_path: Path, family: str) -> None:
    ours, pool = rollouts_of(tmp_path / "1", family, 1.0)
    other, other_pool = rollouts_of(tmp_path / "2", family, 100.0)
    assert torch.equal(ours.seeds, other.seeds) and torch.equal(ours.x0, other.x0)
    torch.testing.assert_close(ours.advantages, other.advantages, rtol=1e-4, atol=1e-4)
    expected = group_advantages(gdpo(ours.scores, torch.ones(2)))  # over those kept, not over the pool
    assert torch.equal(ours.advantages, expected)
    for rollouts in (ours, other):  # what is logged is the raw sum
        assert torch.equal(rollouts.rewards, rollouts.scores.sum(-1))
    assert pool.std() < 0.1 * other_pool.std()


class Regenerated(Callback):
    """Samples the kept seeds again from their noise, and counts the rows of the rollout's forward passes."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.rows = 0
        self.velocity = pl_module.model.velocity
        pl_module.model.velocity = self.counted

    def counted(self, transformer: Any, x: Tensor, *args: Any) -> Tensor:
        self.rows += len(x)
        return self.velocity(transformer, x, *args)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            pl_module.model.velocity = self.velocity
            loop: Any = trainer.fit_loop
            self.rollouts, self.explored = loop.rollouts, loop.explored
            self.again = loop.probe(loop.rollouts.prompts, loop.rollouts.seeds, with_states=True)


def test_prefix_family_resumes_kept_trajectories(tmp_path: Path) -> None:
    options, check = ("model.full_steps=5", "model.prefix_steps=2", "model.solver=dpm2"), Regenerated()
    run = train(tmp_path, "family=prefix", *options, callbacks=(check,))
    assert "shadow" not in run.module.transformers.replicas
    assert check.rows == 2 * (5 * 2 + 3 * 3)  # 2 prompts; 5 candidates for 2 steps, 3 kept for the other 3
    torch.testing.assert_close(check.rollouts.x0, check.again.x0, rtol=0, atol=0.05)
    torch.testing.assert_close(check.rollouts.rewards, check.again.rewards, rtol=0, atol=0.02)
    assert not torch.equal(check.rollouts.proxy_merits, check.rollouts.rewards)


def test_race_resumes_survivors_of_each_rung(tmp_path: Path) -> None:
    rungs, check = "family.explore.rungs=[{step:1,keep:4},{step:3,keep:3}]", Regenerated()
    run = train(tmp_path, "family=race", rungs, "model.full_steps=5", "model.solver=dpm2", callbacks=(check,))
    assert check.rows == 2 * (5 * 1 + 4 * 2 + 3 * 2)  # 2 prompts
    first, second, last = run.recorder.candidates[:3]
    four = first.take(select_contrastive(first.rewards, 4))
    assert torch.equal(second.seeds, four.seeds)
    assert torch.equal(last.seeds, second.take(select_contrastive(second.rewards, 3)).seeds)
    torch.testing.assert_close(check.rollouts.x0, check.again.x0, rtol=0, atol=0.05)


def test_regeneration_starts_from_noise_after_early_stop_of_shadow(tmp_path: Path) -> None:
    options, check = ("model.full_steps=5", "model.preview_steps=3"), Regenerated()
    train(tmp_path, "+family.explore.stop_after=1", *options, callbacks=(check,))
    assert check.rows == 2 * (5 * 1 + 3 * 5)
    torch.testing.assert_close(check.rollouts.x0, check.again.x0, rtol=0, atol=0.05)


def test_gradient_and_metrics_do_not_depend_on_the_size_of_micro_batches(tmp_path: Path) -> None:
    options = ("prompts_per_iteration=1", "family.keep=5", "objective=flow_grpo", "objective.kl_weight=0.1")
    sizes = [f"model.micro_batch={size}" for size in (4, 10)]  # padded, and all rows in one
    runs = [train(tmp_path, *options, size, gradient_clip_val=None).recorder for size in sizes]
    # bf16 activations: the batch size changes the order of sums, which may flip a rounding
    first, second = (run.gradient for run in runs)
    assert torch.linalg.vector_norm(second - first) <= 0.02 * torch.linalg.vector_norm(first)
    first, second = ({k: v for k, v in run.metrics[0].items() if k.startswith("train/")} for run in runs)
    assert first == pytest.approx(second, rel=0.02, abs=1e-5)


@pytest.mark.parametrize("kl_weight", [0.0, 1e-4])
def test_micro_batch_runs_one_forward_per_velocity(tmp_path: Path, kl_weight: float) -> None:
    run = make(tmp_path, f"objective.kl_weight={kl_weight}", max_epochs=1)
    module, velocity, passes = run.module, run.module.model.velocity, []

    def recorded(transformer: Any, *args: Any) -> Tensor:
        if run.loop.stopwatch.current == "train":
            passes.append(transformer)
        return velocity(transformer, *args)

    module.model.velocity = recorded  # type: ignore[method-assign]
    fit(run)
    with module.transformers.velocity_models["reference"]() as base:
        reference = [base] if kl_weight else []
    assert passes == [module.transformer, *reference, module.transformer] * MICRO_BATCHES


def test_the_scheduler_sets_the_rate_of_every_step_also_after_a_resume(tmp_path: Path) -> None:
    def rates(lr: float, *iterations: float) -> Any:
        return pytest.approx([lr * (1 + math.cos(math.pi * iteration / 4)) / 2 for iteration in iterations])

    options = ("scheduler=cosine", "scheduler.iterations=4", "optimizer.lr=0.01")
    first = train(tmp_path, *options)
    assert first.recorder.rates == rates(0.01, 0)
    checkpoint = saved(first, tmp_path)
    more = ("optimizer_steps=2", "optimizer.lr=0.02")
    branch = train(tmp_path, *options, *more, ckpt=checkpoint, max_epochs=3)
    assert branch.recorder.rates == rates(0.02, 1, 1.5, 2, 2.5)
    again = train(tmp_path, *options, *more, ckpt=saved(branch, tmp_path), max_epochs=4)
    assert again.recorder.rates == rates(0.02, 3, 3.5)


def test_few_evaluations_take_at_most_a_twentieth_of_the_passes(tmp_path: Path) -> None:
    run = train(tmp_path, "evaluation.every=auto", "model.eval_steps=4", "data.eval_images=8", max_epochs=2)
    assert [row["iteration"] for row in run.module.evaluation.history] == [2]
    passes, cost = run.module.evaluation.passes, run.loop.cost_of_iteration()["evaluations"]
    every = run.loop.evaluate_every
    assert every * cost >= 20 * passes > (every - 1) * cost and every > 20
    run.module.evaluation.images = 1
    assert run.loop.evaluate_every == 20


def test_an_evaluation_is_planned_by_the_estimates_of_its_model_and_gpu(tmp_path: Path) -> None:
    run, h100 = make(tmp_path, "data.eval_images=4"), Hardware("", capability=(9, 0))
    cfg, table = composed("model.resolution=512"), TABLES["flux1_h100"]
    cfg.model.pretrained = "FLUX.1-dev"
    assert planned_seconds(cfg, run.module, Hardware("", "cpu"), ranks=1) is None
    assert planned_seconds(cfg, run.module, h100, ranks=2) == (8 * table.bf16 + 8 * table.image) / 2


def test_every_second_iteration_and_the_last_one_are_evaluated(tmp_path: Path) -> None:
    run = train(tmp_path, "evaluation.every=2", max_epochs=3)
    assert [row["iteration"] for row in run.module.evaluation.history] == [2, 3]
    monitored, last = run.trainer.callback_metrics, run.module.evaluation.history[-1]
    for name, value in {"shapes": last["shapes"], **last["parts"]}.items():
        assert float(monitored[f"eval/{name}"]) == pytest.approx(value, nan_ok=True), "callbacks may monitor each"


LOSSES = {"nft": NFTLoss, "awm": AWMLoss, "ram": RAMLoss, "pepg": PEPGLoss, "flow_grpo": GRPOLoss}


@pytest.mark.parametrize("objective", LOSSES)
def test_all_metrics_of_objective_are_logged(tmp_path: Path, objective: str) -> None:
    (metrics,) = train(tmp_path, f"objective={objective}", "family=diffusionnft").recorder.metrics
    expected = {f"train/{name}" for name in LOSSES[objective]._fields if name != "rows"} | {"train/grad_norm"}
    expected |= {"train/first_ratio_error"} if objective == "flow_grpo" else set()
    assert metrics["lr"] == pytest.approx(2e-3)
    assert {name for name in metrics if name.startswith("train/")} == expected


@pytest.mark.parametrize("every", [1, 2])
def test_metrics_are_means_over_the_rows_that_have_them_without_padding(tmp_path: Path, every: int) -> None:
    options = ("prompts_per_iteration=1", "family.keep=5", f"objective.reference_every={every}")  # 5 rows in 3 + 3
    run, seen = make(tmp_path, *options, max_epochs=3), []

    class Recording(NFT):
        def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
            loss = super().__call__(velocity, batch, **others)
            seen.append((len(batch.seeds), loss.metrics.get("kl"), loss.per_sample.detach()))
            return Loss(loss.per_sample, loss.metrics | {"square": batch.advantage.square().mean()})

    run.module.objective = Recording(**vars(run.module.objective))
    fit(run)
    logged, (*_, first, second) = run.recorder.metrics[-1], seen
    assert (first[0], second[0]) == (3, 2)
    assert logged["train/square"] == pytest.approx(float(run.loop.rollouts.advantages.square().mean()))
    assert logged["train/loss"] == pytest.approx(float(torch.cat([first[2], second[2]]).mean()))
    kl = first[1] if every == 2 else (3 * first[1] + 2 * second[1]) / 5
    assert kl > 0 and logged["train/kl"] == pytest.approx(float(kl))


def test_drift_is_exactly_0_only_where_the_old_policy_is_the_trained_one(tmp_path: Path, straight: Straight) -> None:
    """The premise of the alarm no_drift."""
    assert [metrics["train/drift"] != 0 for metrics in straight.run.recorder.metrics] == [False, True, True]
    for option, moves in {"old_policy.decay_type=0": False, "optimizer_steps=2": True}.items():
        run = train(tmp_path, "family=diffusionnft", option, max_epochs=2)
        assert [metrics["train/drift"] != 0 for metrics in run.recorder.metrics] == [moves] * 2


GRPO = {
    "diffusionnft": ("objective=flow_grpo", "model.full_steps=4"),
    "naive_scaling": ("objective=flow_grpo", "model.full_steps=4", "objective.window=2", "objective.noise_level=0.9"),
    "prefix": ("objective=dance_grpo", "model.full_steps=4", "model.prefix_steps=2", "objective.kl_weight=0.1"),
}


@pytest.mark.parametrize("family", ["naive_scaling", "prefix"])
def test_first_ratios_are_one_where_the_policy_samples(tmp_path: Path, family: str) -> None:
    run = make(tmp_path, f"family={family}", *GRPO[family], max_epochs=2)
    before = weights(run.module)
    fit(run)
    errors = [metrics["train/first_ratio_error"] for metrics in run.recorder.metrics]
    assert len(errors) == 2 and max(errors) <= 1e-5 and not torch.equal(weights(run.module), before)
    trained, old = (run.module.policy_state(name) for name in ("default", "old"))
    assert all(torch.equal(trained[name], old[name]) for name in trained)
    stochastic, recorded = run.loop.objective.transitions(4, 1), run.loop.rollouts.recorded_steps
    assert recorded is not None and recorded.log_probs is not None and recorded.first == stochastic.start
    assert recorded.log_probs.shape == (2, run.loop.rollouts.seeds.shape[1], len(stochastic))


def test_first_ratios_of_merged_weights_are_logged(tmp_path: Path) -> None:
    options = ("family=diffusionnft", *GRPO["diffusionnft"], "training_sampler=merged")
    run = train(tmp_path, *options, max_epochs=2)
    assert 0 < run.recorder.metrics[-1]["train/first_ratio_error"] < 0.01


def test_stochastic_samples_are_functions_of_their_seeds(tmp_path: Path) -> None:
    check = Regenerated()
    train(tmp_path, "family=diffusionnft", *GRPO["diffusionnft"], callbacks=(check,))
    path, again = check.rollouts.recorded_steps, check.again.recorded_steps
    assert torch.equal(path.x, again.x) and torch.equal(path.log_probs, again.log_probs)
    # In a step the log-probabilities differ by the mean square of the noise alone: that of no other candidate or step.
    noises = path.log_probs - path.log_probs.mean((0, 1))
    assert noises.shape[2] > 1 and noises.flatten().sort().values.diff().min() > 1e-5


@pytest.mark.parametrize(("family", "starts"), [("diffusionnft", [1, 1]), ("sol_rl", [3, 3])])
def test_candidates_of_a_prompt_share_noise_unless_the_family_explores(
    tmp_path: Path, family: str, starts: list[int]
) -> None:
    rollouts = train(tmp_path, f"family={family}", *GRPO["prefix"]).loop.rollouts
    assert rollouts.recorded_steps is not None
    assert [len(x.unique(dim=0)) for x in rollouts.recorded_steps.x[:, :, 0].flatten(2)] == starts
    assert len(rollouts.x0.flatten(0, 1).unique(dim=0)) == rollouts.seeds.numel()


class Bare(NFT):
    """A user's objective that returns no Loss."""

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Any:
        return super().__call__(velocity, batch, **others).per_sample.mean()


def test_objective_that_returns_no_loss_is_an_error_before_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExploreTrainLoop, "roll_out", None)
    message = r"objective=Bare is invalid: it must return a Loss with per_sample \[\d\] .* got Te"
    with pytest.raises(UserError, match=message):
        train(tmp_path, "objective._target_=test_loop.Bare")


class Pull(Objective):
    """A user's objective: error of the predicted image, weighted by the advantage; reads recorded transitions."""

    timestep_fraction = 0.5
    needs: ClassVar[dict[str, int]] = {}

    def transitions(self, num_steps: int, iteration: int) -> range:
        return range(1, num_steps)

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
        assert not others and batch.x_next is not None
        moved = batch.x_next - batch.x_t - (batch.sigma_next - batch.sigma)[:, None, None] * velocity
        error = moved.square().flatten(1).mean(1)
        return Loss(error * batch.advantage.sigmoid(), {"error": error.detach().mean()})


def test_custom_objective_trains_on_sampler_transitions(tmp_path: Path) -> None:
    objective = ("objective._target_=test_loop.Pull", *(f"~objective.{key}" for key in vars(NFT(1, 1, kl_weight=1))))
    run = make(tmp_path, *objective, "model.full_steps=4", max_epochs=1)
    before = weights(run.module)
    fit(run)
    recorded = run.loop.rollouts.recorded_steps
    assert recorded is not None and recorded.log_probs is None
    assert recorded.first == 1 and recorded.x.shape[:3] == (2, 3, 4)
    assert torch.equal(recorded.x[:, :, -1], run.loop.rollouts.x0)
    assert not torch.equal(weights(run.module), before)
    # The first iteration's Euler steps are the trained policy's own velocities, up to the rounding of merged weights.
    assert 0 < run.recorder.metrics[0]["train/error"] < 1e-3


def encoded_prompts(run: Run) -> list[list[Prompt]]:
    """The prompts that a run encodes from now on, without those of evaluations."""
    prompts, encode = [], run.module.model.encode

    def recorded(each: list[Prompt]) -> Any:
        if each != run.module.evaluation.prompts:
            prompts.append(each)
        return encode(each)

    run.module.model.encode = recorded  # type: ignore[method-assign]
    return prompts


def test_prompts_of_four_iterations_are_encoded_at_once_and_resumed_ones_alike(tmp_path: Path) -> None:
    run = make(tmp_path, "family=diffusionnft", "evaluation.every=5", max_epochs=5)
    encode, windows, loop = run.module.model.encode, encoded_prompts(run), run.loop
    fit(run)
    expected = [[t for i in range(first, first + 4) for t in loop.schedule.for_iteration(i)] for first in (0, 4)]
    assert windows == [list(dict.fromkeys(prompts)) for prompts in expected]
    for iteration in (5, 2):
        prompts = loop.schedule.for_iteration(iteration)
        encoded = loop._encode(iteration, prompts)
        assert encoded.prompts == prompts
        for name, value in encode(prompts).items():
            torch.testing.assert_close(encoded.conditioning[name], value)


def test_probe_uses_the_encodings_of_its_iteration(tmp_path: Path) -> None:
    run = make(tmp_path, callbacks=(Regenerated(),), max_epochs=1)
    windows = encoded_prompts(run)
    fit(run)
    assert len(windows) == 1


def test_preview_decoder_is_used_for_exploration_only(tmp_path: Path) -> None:
    tiny = save_preview_decoder(tmp_path / "tiny", channels=8, compression=4)
    run = make(tmp_path, f"model.preview_decoder={tiny}", "family.explore.decoder=preview", max_epochs=1)
    images: Counter[tuple[str, str]] = Counter()

    def counted(method: str, decode: Any) -> Any:
        def decoded(x: Tensor) -> Tensor:
            images[run.loop.stopwatch.current, method] += len(x)
            return decode(x)

        return decoded

    for method in ("decode", "preview"):
        setattr(run.module.model, method, counted(method, getattr(run.module.model, method)))
    fit(run)
    assert images == {("explore", "preview"): 2 * 5, ("regenerate", "decode"): 2 * 3, ("evaluate", "decode"): 2}


def test_checkpoint_holds_adapters_only(finished: tuple[Run, Path]) -> None:
    state = torch.load(finished[1], weights_only=True)["state_dict"]
    assert all(".lora_A.default." in k or ".lora_B.default." in k or ".old." in k for k in state)
    trained = sum(parameter.numel() for parameter in finished[0].module.trained_parameters())
    assert sum(value.numel() for value in state.values()) == 2 * trained


def test_checkpoint_of_another_lora_rank_raises(tmp_path: Path, finished: tuple[Run, Path]) -> None:
    with pytest.raises(UserError, match="weights do not fit"):
        train(tmp_path, "model.lora.rank=16", ckpt=finished[1], max_epochs=2)


def test_resumed_run_has_configured_optimizer_options_and_the_cost_so_far(
    tmp_path: Path, finished: tuple[Run, Path]
) -> None:
    changed = ("optimizer.lr=1e-5", "optimizer.weight_decay=0.5", "optimizer.betas=[0.5,0.9]")
    run = train(tmp_path, *changed, ckpt=finished[1], max_epochs=2)
    (state,) = torch.load(saved(run, tmp_path), weights_only=True)["optimizer_states"]
    (group,) = state["param_groups"]
    assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (1e-5, 0.5, (0.5, 0.9))
    assert {float(of_one["step"]) for of_one in state["state"].values()} == {2.0}
    assert run.recorder.cost_before == finished[0].loop.cost()


def test_optimizer_gets_lists_of_which_a_checkpoint_can_be_made(tmp_path: Path) -> None:
    run = train(tmp_path, "optimizer._target_=torch.optim.NAdam")
    (state,) = torch.load(saved(run, tmp_path), weights_only=True)["optimizer_states"]
    assert list(state["param_groups"][0]["betas"]) == [0.9, 0.999]


def test_nan_reward_stops_run_and_names_prompt_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, max_epochs=1)
    nan = lambda images, prompts: images[:, 0, 0, 0] * torch.nan  # noqa: E731
    monkeypatch.setattr(run.module.rewards.rewards["shapes"], "score", nan)
    before = weights(run.module)
    with pytest.raises(NonFiniteError, match=r"0 of 5 candidates have a finite reward for the prompt 'a .*'"):
        fit(run)
    assert torch.equal(weights(run.module), before)
    explore, regenerate = run.loop.stages
    run.loop.stages = [explore.but(name="regenerate")]
    with pytest.raises(NonFiniteError, match=r"0 of 5 candidates have a finite reward for the prompt 'a .*'"):
        run.loop.roll_out()


def test_sample_without_a_reward_trains_with_advantage_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, max_epochs=1)
    shapes = run.module.rewards.rewards["shapes"]
    score, withheld, regenerates = shapes.score, [], []

    def judge(images: Tensor, prompts: list[str]) -> Tensor:
        scores = score(images, prompts)
        if regenerates and (not withheld or withheld[0].equal(images[0])):
            withheld[:] = [images[0].clone()]
            scores[0] = torch.nan
        return scores

    monkeypatch.setattr(shapes, "score", judge)
    run_stage = type(run.module).run_stage

    def watched(module: SolRLModule, stage: Stage, *args: Any) -> Candidates:
        regenerates[:] = [stage] if stage.name == "regenerate" else []
        return run_stage(module, stage, *args)

    monkeypatch.setattr(type(run.module), "run_stage", watched)
    fit(run)
    advantages, rewards = run.loop.rollouts.advantages, run.loop.rollouts.rewards
    assert len(withheld) == 1 and rewards.isfinite().all() and advantages.isfinite().all()
    assert advantages.abs().min() < 1e-6 < advantages.abs().max()
    assert run.trainer.global_step > 0


def test_nan_image_is_not_selected_and_ends_the_run_if_it_is_to_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, max_epochs=1)
    decode = run.module.model.decode

    def broken(x0: Tensor) -> Tensor:
        images = decode(x0)
        images[0] = torch.nan
        return images

    monkeypatch.setattr(run.module.model, "decode", broken)
    with pytest.raises(NonFiniteError, match=r"the image .* has NaN for the prompt 'a .*' with seed \d+"):
        fit(run)
    assert "regenerate" in run.loop.stopwatch.seconds


class EndsIn(Callback):
    """Raises StopIteration in the hook of this name, in the second iteration."""

    def __init__(self, hook: str) -> None:
        def end(trainer: Trainer, *args: Any) -> None:
            if trainer.current_epoch == 1:
                raise StopIteration

        setattr(self, hook, end)


@pytest.mark.parametrize(
    ("hook", "when"),
    [
        ("on_train_epoch_start", "after 1 of 3 iterations"),
        ("on_train_batch_start", "after 0 of 1 optimiser steps of an iteration"),
        ("on_train_epoch_end", "after 2 of 3 iterations"),
    ],
)
def test_callback_that_ends_the_loops_of_lightning_is_an_error(tmp_path: Path, hook: str, when: str) -> None:
    run = make(tmp_path, callbacks=(EndsIn(hook),), max_epochs=3)
    with pytest.raises(UserError, match=f"it ended training {when}"):
        fit(run)


def test_roll_out_that_raises_stop_iteration_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, max_epochs=1)
    monkeypatch.setattr(run.loop, "roll_out", lambda: next(iter([])))
    with pytest.raises(RuntimeError, match="StopIteration"):
        fit(run)


def test_nan_loss_stops_run_before_optimizer_step(tmp_path: Path) -> None:
    run = make(tmp_path, max_epochs=1)
    run.module.policy_state("default")["transformer_blocks.0.attn.to_q.lora_A.weight"].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="loss of objective=NFT is nan for the prompt"):
        fit(run)
    assert run.trainer.global_step == 0


def test_more_devices_than_prompts_are_an_error_before_rewards_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_lightning.build.build_tried_rewards", None)
    cfg = composed("prompts_per_iteration=1")
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="prompts_per_iteration=.* is invalid: every device needs at least one prompt"):
        build_training(cfg, prompt_sets(cfg), trainer)


def test_only_policy_is_trained_and_old_policy_follows(tmp_path: Path) -> None:
    run = make(tmp_path, "old_policy.decay_type=0", max_epochs=1)
    module = run.module
    frozen = {name: p.detach().clone() for name, p in module.named_parameters() if ".lora_" not in name}
    fit(run)
    parameters = dict(module.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in frozen.items())
    trained, old = module.policy_state("default"), module.policy_state("old")
    assert all(torch.equal(trained[name], old[name]) for name in trained)
    assert max(value.abs().max() for name, value in trained.items() if "lora_B" in name) > 0
    assert module.distances["old_distance"] > 0  # of the iteration, before the old policy followed


def test_run_ends_with_an_evaluation_at_the_end_of_the_iteration_that_reaches_max_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExploreTrainLoop, "cost", lambda self: {"seconds": 7 * self.iterations_taken()})
    options = ("max_seconds=10", "optimizer_steps=2", "evaluation.every=100")
    run = train(tmp_path, *options, max_epochs=9)
    assert run.loop.iterations_done == 2 and run.loop.is_time_up
    assert [row["iteration"] for row in run.module.evaluation.history] == [2]


@pytest.mark.parametrize(("stop_after", "ratio"), [(None, 1.0), (4, 10 / 6)])
def test_without_selection_the_last_stage_takes_all_its_steps(stop_after: int | None, ratio: float) -> None:
    explore = Stage(sampler="merged", steps=10, stop_after=stop_after).but(keep=24)
    loop = SimpleNamespace(keep=24, pool=96, stages=[explore, Stage(sampler="merged", steps=10)])
    assert ExploreTrainLoop.passes_without_selection.fget(loop) == pytest.approx(ratio)
