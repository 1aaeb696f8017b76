"""The loop on a small FLUX.1: order of events, exact resumes, failures. Detects changes of Lightning's loops."""

import csv
import functools
import math
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from nano import MAX_WORDS, save_nano, save_preview_decoder
from torch import Tensor

from solrl_lightning.build import build_loop, build_module, build_objective, levels_of
from solrl_lightning.callbacks import ema
from solrl_lightning.callbacks.adaptive_exploration import AdaptiveExploration, Rule
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.rank_correlation import RankCorrelation
from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.objectives.advantages import group_advantages
from solrl_lightning.objectives.awm import AWMLoss
from solrl_lightning.objectives.base import Loss, Objective
from solrl_lightning.objectives.grpo import GRPOLoss
from solrl_lightning.objectives.nft import NFT, NFTLoss
from solrl_lightning.objectives.pepg import PEPGLoss
from solrl_lightning.objectives.ram import RAMLoss
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.weighted import WeightedRewards, gdpo
from solrl_lightning.rollout.records import Rollouts, TrainingBatch
from solrl_lightning.rollout.select import select_contrastive
from solrl_lightning.rollout.stage import Stage, evaluations
from solrl_lightning.training.loop import ExploreTrainLoop
from solrl_lightning.training.module import SolRLModule

SMALL = [
    "family.pool=5",
    "family.keep=3",
    "family.compile=false",
    "model.full_steps=3",
    "model.preview_steps=2",
    "model.eval_steps=1",
    "model.micro_batch=4",
    "prompts_per_iteration=2",
    "data.eval_prompts=2",
    "data.eval_images=1",
]
MICRO_BATCHES = 2  # 2 prompts x 3 kept x 1 timestep = 6 rows in micro-batches of at most 4


@functools.cache
def pipeline() -> tempfile.TemporaryDirectory[str]:
    """The folder of the model, which is removed with this process."""
    folder = tempfile.TemporaryDirectory()
    save_nano(Path(folder.name))
    return folder


@functools.cache
def composed(*overrides: str) -> Run:
    model = [f"model.pretrained={pipeline().name}", f"model.max_sequence_length={MAX_WORDS}"]
    with ConfigTree() as tree:
        return Run.of(application_config(tree.compose([*SMALL, *model, *overrides]), "run"))


def make(
    tmp_path: Path, *overrides: str, callbacks: tuple[Callback, ...] = (), **trainer_args: Any
) -> tuple[SolRLModule, Trainer, ExploreTrainLoop]:
    cfg = composed(*overrides)
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "gradient_clip_val": 1.0}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(
        **(defaults | quiet | trainer_args),
        default_root_dir=tmp_path,
        enable_checkpointing=checkpoints,
        callbacks=[Requantize(), WeightEMA(), *callbacks],
    )
    objective = build_objective(cfg)
    stages = [stage for level in levels_of(cfg, objective) for stage in level]
    module = build_module(cfg, trainer.strategy.root_device, stages, objective)
    return module, trainer, build_loop(cfg, trainer, objective)


def fit(module: SolRLModule, trainer: Trainer, loop: ExploreTrainLoop, ckpt: Path | None = None) -> None:
    held_out = RankPrompts(module.evaluation.prompts, 0, 1)
    trainer.fit(module, loop.loader, held_out, ckpt_path=ckpt, weights_only=True)


def weights(module: SolRLModule) -> Tensor:
    """Return the learned state of a run: the trained, the old and the averaged adapter."""
    states = [module.adapter_state(name) for name in ("default", "old", "ema")]
    return torch.cat([value.flatten() for state in states for value in state.values()])


class Finished(NamedTuple):
    """A run of one iteration, for tests that change nothing of it."""

    module: SolRLModule
    loop: ExploreTrainLoop
    checkpoint: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    module, trainer, loop = make(folder, max_epochs=1)
    fit(module, trainer, loop)
    trainer.save_checkpoint(folder / "x.ckpt")
    return Finished(module, loop, folder / "x.ckpt")


