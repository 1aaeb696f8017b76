"""How much of a gradient is signal, by noise level: a callback that compares gradients of the same training samples.

    PYTHONPATH=dev OMP_NUM_THREADS=1 python -m solrl_lightning experiment=fast \
      +callbacks.noise._target_=gradient_noise.GradientNoise

In some iterations it computes, for each prompt and noise level and for two draws of the training noise, the gradient
of the objective without its KL term. The product of two gradients that have no noise in common estimates the square
of their common signal: of two draws on the same samples (*same samples*), of two halves of the prompts (*all*).
The run itself is not changed.
"""

import dataclasses
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from solrl_lightning.artifacts.tables import format_table
from solrl_lightning.callbacks.common import loop_of, module_of
from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.training.module import SolRLModule

DRAWS = 2


class GradientNoise(Callback):
    """Prints a table before the iterations ``at``, counted from 0."""

    def __init__(self, at: tuple[int, ...] = (1, 6, 12, 24)) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and trainer.current_epoch in self.at:
            print(f"\niteration {trainer.current_epoch}\n{table(gradients(trainer, pl_module))}\n", flush=True)


def gradients(trainer: Trainer, pl_module: LightningModule) -> Tensor:
    """Return the gradients [P, T, DRAWS, D] of each prompt's kept samples at each of T noise levels."""
    loop, module = loop_of(trainer), module_of(pl_module)
    rollouts, sigmas = loop.rollouts, module.model.sigmas(loop.stages[-1].steps)
    prompts = loop._encode(trainer.current_epoch, rollouts.prompts)
    number, kept = rollouts.seeds.shape
    rows = []
    for prompt in range(number):
        prompts_of_rows, conditioning = prompts.gather(torch.full((kept,), prompt))
        for step in range(len(sigmas) - 1):
            for draw in range(DRAWS):
                steps, x0 = torch.full((kept,), step), rollouts.x0[prompt]
                seeds = rollouts.seeds[prompt] + (draw + 1) * 10**9  # other noise than the run's
                row = TrainingBatch(
                    x0=x0,
                    x_t=module.objective.noisy(x0, seeds, steps, sigmas),
                    x_next=None,
                    log_prob=None,
                    step=steps,
                    sigma=sigmas[steps],
                    sigma_next=sigmas[steps + 1],
                    advantage=rollouts.advantages[prompt],
                    weight=torch.ones(kept),
                    conditioning=conditioning,
                    prompts=prompts_of_rows,
                    seeds=seeds,
                    optimizer_step=0,
                    real=kept,
                )
                rows.append(gradient(module, row))
    return torch.stack(rows).unflatten(0, (number, len(sigmas) - 1, DRAWS))


def gradient(module: SolRLModule, batch: TrainingBatch) -> Tensor:
    """Return the gradient [D] of the mean loss without the KL term."""
    objective = dataclasses.replace(module.objective, kl_weight=0.0)  # type: ignore[type-var]
    with torch.no_grad(), module.transformers.velocity_models["old"]() as transformer:
        old = module.velocity(transformer, batch)
    loss = objective(module.velocity(module.transformer, batch), batch, old=old).per_sample.mean()
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, module.trained_parameters())])


def table(gradients: Tensor) -> str:
    """Return the squares of norms of gradients [P, T, DRAWS, D]: of one (*power*), and of what two have in common."""
    half = len(gradients) // 2
    levels = range(gradients.shape[1])

    def product(first: Tensor, second: Tensor) -> float:
        return float(first.double() @ second.double())

    halves = gradients[:half].mean((0, 2)), gradients[half:].mean((0, 2))  # each [T, D]
    whole = [each.mean(0) for each in halves]
    draws = gradients.mean((0, 1))
    rows = [
        [
            f"step {t}",
            f"{float(gradients[:, t].double().square().sum(-1).mean()):.2g}",
            f"{product(*gradients[:, t].mean(0)):.2g}",
            f"{(product(halves[0][t], whole[1]) + product(halves[1][t], whole[0])) / 2:.2g}",
        ]
        for t in levels
    ]
    power = float(draws.double().square().sum(-1).mean())
    rows.append(["all steps", f"{power:.2g}", f"{product(*draws):.2g}", f"{product(*whole):.2g}"])
    return format_table(["noise level", "power", "same samples", "in common with all"], rows)
