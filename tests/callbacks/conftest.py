"""A module and a roll-out with the attributes that callbacks use: one weight, rewards known in closed form.

A callback does the roll-out and Lightning's own loop runs everything else, so hooks, their order, loggers, checkpoints,
the stopwatch and the rank fidelity are the real ones.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from nano import prompts_of
from torch import Tensor, nn

from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Candidates, Rollouts
from solrl_lightning.rollout.select import select_contrastive
from solrl_lightning.sampling import SolverState
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.training.evaluation import Evaluation
from solrl_lightning.training.loop import ExploreTrainLoop
from solrl_lightning.training.stopwatch import Stopwatch

POOL, KEEP, SIDE, MICRO_BATCHES = 8, 4, 16, 2
MEANS = (0.4, 0.5, 0.6, 0.3, 0.3)  # held-out rewards by iteration


def rewards_of(seeds: Tensor) -> Tensor:
    """BF16 rewards in [0, 1), a function of the seed alone."""
    return (seeds % 997).float() / 997


def proxies_of(seeds: Tensor) -> Tensor:
    """Proxy rewards: the same order as the rewards, on another scale."""
    return rewards_of(seeds) * 0.5 - 1


class StandIn(LightningModule):
    """Trains ``weight`` towards 1 with plain SGD: after n iterations it is 1 - 0.8^n."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.model = SimpleNamespace(decode=lambda x: x.clamp(0, 1), base_digest="base")
        self.rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
        self.transformers = SimpleNamespace(precision_backend="nvfp4 (emulated)", explorers=None)
        self.transformers.trained = SimpleNamespace(folder="lora")
        prompts = ["a red circle above a blue square", "two green triangles", "a yellow star"]
        self.evaluation = Evaluation(prompts_of(prompts), self.rewards, "euler", steps=4, images=2, seed=0)
        self.ema_state: dict[str, Tensor] | None = None
        self.distances: dict[str, Tensor] = {}
        self.events: list[str] = []
        self.sampled: list[str] = []

    def requantize(self, version: int) -> None:
        self.events.append(f"requantize {version}")

    def policy_state(self, name: str) -> dict[str, Tensor]:
        assert name == "default"
        return {"lora": self.weight}

    def sample(self, prompts: list[Prompt], seeds: Tensor, *, weights: str, steps: int) -> Tensor:
        self.sampled.append(weights)
        brightness = {"base": 0.2, "old": 0.5, "ema": 0.8}[weights]
        return torch.full((*seeds.shape, 3, SIDE, SIDE), brightness)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.events.append("train")
        return (self.weight - batch).square().sum()

    def on_train_start(self) -> None:
        self.trainer.fit_loop.iterations_done = self.trainer.global_step

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.trainer.fit_loop.iterations_done += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Evaluated(StandIn):
    """Adds an evaluation with the reward 0.5 + 0.1 weight; iteration 0 is the base."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        iteration = self.trainer.current_epoch + 1 if self.trainer.state.fn == "fit" else 0
        self.evaluation.history.append({"iteration": iteration, "shapes": 0.5 + 0.1 * float(self.weight[0])})


class Falling(Evaluated):
    """Adds evaluations with the rewards ``MEANS``, and the reward "bright", which is their negative."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        row = self.evaluation.history[-1]
        done = self.trainer.fit_loop.iterations_done = row["iteration"]
        row |= {"shapes": MEANS[done], "bright": -MEANS[done]}
        self.log("eval/shapes", MEANS[done])
        rewards = [MEANS[done]] * (len(self.evaluation.columns) - 4)
        spread = torch.linspace(-0.1, 0.1, 16, dtype=torch.float64)[:, None]
        self.evaluation.table = torch.tensor([[*rewards, 0.5, 0.5, 0.5, 0.5]], dtype=torch.float64) + spread

    def save_policy(self, folder: Path, weights: str) -> None:
        self.exported = self.weight.detach().clone() if self.ema_state is None else self.ema_state["lora"]