class Recorder(Callback):
    """Records the order of events, and the prompts and seeds that every iteration explored."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.explored: list[tuple[int, list[str], list[list[int]]]] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        for owner, name in ((pl_module, "sync_samplers"), (pl_module, "run_stage"), (pl_module, "training_step")):
            setattr(owner, name, self._noting(trainer, name, getattr(owner, name)))

    def _noting(self, trainer: Trainer, name: str, method: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.events.append(args[0].name if name == "run_stage" else name)
            if name == "run_stage" and args[0] == trainer.fit_loop.stages[0]:
                self.explored.append((trainer.current_epoch, args[1].texts, args[2].tolist()))
            return method(*args, **kwargs)

        return noting

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.events.append("step")


def test_iteration_requantises_explores_regenerates_and_steps_once(tmp_path: Path) -> None:
    recorder = Recorder()
    module, trainer, loop = make(tmp_path, callbacks=(recorder,), max_epochs=2)
    fit(module, trainer, loop)
    iteration = ["sync_samplers", "explore", "regenerate", *["training_step"] * MICRO_BATCHES, "step"]
    assert recorder.events == iteration * 2
    assert trainer.global_step == trainer.current_epoch == 2


def test_old_policy_and_average_use_decays_of_steps_1_2_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged = []

    def noted(average: Any, current: Any, decay: float) -> None:
        averaged.append(decay)

    monkeypatch.setattr(ema, "update_average", noted)
    module, trainer, loop = make(tmp_path, max_epochs=3)
    decay, moved = module.old_decay, []
    module.old_decay = lambda step: moved.append(decay(step)) or moved[-1]
    fit(module, trainer, loop)
    assert moved == pytest.approx([0.001, 0.002, 0.003])
    assert averaged == pytest.approx([2 / 11, 3 / 12, 4 / 13])


def test_single_stage_family_samples_pool_once(tmp_path: Path) -> None:
    recorder = Recorder()
    module, trainer, loop = make(tmp_path, "family=naive_scaling", callbacks=(recorder,), max_epochs=1)
    fit(module, trainer, loop)
    assert recorder.events == ["sync_samplers", "regenerate", *["training_step"] * MICRO_BATCHES, "step"]
    assert loop.explored is None
    assert torch.equal(loop.rollouts.proxy_rewards, loop.rollouts.rewards)


def test_regenerated_samples_have_same_seeds_and_new_rewards(finished: Finished) -> None:
    loop = finished.loop
    assert loop.explored is not None
    for seeds, pool in zip(loop.rollouts.seeds.tolist(), loop.explored.seeds.tolist(), strict=True):
        assert len(set(seeds)) == 3 and set(seeds) <= set(pool)
    assert not torch.equal(loop.rollouts.proxy_rewards, loop.rollouts.rewards)
    chosen = select_contrastive(loop.explored.rewards, 3)
    assert torch.equal(loop.rollouts.seeds, loop.explored.seeds.gather(1, chosen))
    assert torch.equal(loop.rollouts.proxy_rewards, loop.explored.rewards.gather(1, chosen))
    assert torch.equal(loop.rollouts.advantages, group_advantages(loop.rollouts.rewards))
    assert not torch.equal(loop.rollouts.advantages, group_advantages(loop.rollouts.proxy_rewards))


class Channel(Reward):
    """The mean of a channel, in some unit."""

    name = "channel"

    def __init__(self, channel: int, unit: float) -> None:
        self.channel, self.unit = channel, unit

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.unit * images[:, self.channel].mean((1, 2))


def rollouts_of(tmp_path: Path, combine: str, unit: float, family: str = "sol_rl") -> tuple[Rollouts, Tensor]:
    """The rollouts of an iteration with a reward of unit 1 and another one, and the weighted sums of its pool."""
    module, trainer, loop = make(tmp_path, f"reward.combine={combine}", f"family={family}", max_epochs=1)
    both = {"red": Channel(0, 1.0), "blue": Channel(2, unit)}
    rewards = WeightedRewards(both, {"red": 1.0, "blue": 1.0}, combine=module.rewards.combine)
    module.rewards = module.evaluation.rewards = rewards
    fit(module, trainer, loop)
    return loop.rollouts, loop.rollouts.rewards if loop.explored is None else loop.explored.rewards


@pytest.mark.parametrize("family", ["sol_rl", "naive_scaling"])
def test_with_gdpo_the_unit_of_a_reward_changes_neither_selection_nor_advantages(tmp_path: Path, family: str) -> None:
    ours, pool = rollouts_of(tmp_path / "1", "gdpo", 1.0, family)
    other, other_pool = rollouts_of(tmp_path / "2", "gdpo", 100.0, family)
    assert torch.equal(ours.seeds, other.seeds) and torch.equal(ours.x0, other.x0)
    torch.testing.assert_close(ours.advantages, other.advantages, rtol=1e-4, atol=1e-4)
    expected = group_advantages(gdpo(ours.scores, torch.ones(2)))  # over those kept, not over the pool
    assert torch.equal(ours.advantages, expected)
    for rollouts in (ours, other):  # what is logged is the raw sum
        assert torch.equal(rollouts.rewards, rollouts.scores.sum(-1))
    assert pool.std() < 0.1 * other_pool.std()


def test_with_the_sum_the_reward_of_the_largest_unit_decides(tmp_path: Path) -> None:
    ours, _ = rollouts_of(tmp_path / "1", "sum", 0.001)
    other, _ = rollouts_of(tmp_path / "2", "sum", 1000.0)
    assert not torch.equal(ours.seeds, other.seeds)
    assert torch.equal(other.advantages, group_advantages(other.rewards))
    torch.testing.assert_close(other.advantages, group_advantages(other.scores[..., 1]), rtol=0, atol=0.01)
    torch.testing.assert_close(ours.advantages, group_advantages(ours.scores[..., 0]), rtol=0, atol=0.01)


class Regenerated(Callback):
    """Samples the kept seeds again from their noise, and counts the rows of the rollout's forward passes."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.rows = 0
        self.velocity = pl_module.policy.velocity
        pl_module.policy.velocity = self.counted

    def counted(self, transformer: Any, x: Tensor, *args: Any) -> Tensor:
        self.rows += len(x)
        return self.velocity(transformer, x, *args)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            pl_module.policy.velocity = self.velocity
            loop: Any = trainer.fit_loop
            self.rollouts, self.explored = loop.rollouts, loop.explored
            self.again = loop.regenerate(loop.rollouts.prompts, loop.rollouts.seeds)


def test_prefix_family_resumes_kept_trajectories(tmp_path: Path) -> None:
    check = Regenerated()
    options = ("family=prefix", "model.full_steps=5", "model.prefix_steps=2", "model.solver=dpm2")
    module, trainer, loop = make(tmp_path, *options, callbacks=(check,), max_epochs=1)
    fit(module, trainer, loop)
    assert "shadow" not in module.transformers.replicas
    assert check.rows == 2 * (5 * 2 + 3 * 3)  # 2 prompts; 5 candidates for 2 steps, 3 kept for the other 3
    for seeds, pool in zip(check.rollouts.seeds.tolist(), check.explored.seeds.tolist(), strict=True):
        assert len(set(seeds)) == 3 and set(seeds) <= set(pool)
    torch.testing.assert_close(check.rollouts.x0, check.again.x0, rtol=0, atol=0.05)
    torch.testing.assert_close(check.rollouts.rewards, check.again.rewards, rtol=0, atol=0.02)
    assert not torch.equal(check.rollouts.proxy_rewards, check.rollouts.rewards)


