"""Sol-RL on one device, on one page and without Lightning's Trainer: equal to the command, on a CPU bit for bit.

It begins with the base model: ckpt must be null; model.init_lora and max_seconds are not read.

    python -m solrl_lightning.iteration experiment=smoke seed=3

``training/loop.py`` adds ranks, checkpoints, callbacks (one keeps an average of the trained weights), evaluations of
that average, and exploration in other processes, and encodes the prompts of several iterations at once.

Shapes: P prompts, N candidates of each, K kept, R rewards whose weight is not 0. A latent has the model's shape: FLUX's
are tokens x channels. ``rollout/records.py`` has the shape and dtype of each tensor; the LoRA is float32.
"""

import sys

import torch
from torch.optim.lr_scheduler import LambdaLR

from solrl_lightning.build import build_model, build_objective, build_rewards
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import identities
from solrl_lightning.data.prompts import PromptSchedule
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.rollout.explore import run_family
from solrl_lightning.rollout.records import Rollouts
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.targets import make_optimizer
from solrl_lightning.training.micro_batches import MicroBatches, plan_micro_batches
from solrl_lightning.training.module import SolRLModule


def train(cfg: Run, device: torch.device) -> SolRLModule:
    """Train from the base model, and return the module with the trained weights."""
    if cfg.ckpt is not None:
        raise UserError(f"ckpt={cfg.ckpt} is invalid: this program begins anew. Resume with python -m solrl_lightning.")
    objective, rewards = build_objective(cfg.objective), build_rewards(cfg.reward, cfg.model.frames, device)
    # Build the samplers `policy` and `merged`, and a shadow if a stage names it (cfg.samplers).
    module = build_model(cfg, device, cfg.samplers, rewards, objective=objective)
    model, transformers = module.model, module.transformers
    optimizer = make_optimizer(cfg.optimizer)(module.trained_parameters())
    rate = LambdaLR(optimizer, lambda step: module.rate_factor(step / cfg.optimizer_steps))  # of iterations
    # Stages: explore ..., regenerate; or one. With shared_noise (dance_grpo) a prompt has one noise.
    stages = cfg.family.stages(model.sigmas, objective.solver, objective.shared_noise)
    steps = stages[-1].steps
    sigmas = model.sigmas(steps)  # noise levels, from 1 to 0
    rows = cfg.family.keep * objective.rows_per_sample(steps)  # of a prompt: a sample has some levels, by its seed
    # Micro-batches of equal size, at most cfg.model.micro_batch rows, on 1 rank.
    plan = plan_micro_batches(cfg.prompts_per_iteration, rows, cfg.model.micro_batch, 1, cfg.optimizer_steps)
    schedule = PromptSchedule(prompt_sets(cfg).train, cfg.prompts_per_iteration, cfg.seed)

    for iteration in range(cfg.iterations):
        prompts = schedule.for_iteration(iteration)
        encoded = module.encode(prompts)  # embeddings, each [P, ...]
        transitions = objective.transitions(steps, iteration)  # recorded steps, of GRPO only

        # Requantise: rewrite the samplers `merged` and `shadow` from the old policy; `policy` has its LoRA already.
        # The iteration becomes their version, which `loop.py` checks.
        module.requantize(iteration)

        # Explore the pool cheaply, also in decoding (`Stage.decoder`), select the best and the worst, and regenerate
        # them in BF16 from the same noise (prefix and race complete them), by default with the old LoRA merged.
        seeds = pool_seeds(cfg.seed, iteration, identities(prompts), cfg.family.pool)  # [P, N]
        # [P, N] (NaN: no reward), [P, K] twice. A family of one stage samples the pool, and keeps its best and worst.
        explored, samples, proxy_merits = run_family(stages, encoded, seeds, module.run_stage, transitions)

        # Train on the samples and rewards of the last stage, not on proxies. By default an advantage is the merit minus
        # the mean of its prompt, divided by the standard deviation of all samples; most losses clip it.
        merits = rewards.for_training.merits(samples.scores)  # scores [P, K, R]; by default their weighted sum [P, K]
        advantages = objective.advantages(merits)  # [P, K]
        rollouts = Rollouts.of(prompts, samples, proxy_merits, advantages)
        # A row is a sample at one of its levels: x_t = (1 - sigma) x0 + sigma noise, new noise of seed and level, or,
        # for GRPO, a recorded state; by prompt, sample and level. Of S optimiser steps, step s takes rows s, s + S, ...
        batches = MicroBatches(rollouts, encoded, sigmas, objective, plan)
        for number, batch in enumerate(batches):
            real = max(1, batch.real)  # the others pad; by the weights a step's loss is the mean over real rows
            others = {}
            for name, every in objective.needs.items():  # "old": the old LoRA; "reference": a replica without
                if (number + iteration) % every == 0:  # every n-th; without "reference" no KL term, else n times
                    with torch.no_grad(), transformers.velocity_models[name]() as transformer:
                        others[name] = module.velocity(transformer, batch)[:real]
            with transformers.trained.current() as transformer:
                loss = objective(module.velocity(transformer, batch)[:real], batch.first(real), **others)
            weighted = (loss.per_sample * batch.weight[:real]).sum() / len(batch.weight)
            (weighted / plan.micro_batches).backward()
            if (number + 1) % plan.micro_batches == 0:
                torch.nn.utils.clip_grad_norm_(module.trained_parameters(), cfg.model.max_grad_norm)
                optimizer.step()
                rate.step()
                optimizer.zero_grad()

        # The old policy, which samples, follows the trained one: old <- d old + (1 - d) trained.
        transformers.trained.update_old(module.old_decay(iteration + 1))
        proxy = f"proxy {explored.rewards.nanmean():.4f}, " if len(stages) > 1 else ""
        print(f"iteration {iteration + 1}: {proxy}reward {samples.rewards.mean():.4f}")
    return module


if __name__ == "__main__":
    try:
        with ConfigTree() as tree:
            cfg = Run.of(application_config(tree.compose(tree.completed(sys.argv[1:])), "run"))
        train(cfg, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except UserError as error:
        sys.exit(f"error: {error}")