class RollOut(Callback):
    """Explores, selects and regenerates at the start of an iteration. Follows the callbacks under test."""

    def __init__(self, prompts: Sequence[str] = "ab", two_stages: bool = True, rewards_of: Any = rewards_of) -> None:
        self.prompts, self.two_stages, self.rewards_of = prompts_of(prompts), two_stages, rewards_of
        self.regenerated: list[tuple[list[Prompt], float]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def probe(prompts: list[Prompt], seeds: Tensor) -> Candidates:
            self.regenerated.append((prompts, float(pl_module.weight[0])))
            return self.candidates(seeds, self.rewards_of(seeds))

        trainer.fit_loop.probe = probe

    def candidates(self, seeds: Tensor, rewards: Tensor) -> Candidates:
        latents = self.latents(seeds)
        return Candidates(seeds, SolverState(latents, latents, 1), rewards, rewards[..., None], rewards)

    def latents(self, seeds: Tensor) -> Tensor:
        return rewards_of(seeds)[..., None, None, None].expand(*seeds.shape, 3, SIDE, SIDE)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.events.append("explore")
        loop, prompts = trainer.fit_loop, self.prompts_in(trainer)
        seeds = pool_seeds(0, trainer.current_epoch, identities(prompts), POOL)
        with loop.stopwatch.stage("explore"):
            proxies = proxies_of(seeds)
            chosen = select_contrastive(proxies, KEEP)
        kept = seeds.gather(1, chosen)
        rewards = self.rewards_of(kept)
        loop.explored = self.candidates(seeds, proxies) if self.two_stages else None
        scores = torch.stack([rewards] * len(pl_module.rewards.for_training.rewards), dim=-1)
        columns = kept, self.latents(kept), proxies.gather(1, chosen), rewards, scores, torch.zeros_like(rewards)
        loop.rollouts = Rollouts(prompts, *columns)

    def prompts_in(self, trainer: Trainer) -> list[Prompt]:
        return self.prompts


def make_trainer(
    folder: Path, callbacks: Sequence[Callback], roll_out: Any = None, iterations: int = 1, **options: Any
):
    off = dict.fromkeys("logger enable_progress_bar enable_model_summary enable_checkpointing".split(), False)
    counts = dict(devices=1, num_sanity_val_steps=0, accumulate_grad_batches=MICRO_BATCHES, log_every_n_steps=1)
    callbacks = [*callbacks, roll_out or RollOut()]
    of_run = dict(accelerator="cpu", default_root_dir=folder, max_epochs=iterations, callbacks=callbacks)
    trainer = Trainer(**(off | counts | of_run | options))
    trainer.fit_loop.stopwatch, trainer.fit_loop.termination = Stopwatch(), SimpleNamespace(requested=False)
    trainer.fit_loop.iterations_done, trainer.fit_loop.max_seconds, trainer.fit_loop.is_time_up = 0, None, False
    trainer.fit_loop.keep, trainer.fit_loop.passes_without_selection = KEEP, 1.5
    trainer.fit_loop.digest_of_prompts = "prompts"
    trainer.fit_loop.logged_values = MethodType(ExploreTrainLoop.logged_values, trainer.fit_loop)
    return trainer


class MicroBatches:
    """A loader without workers. Lightning takes a plain list for several loaders."""

    def __len__(self) -> int:
        return MICRO_BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        yield from [torch.ones(2)] * MICRO_BATCHES


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Trainer]:
    """Trains as task=train does: evaluates the base, if the module has evaluations, or resumes from ``resumed``."""

    def fit(*callbacks, iterations=1, module=None, roll_out=None, resumed=None, **options):
        if isinstance(resumed, Trainer):
            resumed.save_checkpoint(resumed := tmp_path / "x.ckpt")
        module, trainer = module or StandIn(), make_trainer(tmp_path, callbacks, roll_out, iterations, **options)
        held_out = MicroBatches() if isinstance(module, Evaluated) else None
        if held_out and resumed is None:
            trainer.validate(module, held_out, verbose=False)
        trainer.fit(module, MicroBatches(), held_out, ckpt_path=resumed)
        return trainer

    return fit


@pytest.fixture
def stand_in() -> SimpleNamespace:
    """The names of this file; a fixture, because pytest's import modes do not all import conftest by name."""
    return SimpleNamespace(**globals())