def test_accumulated_gradient_equals_that_of_one_batch(tmp_path: Path) -> None:
    gradients = []
    for size in (1, 4, 6):
        module, trainer, loop = make(tmp_path, f"model.micro_batch={size}", max_epochs=1, gradient_clip_val=None)
        grabbed = _Gradients()
        trainer.callbacks.append(grabbed)
        fit(module, trainer, loop)
        gradients.append(grabbed.flat)
    # bf16 activations: the batch size changes the order of sums, which may flip a rounding
    for other in gradients[1:]:
        assert torch.linalg.vector_norm(other - gradients[0]) <= 0.02 * torch.linalg.vector_norm(gradients[0])


@pytest.mark.parametrize("kl_weight", [0.0, 1e-4])
def test_micro_batch_runs_one_forward_per_velocity(tmp_path: Path, kl_weight: float) -> None:
    module, trainer, loop = make(tmp_path, f"objective.kl_weight={kl_weight}", max_epochs=1)
    velocity, passes = module.policy.velocity, []

    def noted(transformer: Any, *args: Any) -> Tensor:
        if loop.stopwatch.current == "train":
            passes.append(transformer)
        return velocity(transformer, *args)

    module.policy.velocity = noted  # type: ignore[method-assign]
    fit(module, trainer, loop)
    with module.transformers.velocity_models["reference"]() as base:
        reference = [base] if kl_weight else []
    assert passes == [module.transformer, *reference, module.transformer] * MICRO_BATCHES


class Metrics(Callback):
    """Records the metrics logged at the end of every iteration."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.logged = dict(trainer.callback_metrics)


class Rates(Callback):
    """The learning rate of every optimiser step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_the_scheduler_sets_the_rate_of_every_step_also_after_a_resume(tmp_path: Path) -> None:
    options = ("scheduler=cosine", "scheduler.iterations=4", "optimizer_steps=2", "optimizer.lr=0.01")
    expected = [0.01 * (1 + math.cos(math.pi * iteration / 4)) / 2 for iteration in (0, 0.5, 1, 1.5)]
    straight, first, second = Rates(), Rates(), Rates()
    module, trainer, loop = make(tmp_path, *options, callbacks=(straight,), max_epochs=2)
    fit(module, trainer, loop)
    learnt = weights(module)
    assert straight.rates == pytest.approx(expected)
    module, trainer, loop = make(tmp_path, *options, callbacks=(first,), max_epochs=1)
    fit(module, trainer, loop)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module, trainer, loop = make(tmp_path, *options, callbacks=(second,), max_epochs=2)
    fit(module, trainer, loop, tmp_path / "x.ckpt")
    assert first.rates + second.rates == straight.rates and torch.equal(weights(module), learnt)
    other = Rates()
    changed = (*options[:3], "optimizer.lr=0.02")
    module, trainer, loop = make(tmp_path, *changed, callbacks=(other,), max_epochs=2)
    fit(module, trainer, loop, tmp_path / "x.ckpt")
    assert other.rates == pytest.approx([2 * rate for rate in expected[2:]])


def test_a_branch_with_other_optimizer_steps_continues_the_schedule_at_its_iteration(tmp_path: Path) -> None:
    options = ("scheduler=cosine", "scheduler.iterations=4", "optimizer.lr=0.01")
    module, trainer, loop = make(tmp_path, *options, max_epochs=2)
    fit(module, trainer, loop)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    branch = Rates()
    module, trainer, loop = make(tmp_path, *options, "optimizer_steps=2", callbacks=(branch,), max_epochs=4)
    fit(module, trainer, loop, tmp_path / "x.ckpt")
    expected = [0.01 * (1 + math.cos(math.pi * iterations / 4)) / 2 for iterations in (2, 2.5, 3, 3.5)]
    assert branch.rates == pytest.approx(expected)


