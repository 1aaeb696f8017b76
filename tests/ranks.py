"""A task that does an iteration or two of several families and saves what this rank came to; see test_ddp.

Everything runs in batches of one row, so that no number depends on what else a rank computes.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from nano import MAX_WORDS, PROMPTS
from torch import Tensor
from torch.distributed.tensor import DTensor

from solrl_lightning.build import build_training, instantiate_trainer, with_option
from solrl_lightning.callbacks.ema import WeightEMA
from solrl_lightning.callbacks.requantize import Requantize
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.data.prompt import identities
from solrl_lightning.options.run import Run
from solrl_lightning.policies import pipeline
from solrl_lightning.run_prompts import prompt_sets

SPREAD = dict(zip(PROMPTS, (1.0, 10.0, 3.0), strict=True))  # of the rewards of a prompt's images
OPTIONS = (
    # one rank gets two prompts, the other one
    f"iterations=1 prompts_per_iteration=3 model.max_sequence_length={MAX_WORDS} model.full_steps=4 "
    "model.preview_steps=2 model.prefix_steps=2 model.eval_steps=2 model.train_timestep_fraction=0.75 "
    "model.rollout_batch=1 model.decode_batch=1 model.micro_batch=1 data.eval_prompts=3 data.eval_images=1 "
    "~logger ~callbacks"
).split()


class TerminateRank1(Callback):
    """Sends SIGTERM to one of two ranks, while the other is on its way to a collective operation."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if (trainer.global_rank, trainer.current_epoch) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)


class KillRank1(Callback):
    """Kills one of two ranks once. The other one is late when torchrun has started both again."""

    def __init__(self) -> None:
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("1", "0"):
            time.sleep(1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], trainer.global_rank, trainer.current_epoch) == ("0", 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)


class Results(Callback):
    """What the first iteration rolled out and the gradient of it, and the policy before and after every iteration."""

    def __init__(self) -> None:
        self.actual: dict[str, Any] = {"policies": []}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.actual["policies"].append(flat(pl_module, "default"))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        loop: Any = trainer.fit_loop
        if loop.iterations_done == 0:
            self.actual |= loop.rollouts._asdict() | {"prompts": identities(loop.rollouts.prompts)}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        gradient = torch.cat([parameter.grad.flatten() for parameter in pl_module.trained_parameters()])
        self.actual.setdefault("gradient", gradient)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.actual["policies"].append(flat(pl_module, "default"))


def flat(module: Any, adapter: str) -> Tensor:
    """A copy of the numbers of an adapter."""
    return torch.cat([value.detach().flatten() for value in module.policy_state(adapter).values()])


def score(images: Tensor, prompts: list[str]) -> Tensor:
    red, green, _ = images.mean((2, 3)).unbind(1)
    return (red - green) * torch.tensor([SPREAD.get(prompt, 1.0) for prompt in prompts])


def train(cfg: Run) -> dict[str, Any]:
    """This rank's part of the first iteration, and the weights after the last one."""
    results = Results()
    callbacks = [Requantize(), WeightEMA(), results]
    options = {"strategy": "auto"} if cfg.trainer["devices"] == 1 else {}  # a single process shards nothing
    trainer = instantiate_trainer(cfg.trainer, logger=False, enable_checkpointing=False, callbacks=callbacks, **options)
    module, loop = build_training(cfg, prompt_sets(cfg), trainer)
    module.rewards.rewards["shapes"].score = score  # type: ignore[method-assign]
    held_out = RankPrompts(module.evaluation.prompts, trainer.global_rank, trainer.world_size)
    trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, loop.loader, held_out)
    weights = torch.cat([flat(module, name) for name in ("default", "old", "ema")])
    evaluations = torch.tensor([row["shapes"] for row in module.evaluation.history], dtype=torch.float64)
    named = module.transformer.named_parameters()
    frozen = [weight for name, weight in named if "blocks." in name and ".lora_" not in name]
    elements = sum((weight.to_local() if isinstance(weight, DTensor) else weight).numel() for weight in frozen)
    logged = sorted((name, value) for name, value in trainer.callback_metrics.items() if name.startswith("train/"))
    metrics = torch.stack([value for _, value in logged])
    actual = {"rank": trainer.global_rank, "weights": weights, "evaluations": evaluations, "metrics": metrics}
    actual |= {"elements": elements, "old": flat(module, "old")}
    return results.actual | actual


def train_all(cfg: Run) -> dict[str, dict[str, Any]]:
    """One iteration of sol_rl, of 27 rows, which two ranks cannot share evenly; two of prefix with sharded weights."""
    pipeline.EMBED_BATCH = 1
    results = {}
    for name, family in {"whole": "sol_rl", "sharded": "prefix"}.items():
        chosen = with_option(cfg, "family", family)
        chosen.family.pool, chosen.family.keep, chosen.family.compile = 4, 3, False
        if name == "sharded":
            chosen.family.keep = 2
            chosen.prompts_per_iteration = chosen.data.eval_prompts = chosen.trainer["max_epochs"] = 2
            chosen.trainer["strategy"] = {"_target_": "solrl_lightning.training.sharding.ShardedBase"}
        results[name] = train(chosen)
    return results


def save_all(cfg: Run) -> None:
    """The task."""
    results = train_all(cfg)
    torch.save(results, Path(cfg.run_dir) / f"rank{results['whole']['rank']}.pt")