class Read(Callback):
    """The stopwatch's seconds of the stages before and after every evaluation."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.before.append(self._spent(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.after.append(self._spent(trainer))

    def _spent(self, trainer: Any) -> float:
        seconds = trainer.fit_loop.stopwatch.seconds
        return sum(seconds[stage] for stage in ("requantize", "explore", "regenerate", "train"))


def test_an_evaluation_records_what_was_spent_until_then(tmp_path: Path) -> None:
    read = Read()
    module, trainer, loop = make(tmp_path, callbacks=(read,), max_epochs=2)
    fit(module, trainer, loop)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    # 2 prompts: 5 candidates x 2 steps, 3 kept x 3 steps, and 3 rows of the policy, the old policy and the reference
    each = 2 * (5 * 2 + 3 * 3 + 3 * 3)
    images = 2 * (5 + 3)  # 5 explored and 3 regenerated for each prompt
    assert [row["evaluations"] for row in module.evaluation.history] == [each, 2 * each]
    assert [row["samples"] for row in module.evaluation.history] == [images, 2 * images]
    seconds = [row["seconds"] for row in module.evaluation.history]
    assert 0 < seconds[0] < seconds[1]
    assert all(before <= at <= after for before, at, after in zip(read.before, seconds, read.after, strict=True))
    module, trainer, loop = make(tmp_path, max_epochs=3)
    fit(module, trainer, loop, tmp_path / "x.ckpt")
    (row,) = module.evaluation.history
    assert (row["evaluations"], row["samples"]) == (3 * each, 3 * images) and row["seconds"] > seconds[1]


def test_every_second_iteration_and_the_last_one_are_evaluated(tmp_path: Path) -> None:
    module, trainer, loop = make(tmp_path, max_epochs=3, check_val_every_n_epoch=2)
    fit(module, trainer, loop)
    assert [row["iteration"] for row in module.evaluation.history] == [2, 3]


@pytest.mark.parametrize("objective", ["nft", "awm", "ram", "pepg", "flow_grpo"])
def test_all_metrics_of_objective_are_logged(tmp_path: Path, objective: str) -> None:
    metrics = Metrics()
    module, trainer, loop = make(tmp_path, f"objective={objective}", callbacks=(metrics,), max_epochs=1)
    fit(module, trainer, loop)
    terms = {"nft": NFTLoss, "awm": AWMLoss, "ram": RAMLoss, "pepg": PEPGLoss, "flow_grpo": GRPOLoss}[objective]._fields
    expected = {f"train/{name}" for name in terms if name != "rows"} | {"train/grad_norm"}
    expected |= {"train/first_ratio_error"} if objective == "flow_grpo" else set()
    assert metrics.logged["lr"] == pytest.approx(1e-3)
    assert {name for name in metrics.logged if name.startswith("train/")} == expected


@pytest.mark.parametrize("every", [1, 2])
def test_metrics_are_means_over_the_rows_that_have_them_without_padding(tmp_path: Path, every: int) -> None:
    metrics, seen = Metrics(), []
    options = ("prompts_per_iteration=1", "family.keep=5", f"objective.reference_every={every}")  # 5 rows in 3 + 3
    module, trainer, loop = make(tmp_path, *options, callbacks=(metrics,), max_epochs=2)

    class Noting(NFT):
        def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
            loss = super().__call__(velocity, batch, **others)
            seen.append((len(batch.seeds), loss.metrics.get("kl"), loss.per_sample.detach()))
            return Loss(loss.per_sample, loss.metrics | {"square": batch.advantage.square().mean()})

    module.objective = Noting(**vars(module.objective))
    fit(module, trainer, loop)
    *_, first, second = seen
    assert (first[0], second[0]) == (3, 2)
    assert metrics.logged["train/square"] == pytest.approx(float(loop.rollouts.advantages.square().mean()))
    assert metrics.logged["train/loss"] == pytest.approx(float(torch.cat([first[2], second[2]]).mean()))
    kl = second[1] if every == 2 else (3 * first[1] + 2 * second[1]) / 5
    assert kl > 0 and metrics.logged["train/kl"] == pytest.approx(float(kl))


def test_metrics_do_not_depend_on_the_size_of_micro_batches(tmp_path: Path) -> None:
    actual = []
    options = ("prompts_per_iteration=1", "family.keep=5", "objective=flow_grpo", "objective.kl_weight=0.1")
    for size in (4, 10):  # 10 rows in 4 + 4 + 4, and in one micro-batch
        metrics = Metrics()
        module, trainer, loop = make(
            tmp_path, *options, f"model.micro_batch={size}", callbacks=(metrics,), max_epochs=1
        )
        fit(module, trainer, loop)
        actual.append({name: float(v) for name, v in metrics.logged.items() if name.startswith("train/")})
    assert actual[0] == pytest.approx(actual[1], rel=0.02, abs=1e-5)  # bf16, as above


@pytest.mark.parametrize(
    ("options", "moves"),
    [((), [False, True, True]), (("old_policy.decay_type=0",), [False] * 3), (("optimizer_steps=2",), [True] * 3)],
    ids=["default", "no lag", "two steps"],
)
def test_drift_is_exactly_0_only_where_the_old_policy_is_the_trained_one(
    tmp_path: Path, options: tuple[str, ...], moves: list[bool]
) -> None:
    """The premise of the alarm no_drift."""
    actual: list[bool] = []

    class Drift(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            actual.append(float(trainer.callback_metrics["train/drift"]) != 0)

    module, trainer, loop = make(tmp_path, "family=diffusionnft", *options, callbacks=(Drift(),), max_epochs=3)
    fit(module, trainer, loop)
    assert actual == moves


def test_optimizer_steps_split_the_rows(tmp_path: Path) -> None:
    recorder, moved = Recorder(), []
    module, trainer, loop = make(tmp_path, "optimizer_steps=3", callbacks=(recorder,), max_epochs=2)
    decay = module.old_decay
    module.old_decay = lambda iteration: moved.append(iteration) or decay(iteration)  # type: ignore[func-returns-value]
    fit(module, trainer, loop)
    iteration = ["sync_samplers", "explore", "regenerate", *["training_step", "step"] * 3]
    assert recorder.events == iteration * 2
    assert (trainer.global_step, trainer.current_epoch, loop.iterations_done, moved) == (6, 2, 2, [1, 2])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        ("objective=ram", "optimizer_steps=2", "family=prefix", "model.prefix_steps=2"),
        ("objective=flow_grpo", "objective.window=1", "model.full_steps=5", "family=diffusionnft"),
        ("objective=dance_grpo", "optimizer_steps=2", "objective.kl_weight=0.1", "reward.combine=gdpo"),
    ],
    ids=["ram", "flow_grpo", "dance_grpo"],
)
def test_run_with_several_optimizer_steps_resumes_exactly(tmp_path: Path, options: tuple[str, ...]) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    module, trainer, loop = make(tmp_path, *options, callbacks=(saver,), max_epochs=2)
    fit(module, trainer, loop)
    straight = weights(module)
    module, trainer, loop = make(tmp_path, *options, max_epochs=2)
    fit(module, trainer, loop, tmp_path / "epoch=0.ckpt")
    assert torch.equal(weights(module), straight)
    assert (trainer.global_step, loop.iterations_done) == (4, 2)


GRPO = {
    "diffusionnft": ("objective=flow_grpo", "model.full_steps=4"),
    "naive_scaling": ("objective=flow_grpo", "model.full_steps=4", "objective.window=2", "objective.noise_level=0.9"),
    "prefix": ("objective=dance_grpo", "model.full_steps=4", "model.prefix_steps=2", "objective.kl_weight=0.1"),
}


@pytest.mark.parametrize("family", GRPO)
def test_first_ratios_are_one_where_the_policy_samples(tmp_path: Path, family: str) -> None:
    errors: list[float] = []

    class FirstErrors(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            errors.append(float(trainer.callback_metrics["train/first_ratio_error"]))

    options = (f"family={family}", *GRPO[family])
    module, trainer, loop = make(tmp_path, *options, callbacks=(FirstErrors(),), max_epochs=2)
    before = weights(module)
    fit(module, trainer, loop)
    assert len(errors) == 2 and max(errors) <= 1e-5 and not torch.equal(weights(module), before)
    assert torch.equal(
        *(torch.cat([v.flatten() for v in module.adapter_state(n).values()]) for n in ("old", "default"))
    )
    stochastic = loop.objective.transitions(4, 1)
    assert loop.rollouts.recorded_steps is not None and loop.rollouts.recorded_steps.log_probs is not None
    assert loop.rollouts.recorded_steps.log_probs.shape == (2, loop.rollouts.seeds.shape[1], len(stochastic))
    assert loop.rollouts.recorded_steps.first == stochastic.start


def test_first_ratios_of_merged_weights_are_logged(tmp_path: Path) -> None:
    metrics = Metrics()
    options = ("family=diffusionnft", *GRPO["diffusionnft"], "training_sampler=merged")
    module, trainer, loop = make(tmp_path, *options, callbacks=(metrics,), max_epochs=2)
    fit(module, trainer, loop)
    assert 0 < metrics.logged["train/first_ratio_error"] < 0.01


def test_stochastic_samples_are_functions_of_their_seeds(tmp_path: Path) -> None:
    check = Regenerated()
    options = ("family=diffusionnft", *GRPO["diffusionnft"])
    module, trainer, loop = make(tmp_path, *options, callbacks=(check,), max_epochs=1)
    fit(module, trainer, loop)
    path, again = check.rollouts.recorded_steps, check.again.recorded_steps
    assert torch.equal(path.x, again.x) and torch.equal(path.log_probs, again.log_probs)
    # In a step the log-probabilities differ by the mean square of the noise alone: that of no other candidate or step.
    noises = path.log_probs - path.log_probs.mean((0, 1))
    assert noises.shape[2] > 1 and noises.flatten().sort().values.diff().min() > 1e-5


def test_candidates_of_a_prompt_share_noise_unless_the_family_explores(tmp_path: Path) -> None:
    starts = {}
    for family in ("diffusionnft", "sol_rl"):
        options = (f"family={family}", *GRPO["prefix"])
        module, trainer, loop = make(tmp_path / family, *options, max_epochs=1)
        fit(module, trainer, loop)
        assert loop.rollouts.recorded_steps is not None
        starts[family] = [len(prompt.unique(dim=0)) for prompt in loop.rollouts.recorded_steps.x[:, :, 0].flatten(2)]
        assert len(loop.rollouts.x0.flatten(0, 1).unique(dim=0)) == loop.rollouts.seeds.numel()
    assert starts == {"diffusionnft": [1, 1], "sol_rl": [3, 3]}


class Stages(Callback):
    """Records the candidates of every stage of a rollout."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        run_stage, self.actual = pl_module.run_stage, []

        def noted(*args: Any) -> Any:
            self.actual.append(run_stage(*args))
            return self.actual[-1]

        pl_module.run_stage = noted


def test_race_resumes_survivors_of_each_rung(tmp_path: Path) -> None:
    stages, check = Stages(), Regenerated()
    rungs = "family.explore.rungs=[{step:1,keep:4},{step:3,keep:3}]"
    options = ("family=race", rungs, "model.full_steps=5", "model.solver=dpm2")
    module, trainer, loop = make(tmp_path, *options, callbacks=(stages, check), max_epochs=1)
    fit(module, trainer, loop)
    assert check.rows == 2 * (5 * 1 + 4 * 2 + 3 * 2)  # 2 prompts
    first, second, last = stages.actual[:3]
    four = first.take(select_contrastive(first.rewards, 4))
    assert torch.equal(second.seeds, four.seeds)
    assert torch.equal(last.seeds, second.take(select_contrastive(second.rewards, 3)).seeds)
    torch.testing.assert_close(check.rollouts.x0, check.again.x0, rtol=0, atol=0.05)
    # The pool's proxy rewards are those of the first rung in the order of the last one: they give the same selection.
    chosen = select_contrastive(check.explored.merits, 3)
    assert torch.equal(check.explored.seeds.gather(1, chosen), check.rollouts.seeds)
    assert torch.equal(check.explored.merits.sort(1).values, first.merits.sort(1).values)


def test_regeneration_starts_from_noise_after_early_stop_of_shadow(tmp_path: Path) -> None:
    check = Regenerated()
    options = ("+family.explore.stop_after=1", "model.full_steps=5", "model.preview_steps=3")
    module, trainer, loop = make(tmp_path, *options, callbacks=(check,), max_epochs=1)
    fit(module, trainer, loop)
    assert check.rows == 2 * (5 * 1 + 3 * 5)
    torch.testing.assert_close(check.rollouts.x0, check.again.x0, rtol=0, atol=0.05)


class Bare(NFT):
    """A user's objective that returns no Loss."""

    def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Any:
        return super().__call__(velocity, batch, **others).per_sample.mean()


def test_objective_that_returns_no_loss_is_an_error(tmp_path: Path) -> None:
    module, trainer, loop = make(tmp_path, "objective._target_=test_loop.Bare", max_epochs=1)
    with pytest.raises(
        UserError, match=r"objective=Bare is invalid: it must return a Loss with per_sample \[\d\] .* got Te"
    ):
        fit(module, trainer, loop)


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
    metrics = Metrics()
    objective = ("objective._target_=test_loop.Pull", *(f"~objective.{key}" for key in vars(NFT(1, 1, kl_weight=1))))
    module, trainer, loop = make(tmp_path, *objective, "model.full_steps=4", callbacks=(metrics,), max_epochs=2)
    before = weights(module)
    fit(module, trainer, loop)
    assert loop.rollouts.recorded_steps is not None and loop.rollouts.recorded_steps.log_probs is None
    assert loop.rollouts.recorded_steps.first == 1 and loop.rollouts.recorded_steps.x.shape[:3] == (2, 3, 4)
    assert torch.equal(loop.rollouts.recorded_steps.x[:, :, -1], loop.rollouts.x0)
    assert not torch.equal(weights(module), before)
    # The first iteration's Euler steps are the trained policy's own velocities, up to the rounding of merged weights.
    assert 0 < metrics.logged["train/error"] < 1e-3


def test_prompts_of_four_iterations_are_encoded_at_once_and_resumed_ones_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, trainer, loop = make(tmp_path, max_epochs=5)
    encoded: list[list[str]] = []
    encode = module.policy.encode

    def noted(texts: list[str]) -> Any:
        encoded.append(texts)
        return encode(texts)

    monkeypatch.setattr(module.policy, "encode", noted)
    fit(module, trainer, loop)
    windows = [texts for texts in encoded if texts != module.evaluation.prompts]
    expected = [[t for i in range(first, first + 4) for t in loop.schedule.for_iteration(i)] for first in (0, 4)]
    assert windows == [list(dict.fromkeys(texts)) for texts in expected]
    for iteration in (5, 2):
        texts = loop.schedule.for_iteration(iteration)
        prompts = loop._encode(iteration, texts)
        assert prompts.texts == texts
        for name, value in encode(texts).items():
            torch.testing.assert_close(prompts.conditioning[name], value)


def test_reference_is_computed_in_every_nth_micro_batch_and_each_iteration_begins_with_the_next(tmp_path: Path) -> None:
    options = ("objective.kl_weight=0.1", "objective.reference_every=2", "model.micro_batch=2")
    module, trainer, loop = make(tmp_path, *options, max_epochs=3)
    turns: list[tuple[int, int]] = []
    models: Any = module.transformers.velocity_models
    reference, step = models["reference"], module.training_step
    current = 0

    def training_step(batch: TrainingBatch, batch_idx: int) -> Tensor:
        nonlocal current
        current = batch_idx
        return step(batch, batch_idx)

    def noted() -> Any:
        turns.append((loop.iterations_done, current))
        return reference()

    module.training_step, models["reference"] = training_step, noted  # type: ignore[method-assign]
    fit(module, trainer, loop)
    count = loop.plan.micro_batches
    assert count >= 3 and turns == [(i, b) for i in range(3) for b in range(count) if (i + b) % 2 == 0]
    assert (
        loop.cost()["evaluations"] == 3 * loop._each_iteration()["evaluations"]
        and module.objective.forward_passes == 2.5
    )


@pytest.mark.parametrize("sampler", ["policy", "merged"])
def test_old_velocity_uses_named_sampler(tmp_path: Path, sampler: str) -> None:
    module, trainer, loop = make(tmp_path, f"old_velocity={sampler}", max_epochs=1)
    for name, value in module.adapter_state("old").items():
        value.fill_(0.1 if "lora_B" in name else 0.2)  # the trained adapter's B is 0
    module.sync_samplers(version=0)
    prompts = module.encode(module.evaluation.prompts)
    x, one = module.policy.noise(torch.tensor([5, 6])), torch.ones(2)
    rest = (one, one, prompts.conditioning, prompts.texts, torch.tensor([5, 6]), 0, 2)
    batch = TrainingBatch(0 * x, x, None, None, one.long(), 0.5 * one, 0 * one, *rest)
    objective, seen = module.objective, []

    class Noting(NFT):
        def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
            seen.extend([velocity.detach(), others["old"], others["reference"]])
            return super().__call__(velocity, batch, **others)

    module.objective = Noting(**vars(objective))
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    module.training_step(batch, 0)
    velocity, old, reference = seen
    replicas, adapted = module.transformers.replicas, module.transformers.adapted
    with torch.no_grad(), adapted.old() if sampler == "policy" else nullcontext(replicas[sampler]) as transformer:
        assert torch.equal(old, module.policy.velocity(transformer, batch.x_t, batch.sigma, batch.conditioning))
    assert torch.equal(velocity, reference) and not torch.equal(old, velocity)


def test_reference_is_model_without_adapters(tmp_path: Path) -> None:
    module, trainer, loop = make(tmp_path, max_epochs=1)
    rows = module.encode(module.evaluation.prompts[:1])
    x, sigma = module.policy.noise(torch.tensor([5])), torch.tensor(0.5)
    before = module.policy.velocity(module.transformer, x, sigma, rows.conditioning)
    for name, value in module.adapter_state("default").items():
        value.fill_(0.1 if "lora_B" in name else 0.2)
    with torch.no_grad(), module.transformers.velocity_models["reference"]() as reference:
        assert torch.equal(module.policy.velocity(reference, x, sigma, rows.conditioning), before)
        assert not torch.equal(module.policy.velocity(module.transformer, x, sigma, rows.conditioning), before)


def test_preview_decoder_is_used_for_exploration_only(tmp_path: Path) -> None:
    tiny = save_preview_decoder(tmp_path / "tiny", channels=8, compression=4)
    chosen = (f"model.preview_decoder={tiny}", "family.explore.decoder=preview")
    module, trainer, loop = make(tmp_path, *chosen, max_epochs=1)
    images: dict[tuple[str, str], int] = {}

    def watched(method: str) -> Any:
        decode = getattr(module.policy, method)

        def noted(x: Tensor) -> Tensor:
            stage = loop.stopwatch.current
            images[stage, method] = images.get((stage, method), 0) + len(x)
            return decode(x)

        return noted

    for method in ("decode", "preview"):
        setattr(module.policy, method, watched(method))
    fit(module, trainer, loop)
    assert images == {("explore", "preview"): 2 * 5, ("regenerate", "decode"): 2 * 3, ("evaluate", "decode"): 2}


class _Gradients(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.flat = torch.cat([parameter.grad.flatten() for parameter in pl_module.trained_parameters()])


class CrashAt(Callback):
    """Saves a checkpoint and raises in the middle of iteration 1: while exploring, or between two micro-batches."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        run_stage = pl_module.run_stage

        def crash_in_explore(*args: Any, **kwargs: Any) -> Any:
            if self.phase == "explore" and trainer.current_epoch == 1:
                self.crash(trainer)
            return run_stage(*args, **kwargs)

        pl_module.run_stage = crash_in_explore

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.phase == "train" and (trainer.current_epoch, batch_idx) == (1, 0):
            self.crash(trainer)

    def crash(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/crash.ckpt")
        raise KeyboardInterrupt


def columns(folder: Path, name: str) -> tuple[list[str], list[int]]:
    """Return the names of the logged metrics and the step of every row."""
    with open(folder / f"{name}/version_0/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return sorted(rows[0]), [int(row["step"]) for row in rows]


SAVES: dict[str, Any] = {
    "at the end of an iteration": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "at the end of an evaluation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "after the optimiser step": {"every_n_train_steps": 1},
    "between two micro-batches": "train",
    "while exploring": "explore",
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder, Tensor]:
    """Run three iterations without interruption."""
    folder = tmp_path_factory.mktemp("straight")
    recorder = Recorder()
    logger = CSVLogger(folder, name="straight")
    module, trainer, loop = make(folder, callbacks=(recorder,), max_epochs=3, logger=logger, log_every_n_steps=1)
    fit(module, trainer, loop)
    return folder, recorder, weights(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning")
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
def test_resume_is_bit_exact_from_a_checkpoint_taken(
    save: Any, straight: tuple[Path, Recorder, Tensor], tmp_path: Path
) -> None:
    if isinstance(save, str):
        module, trainer, loop = make(tmp_path, callbacks=(CrashAt(save),), max_epochs=3)
        with pytest.raises(SystemExit):
            fit(module, trainer, loop)
    else:
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **save)
        module, trainer, loop = make(tmp_path, callbacks=(saver,), max_epochs=1)
        fit(module, trainer, loop)
    (checkpoint,) = tmp_path.glob("*.ckpt")

    recorder = Recorder()
    logger = CSVLogger(tmp_path, name="resumed")
    module, trainer, loop = make(tmp_path, callbacks=(recorder,), max_epochs=3, logger=logger, log_every_n_steps=1)
    fit(module, trainer, loop, checkpoint)

    folder, uninterrupted, expected = straight
    assert recorder.explored == uninterrupted.explored[1:]
    assert recorder.events[0] == "sync_samplers"
    assert trainer.global_step == trainer.current_epoch == 3
    assert torch.equal(weights(module), expected)
    names, steps = columns(folder, "straight")
    resumed_names, resumed_steps = columns(tmp_path, "resumed")
    assert resumed_names == names and set(steps) == {1, 2, 3}
    assert resumed_steps == [step for step in steps if step > 1]


LEVELS = (
    "family=adaptive",
    "family.levels=[{sampler:merged,steps:3,stop_after:1},{sampler:shadow,steps:2},{sampler:merged,steps:3,stop_after:2}]",
)


class Levels(Callback):
    """Records the stages of every iteration, as far as its optimiser step."""

    def __init__(self) -> None:
        self.stages: list[list[Stage]] = []

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.stages.append(trainer.fit_loop.stages)


def adaptive_run(
    folder: Path, iterations: int, *callbacks: Callback
) -> tuple[SolRLModule, Trainer, ExploreTrainLoop, Levels]:
    # Every probe moves: at most this correlation up, above it down.
    cfg = composed(*LEVELS)
    levels = levels_of(cfg, build_objective(cfg))
    adaptive = AdaptiveExploration(levels, 1, Rule(threshold=0.85, margin=0.0, patience=1))
    levels = Levels()
    each = (RankCorrelation(probe_every=1), adaptive, levels, *callbacks)
    return *make(folder, *LEVELS, callbacks=each, max_epochs=iterations), levels


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Levels, dict[str, float], Tensor]:
    """Run four iterations without interruption."""
    module, trainer, loop, levels = adaptive_run(tmp_path_factory.mktemp("adapted"), 4)
    fit(module, trainer, loop)
    assert len({stages[0] for stages in levels.stages}) > 1
    each = [2 * (sum(evaluations(stages, 5)) + 3 * 3) for stages in levels.stages]
    assert loop.cost()["evaluations"] == sum(each)
    return levels, loop.cost(), weights(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning")
@pytest.mark.parametrize("save", ["at the end of an iteration", "between two micro-batches"])
def test_adaptive_exploration_resumes_exactly(
    save: str, adapted: tuple[Levels, dict[str, float], Tensor], tmp_path: Path
) -> None:
    options = SAVES[save]
    if isinstance(options, str):
        module, trainer, loop, _ = adaptive_run(tmp_path, 4, CrashAt(options))
        with pytest.raises(SystemExit):
            fit(module, trainer, loop)
    else:
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **options)
        module, trainer, loop, _ = adaptive_run(tmp_path, 1, saver)
        fit(module, trainer, loop)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    module, trainer, loop, resumed = adaptive_run(tmp_path, 4)
    fit(module, trainer, loop, checkpoint)
    levels, cost, learnt = adapted
    assert resumed.stages == levels.stages[1:]
    assert loop.cost()["evaluations"] == cost["evaluations"]
    assert torch.equal(weights(module), learnt)


def test_checkpoint_holds_adapters_only(finished: Finished) -> None:
    state = torch.load(finished.checkpoint, weights_only=True)["state_dict"]
    assert all(".lora_A.default." in k or ".lora_B.default." in k or ".old." in k for k in state)
    trained = sum(parameter.numel() for parameter in finished.module.trained_parameters())
    assert sum(value.numel() for value in state.values()) == 2 * trained


def test_checkpoint_of_another_lora_rank_raises(tmp_path: Path, finished: Finished) -> None:
    module, trainer, loop = make(tmp_path, "model.lora.rank=16", max_epochs=2)
    with pytest.raises(UserError, match="adapters do not fit"):
        fit(module, trainer, loop, finished.checkpoint)


def test_resumed_run_uses_configured_optimizer_options(tmp_path: Path, finished: Finished) -> None:
    changed = ("optimizer.lr=1e-5", "optimizer.weight_decay=0.5", "optimizer.betas=[0.5,0.9]")
    module, trainer, loop = make(tmp_path, *changed, max_epochs=2)
    fit(module, trainer, loop, finished.checkpoint)
    trainer.save_checkpoint(tmp_path / "y.ckpt")
    (state,) = torch.load(tmp_path / "y.ckpt", weights_only=True)["optimizer_states"]
    (group,) = state["param_groups"]
    assert (group["lr"], group["weight_decay"], tuple(group["betas"])) == (1e-5, 0.5, (0.5, 0.9))
    assert {float(of_one["step"]) for of_one in state["state"].values()} == {2.0}


def test_nan_reward_stops_run_and_names_prompt_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, trainer, loop = make(tmp_path, max_epochs=1)
    nan = lambda images, prompts: images[:, 0, 0, 0] * torch.nan  # noqa: E731
    monkeypatch.setattr(module.rewards.rewards["shapes"], "score", nan)
    before = weights(module)
    with pytest.raises(NonFiniteError, match=r"0 of 5 explored candidates have a finite reward for the prompt 'a .*'"):
        fit(module, trainer, loop)
    assert torch.equal(weights(module), before)
    explore, regenerate = loop.stages
    loop.stages = [explore._replace(name="regenerate")]
    with pytest.raises(NonFiniteError, match=r"reward shapes is nan for the prompt 'a .*' with seed \d+"):
        loop.roll_out()


def test_nan_loss_stops_run_before_optimizer_step(tmp_path: Path) -> None:
    module, trainer, loop = make(tmp_path, max_epochs=1)
    module.adapter_state("default")["transformer_blocks.0.attn.to_q.lora_A.weight"].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="loss of objective=NFT is nan for the prompt"):
        fit(module, trainer, loop)
    assert trainer.global_step == 0


def test_more_devices_than_prompts_raises(tmp_path: Path) -> None:
    cfg = composed("prompts_per_iteration=1")
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="prompts_per_iteration=.* is invalid: every device needs at least one prompt"):
        build_loop(cfg, trainer, NFT(1.0, 5.0, kl_weight=0.0, timestep_fraction=0.5))


def test_only_policy_is_trained_and_old_policy_follows(tmp_path: Path) -> None:
    module, trainer, loop = make(tmp_path, "old_policy.decay_type=0", max_epochs=1)
    frozen = {name: p.detach().clone() for name, p in module.named_parameters() if ".lora_" not in name}
    fit(module, trainer, loop)
    for name, parameter in module.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, frozen[name])
    trained, old = module.adapter_state("default"), module.adapter_state("old")
    assert all(torch.equal(trained[name], old[name]) for name in trained)
    assert max(value.abs().max() for name, value in trained.items() if "lora_B" in name) > 0
    assert module.distances["old_distance"] > 0  # of the iteration, before the old policy followed


def test_probe_uses_the_encodings_of_its_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, trainer, loop = make(tmp_path, callbacks=(Regenerated(),), max_epochs=1)
    encoded: list[list[str]] = []
    encode = module.policy.encode
    monkeypatch.setattr(module.policy, "encode", lambda texts: encoded.append(texts) or encode(texts))
    fit(module, trainer, loop)
    assert len([texts for texts in encoded if texts != module.evaluation.prompts]) == 1


@pytest.mark.parametrize("optimizer_steps", [1, 2])
def test_run_ends_with_an_evaluation_at_the_end_of_the_iteration_that_reaches_max_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer_steps: int
) -> None:
    options = ("max_seconds=10", f"optimizer_steps={optimizer_steps}")
    module, trainer, loop = make(tmp_path, *options, max_epochs=9, check_val_every_n_epoch=100)
    monkeypatch.setattr(ExploreTrainLoop, "cost", lambda self: {"seconds": 7 * self.iterations_taken()})
    fit(module, trainer, loop)
    assert loop.iterations_done == 2 and loop.is_time_up
    assert [row["iteration"] for row in module.evaluation.history] == [2]
