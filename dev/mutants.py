"""Run mutation tests on the core of the method: ``python dev/mutants.py [NAME ...]``.

Each mutant replaces one fragment of a file in a temporary copy of the tree and runs the tests named beside it. A mutant
survives if they pass.

Tests run in forks of this process, which imports the libraries but not the package, so most mutants take seconds.
Exit status 1: a mutant survived or exceeded the time limit, a fragment does not occur exactly once, or the tests fail
without any mutant.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    "_pytest.assertion.rewrite diffusers.loaders diffusers.pipelines.flux.pipeline_flux hydra lightning.pytorch "
    "matplotlib.pyplot peft scipy.stats tensorboard.backend.event_processing.event_accumulator torch._dynamo "
    "torchmetrics transformers.models.t5 datasets open_clip torch._inductor.compile_fx"
).split()

Edit = tuple[str, str, str, str]  # name, old fragment, new fragment, tests

BACKENDS = "tests/quantization/test_backends.py"
PLAN = "tests/sizing/test_plan.py"
CARDS = f"{PLAN}::test_shadow_on_a_card_has_the_bits_of_its_capability"
SHARE = f"{PLAN}::test_run_counts_the_latents_of_its_share_of_the_prompts"
LATENTS = f"{PLAN}::test_latents_of_a_pool_by_hand"
LOOP = "tests/training/test_loop.py"
EXPLORERS = "tests/explorers/test_ray.py"
THREADS = "tests/machine/test_threads.py"
REGENERATED = f"{LOOP}::test_regenerated_samples_have_same_seeds_and_new_rewards"
PREFIX = f"{LOOP}::test_prefix_family_resumes_kept_trajectories"
RESUME = f"{LOOP}::test_resume_is_bit_exact_from_a_checkpoint_taken"
FOLLOWS = f"{LOOP}::test_only_policy_is_trained_and_old_policy_follows"
STOCHASTIC = f"{LOOP}::test_stochastic_samples_are_functions_of_their_seeds"
CHECKPOINT = f"{LOOP}::test_checkpoint_holds_adapters_only"
WEIGHTS = "tests/training/test_which_weights.py"
ENDS = "tests/cli/test_branches.py::test_run_killed_in_its_last_seconds_is_finished_by_the_same_command"
OUT_OF_SECONDS = "tests/cli/test_branches.py::test_run_that_its_max_seconds_ended_is_complete_and_resumes_with_more"
BRANCHES = "tests/cli/test_branches.py::test_branch_into_other_rewards_begins_its_evaluations_anew"
NAN_GRADIENT = "tests/cli/test_branches.py::test_gradient_that_is_not_finite_ends_the_run_before_the_step"
DIVERGED = "tests/cli/test_branches.py::test_weights_that_are_not_finite_do_not_replace_the_checkpoint"
EDITED = "tests/cli/test_branches.py::test_edited_training_prompts_are_an_error_in_the_run_s_folder_only"
HELD_OUT = "tests/cli/test_branches.py::test_run_that_resumes_with_other_held_out_prompts_begins_its_evaluations_anew"
RANKS = "tests/training/test_ddp.py"
SIGTERM = f"{RANKS}::test_sigterm_of_one_rank_ends_all"
METRICS = f"{LOOP}::test_all_metrics_of_objective_are_logged"
MEANS = f"{LOOP}::test_metrics_are_means_over_the_rows_that_have_them_without_padding"
SECONDS = f"{LOOP}::test_run_ends_with_an_evaluation_at_the_end_of_the_iteration_that_reaches_max_seconds"
BRANCH = f"{LOOP}::test_the_scheduler_sets_the_rate_of_every_step_also_after_a_resume"
ADVANTAGES = "tests/objectives/test_advantages.py"
SEEDS = "tests/test_seeds.py"
SELECT = "tests/rollout/test_select.py"
EXPLORE = "tests/rollout/test_explore.py"
CHUNKS = "tests/rollout/test_chunks.py"
ROWS = "tests/training/test_micro_batches.py"
LOSSES, NFT = "tests/objectives/test_losses.py", "tests/objectives/test_nft.py"
ARCHITECTURES = "tests/policies/test_architectures.py"
EDIT = "tests/policies/test_qwen_image_edit.py"
INPUTS = "tests/data/test_input_images.py"
BUILD, EMBEDDINGS = "tests/test_build.py", "tests/policies/test_embeddings.py"
COMPILATION, COMPILED = "tests/policies/test_compilation.py", "tests/training/test_compiled_runs.py"
BASE_WEIGHTS = "tests/policies/test_base_weights.py"
AESTHETIC, GENEVAL, HTTP = (f"tests/rewards/test_{name}.py" for name in ("aesthetic", "geneval", "http"))
GRPO = "tests/objectives/test_grpo.py"
RATIOS = f"{LOOP}::test_first_ratios_are_one_where_the_policy_samples"
SDE = "tests/sampling/test_sde.py"
AWM, PEPG, RAM = (f"tests/objectives/test_{name}.py" for name in ("awm", "pepg", "ram"))
FRAMES = "tests/test_frames.py"
COMBINE = "tests/rewards/test_combine.py"
GDPO = f"{LOOP}::test_with_gdpo_the_unit_of_a_reward_changes_neither_selection_nor_advantages"
SOLVERS = "tests/sampling/test_solvers.py"
NVFP4 = "tests/quantization/test_nvfp4.py"
EMULATED = "tests/quantization/test_scaled_linear.py"
REQUANTIZE = "tests/quantization/test_shadow.py::test_requantize_does_not_recompile"
CODES = f"{EMULATED}::test_rowwise_codes_and_scales_match_definition"
LORA = "tests/policies/test_lora.py"
ATTENTION = "tests/policies/test_bf16_attention.py"
HPSV3, VLM, VLM_LOCAL = (f"tests/rewards/test_{name}.py" for name in ("hpsv3", "vlm", "vlm_local"))
REPLICA = "tests/policies/test_replica.py"
SHARDED_STEPS, SHARDED_RUNS = (
    f"tests/training/test_sharded_full.py::test_{name}"
    for name in (
        "two_ranks_with_shards_step_as_with_whole_weights",
        "runs_resume_exactly_and_equal_those_of_whole_weights",
    )
)
DRAWING = "tests/study/test_drawing.py"
REACHED = "tests/study/test_time_to_reward.py"
ALARMS = "tests/callbacks/test_alarms.py"
EMA = "tests/callbacks/test_ema.py"
PUBLISHED = "tests/cli/test_config.py::test_published_hyperparameters_are_the_defaults"
PIPELINES = "tests/policies/test_pipelines.py"
NOISE, WRONG = "tests/policies/test_noise_levels.py", "tests/cli/test_options.py"
CHECKPOINTED = "test_gradients_are_the_same_with_checkpointing_and_without"
SCHEDULES = "tests/training/test_schedules.py"
WEIGHTED = "tests/rewards/test_reward_base.py"
GUARD = "tests/callbacks/test_guard.py"
CHECKPOINTS = "tests/callbacks/test_checkpoints.py"
GUIDANCE = "tests/policies/test_guidance.py"
PAGE = "tests/test_iteration.py"
RANK_CORRELATION = "tests/callbacks/test_rank_correlation.py"
PROGRESS, ROLLOUT_STATS, SUMMARY, TIMINGS = (
    f"tests/callbacks/test_{name}.py" for name in "progress rollout_stats summary timings".split()
)
PROMPTS, SOURCES = "tests/data/test_prompts.py", "tests/data/test_sources.py"
CONFIDENCE, EVALUATION = "tests/study/test_confidence.py", "tests/training/test_evaluation.py"
FORMATTING, LETTERING, LOGGERS, RUN_FOLDER = (
    f"tests/artifacts/test_{name}.py" for name in "formatting lettering loggers run_folder".split()
)
SCHEDULERS, SANA_FILE = "tests/policies/test_schedulers.py", "tests/policies/test_sana_checkpoint.py"
CLIPSCORE, IMAGES = "tests/rewards/test_clipscore.py", "tests/metrics/test_images.py"
AUDIT, COMPARE, EVALUATE = (f"tests/tasks/test_{name}.py" for name in ("audit", "compare", "evaluate"))

MUTANTS: dict[str, list[Edit]] = {
    "solrl_lightning/training/loop.py": [
        (
            "no evaluation after max_seconds",
            "self.trainer.should_stop, self.trainer.check_val_every_n_epoch = True, 1",
            "self.trainer.should_stop = True",
            SECONDS,
        ),
        ("the first optimiser step ends the run", "if last and self.trainer", "if self.trainer", SECONDS),
        (
            "weights of an earlier iteration are sampled",
            "sampler.version != self.iterations_done",
            "sampler.version is None",
            f"{LOOP}::test_roll_out_with_weights_of_another_iteration_is_an_error",
        ),
        (
            "learning rate of optimiser steps",
            "self._steps_taken % steps) / steps",
            "self._steps_taken % steps)",
            f"{LOOP}::test_the_scheduler_sets_the_rate_of_every_step_also_after_a_resume",
        ),
        ("a killed end is never finished", "not self.ends_again and super().skip", "super().skip", ENDS),
        ("other rewards are not evaluated", "if not self._module.evaluation.comparable:", "if False:", BRANCHES),
        ("a run that was stopped resumes", 'self.ends_again and state.get("stopped", False)', "False", ENDS),
        (
            "guided velocities counted once",
            "velocities * forward_passes(self._module.model.guidance_scale)",
            "velocities",
            GUIDANCE,
        ),
        ("labels from proxies", "advantages(merits,", "advantages(proxy_merits,", REGENERATED),
        ("statistics of one rank", "(merits, self._sum)", "(merits, lambda total: total)", RANKS),
        (
            "advantages normalised in the pool",
            "for_training.merits(samples.scores)",
            "for_training and samples.merits",
            GDPO,
        ),
        (
            "one pool for all iterations",
            "pool_seeds(self.seed, iteration,",
            "pool_seeds(self.seed, 0,",
            WEIGHTS,
        ),
        (
            "prompts encoded in other batches after a resume",
            "first = iteration - iteration % ENCODED_TOGETHER",
            "first = iteration",
            f"{LOOP}::test_prompts_of_four_iterations_are_encoded_at_once_and_resumed_ones_alike",
        ),
        ("prompts not dealt out", "[self.trainer.global_rank :: self.trainer.world_size]", "[:]", RANKS),
        (
            "a step per micro-batch",
            "accumulate_grad_batches = self.plan.micro_batches",
            "accumulate_grad_batches = 1",
            PAGE,
        ),
        (
            "timesteps of exploration",
            "rows_per_sample(stages[-1].steps)",
            "rows_per_sample(stages[0].steps)",
            WEIGHTS,
        ),
        (
            "sigmas of exploration",
            "module.model.sigmas(self.stages[-1].steps)",
            "module.model.sigmas(self.stages[0].steps)",
            WEIGHTS,
        ),
        (
            "cut-short iteration skipped",
            '.get("iterations_done", self.trainer.global_step)',
            '.get("iterations_done", self.trainer.global_step) + 1',
            RESUME,
        ),
        (
            "last iteration not evaluated",
            "1 if last else self.evaluate_every",
            "self.evaluate_every",
            f"{LOOP}::test_every_second_iteration_and_the_last_one_are_evaluated",
        ),
    ],
    "solrl_lightning/training/samplers.py": [
        ("evaluations sample the old policy", "state if version is None else None", "None", WEIGHTS),
    ],
    "solrl_lightning/training/transformers.py": [
        ("old policy not saved", 'return ".lora_" in name', 'return ".default." in name', CHECKPOINT),
        ("default samples", "self.lora_layers, OLD) as", "self.lora_layers, TRAINED) as", WEIGHTS),
        ("old policy stays", "follow(self.state(OLD), self.state(TRAINED), decay)", "pass", FOLLOWS),
        ("old velocity is the base's", "{OLD: trained.old,", "{OLD: as_it_is(reference),", WEIGHTS),
        ("reference is the old policy", "REFERENCE: as_it_is(reference)}", "REFERENCE: trained.old}", WEIGHTS),
    ],
    "solrl_lightning/training/module.py": [
        ("step with a gradient that is not finite", "if not norm.isfinite():", "if False:", NAN_GRADIENT),
        (
            "weights that are not finite are saved",
            'if not self.distances["base_distance"].isfinite():',
            "if False:",
            DIVERGED,
        ),
        ("all evaluations compare", 'checkpoint.get("evaluation") ==', 'checkpoint.get("x") !=', HELD_OUT),
        (
            "loss without guidance",
            "self.model.guided_velocity(transformer, batch",
            "self.model.velocity(transformer, batch",
            GUIDANCE,
        ),
        (
            "reference in the same micro-batches",
            "(batch_idx + self.trainer.fit_loop.iterations_done) % every",
            "batch_idx % every",
            f"{LOOP}::test_reference_is_computed_in_every_nth_micro_batch_and_each_iteration_begins_with_the_next",
        ),
        ("NaN ends the run", "or_nan=stage.name == EXPLORE", "or_nan=False", EXPLORERS),
        ("decoder of the run", "self.decoder(stage.decoder)", 'self.decoder("full")', EXPLORERS),
        ("default evaluated", 'weights="ema", progress', 'weights="default", progress', WEIGHTS),
        ("evaluation of one rank", 'self.trainer.strategy.reduce(table, reduce_op="sum").cpu()', "table.cpu()", RANKS),
        (
            "stale shadow",
            "in self.transformers.named_samplers():",
            "in list(self.transformers.named_samplers())[:1]:",
            WEIGHTS,
        ),
        (
            "stale merged replica",
            "in self.transformers.named_samplers():",
            "in list(self.transformers.named_samplers())[1:]:",
            WEIGHTS,
        ),
        (
            "shadow of the trained adapter",
            "named_samplers():\n            sampler.sync(self.policy_state(OLD)",
            "named_samplers():\n            sampler.sync(self.policy_state(TRAINED)",
            WEIGHTS,
        ),
        (
            "merged not restored",
            "finally:\n            sampler.sync(self.policy_state(OLD), version)",
            "finally:\n            pass",
            WEIGHTS,
        ),
        (
            "old velocity is the policy's",
            "velocity, real, **others)",
            "velocity, real, old=velocity, reference=others['reference'])",
            WEIGHTS,
        ),
        ("row weights off", "(per_sample * real.weight).sum() / len(batch.weight)", "per_sample.mean()", RANKS),
        ("metrics not logged", "for name, value in means.items()}", "for name, value in ()}", METRICS),
        ("metrics with padding", "rows = max(1, batch.real)", "rows = len(batch.weight)", MEANS),
        ("metrics by micro-batches", "batch_size=batch.real", "batch_size=1", MEANS),
        ("schedule of the steps", "self.rate_factor(loop.iterations_taken())", "self.rate_factor(_)", BRANCH),
        ("old policy moves at every step", "if loop.count_step():", "if loop.count_step() or True:", PAGE),
        ("watched rewards explored", "scoring = self.rewards.for_training", "scoring = self.rewards", WEIGHTS),
        (
            "distances to the old policy that follows",
            "self.distances = self.transformers.trained",
            "self.transformers.trained.update_old(0.0)\n            self.distances = self.transformers.trained",
            FOLLOWS,
        ),
    ],
    "solrl_lightning/objectives/advantages.py": [
        ("no std", "(std + eps)", "1.0", ADVANTAGES),
        (
            "mean of all prompts",
            "((merits - merits.mean(dim=1, keepdim=True))",
            "((merits - merits.mean())",
            ADVANTAGES,
        ),
        ("sample std", "(squares / count)", "(squares / (count - 1))", ADVANTAGES),
        ("std around the rank's mean", "merits - total / count", "merits - merits.mean()", ADVANTAGES),
        ("float32 advantages", "merits.double()\n    count", "merits.float()\n    count", ADVANTAGES),
    ],
    "solrl_lightning/iteration.py": [
        ("page without requantisation", "        module.requantize(iteration)\n", "", PAGE),
        ("page of another old policy", "module.old_decay(iteration + 1)", "module.old_decay(iteration)", PAGE),
    ],
    "solrl_lightning/rollout/explore.py": [
        (
            "pool keeps its latents",
            "pool = candidates._replace(state=None)",
            "pool = candidates",
            "tests/rollout/test_explore.py",
        ),
        (
            "best and worst swapped",
            "select_contrastive(candidates.merits,",
            "select_contrastive(-candidates.merits,",
            REGENERATED,
        ),
        ("other seeds regenerated", "seeds = candidates.seeds\n", "seeds = candidates.seeds + 1\n", REGENERATED),
        (
            "prefix lost",
            "state = candidates.state if",
            "state = candidates.state._replace(x=candidates.x0) if",
            PREFIX,
        ),
        ("states of a pool that nothing continues", "continued or following is None", "True", EXPLORE),
        ("places of the survivors alone", "places.gather(1, extremes.cpu())", "extremes.cpu()", EXPLORE),
    ],
    "solrl_lightning/explorers/sampler.py": [
        ("lag at the arrival", "self.version - task.version", "0", EXPLORERS),
        ("chunk of a lost explorer forgotten", "self._waiting.appendleft(task)", "pass", EXPLORERS),
        ("chunk of a lost explorer twice", "appendleft(task)", "extendleft([task, task])", EXPLORERS),
        ("newest weights dropped", "= version, [ray.put(", "= version, self._weights or [ray.put(", EXPLORERS),
        ("explored ahead beyond the last iteration", "self._cfg.iterations)", "self._cfg.iterations + 1)", EXPLORERS),
    ],
    "solrl_lightning/explorers/actor.py": [
        ("explorer keeps the first weights", "if self._weights != weights[0]:", "if not self._weights:", EXPLORERS),
    ],
    "solrl_lightning/rollout/stage.py": [
        ("noise levels without their rounding", "> level + _ROUNDING", "> level", NOISE),
        ("noise level after the step", "sigmas[:-1].double() > level", "sigmas[1:].double() > level", NOISE),
        ("levels rounded to the nearest", "math.ceil(sigma * 10**n - 1e-4)", "round(sigma * 10**n)", NOISE),
    ],
    "solrl_lightning/build.py": [
        ("tasks on the first GPU", "named_devices(node)[:1] or 1", "1", BUILD),
        ("gradients twice", '.setdefault("gradient_as_bucket_view", True)', '.get("")', BUILD),
    ],
    "solrl_lightning/options/family.py": [
        ("early stop at the last step", "level is not None and step == steps", "level is not None and False", NOISE),
        ("two rungs at one step", "(step <= before or", "(step < before or", NOISE),
        ("rung with two places", "(self.step is None) == (self.below is None)", "not (self.step or self.below)", WRONG),
        ("noise levels that rise", "all(a > b for a, b in pairwise(levels))", "True", WRONG),
        ("two early stops", "self.stop_after is not None and self.stop_below is not None", "False", WRONG),
    ],
    "solrl_lightning/rollout/select.py": [
        (
            "worst twice",
            "-torch.inf).argsort(dim=1, descending=True",
            "-torch.inf).argsort(dim=1, descending=False",
            SELECT,
        ),
        ("halves overlap", "left = finite.scatter(1, best, False)", "left = finite", SELECT),
        ("NaN is the best", "torch.where(finite, scores, -torch.inf)", "scores", SELECT),
        ("NaN is the worst", "torch.where(left, scores, torch.inf)", "torch.where(left, scores, -torch.inf)", SELECT),
    ],
    "solrl_lightning/seeds.py": [
        ("seeds without iteration", 'f"pool/{seed}/{iteration}/{prompt}"', 'f"pool/{seed}/{prompt}"', SEEDS),
        ("seeds without prompt", 'f"pool/{seed}/{iteration}/{prompt}"', 'f"pool/{seed}/{iteration}"', SEEDS),
        ("training noise is the sample's", 'b"training-noise"), shape)', 'b"step-noise"), shape)', SEEDS),
        ("evaluation of a pool", 'f"evaluation/{seed}/{prompt}"', 'f"pool/{seed}/0/{prompt}"', SEEDS),
        ("timesteps alike", 'f"timesteps/{seed}"', '"timesteps"', SEEDS),
        ("step noise of one step", "[step] * len(seeds)", "[0] * len(seeds)", SEEDS),
        ("step noise of one step in the loop", "[step] * len(seeds)", "[0] * len(seeds)", STOCHASTIC),
        ("step noise of one candidate", "seeds.tolist(), [step]", "[0] * len(seeds), [step]", SEEDS),
        ("step noise of one candidate in the loop", "seeds.tolist(), [step]", "[0] * len(seeds), [step]", STOCHASTIC),
    ],
    "solrl_lightning/rollout/chunks.py": [
        (
            "samples without guidance",
            "model.guided_velocity(transformer",
            "model.velocity(transformer",
            GUIDANCE,
        ),
        (
            "conditioning of the first prompt",
            "prompts.gather(owner[index])",
            "prompts.gather(0 * owner[index])",
            CHUNKS,
        ),
        ("caption of the first prompt", "in owner[index].tolist()", "in (0 * owner[index]).tolist()", CHUNKS),
        ("texts of candidates scored alone", "[row : row + 1], [prompt]", "[row : row + 1], prompts[:1]", CHUNKS),
        ("noise scored", "partial(score, rewards, state.x0,", "partial(score, rewards, state.x,", CHUNKS),
        ("prefix loses its place", "if whole is not None and whole.finished:", "if whole is not None:", CHUNKS),
        ("no second try", "return retry_with_empty_cache(chunk)", "return chunk()", CHUNKS),
        ("chunk without its own noise", "model.noise(starts[index])", "model.noise(starts[: len(index)])", CHUNKS),
        ("noise of another prompt", "seeds[:, :1].expand_as(seeds)", "seeds[:1, :1].expand_as(seeds)", CHUNKS),
    ],
    "solrl_lightning/rollout/scoring_worker.py": [
        ("scores on GPU 0", '(1, "scoring", *settings)', '(1, "scoring")', CHUNKS),
    ],
    "solrl_lightning/training/micro_batches.py": [
        ("padding counts", "(real * plan.weights", "(real**0 * plan.weights", ROWS),
        ("weight without micro-batches", "ranks / count * micro_batches * rows for", "ranks / count * rows for", ROWS),
        ("loss share of one rank", "ranks / count *", "1 / count *", RANKS),
        ("rewards for advantages", "rollouts.advantages.flatten()", "rollouts.rewards.flatten()", ROWS),
        ("conditioning shifted", "samples // rollouts.seeds.shape[1]", "samples * 0", ROWS),
        (
            "optimiser steps on the same rows",
            "rows * plan.optimizer_steps + optimizer_step",
            "rows * plan.optimizer_steps",
            ROWS,
        ),
    ],
    "solrl_lightning/training/evaluation.py": [
        ("changes are those to the first base", "if not self.history:", "if iteration == 0:", BRANCHES),
        (
            "evaluation noise by iteration",
            "evaluation_seeds(self.seed,",
            "evaluation_seeds(self.seed + 1 + len(self.history),",
            WEIGHTS,
        ),
        (
            "evaluations with other noise compare",
            "return digest(self.digest, self.seed)",
            "return digest(self.digest)",
            EVALUATION,
        ),
    ],
    "solrl_lightning/objectives/base.py": [
        ("noise level reversed", "torch.lerp(x0, eps,", "torch.lerp(eps, x0,", ROWS),
        ("rare reference of the same weight", "self.kl_weight * self.reference_every if", "self.kl_weight if", NFT),
        ("one noise for all timesteps", "training_noise(seeds, steps,", "training_noise(seeds, 0 * steps,", ROWS),
    ],
    "solrl_lightning/machine/memory.py": [
        ("encoders are copied back", " tensor.data = data\n", " tensor.data = data.clone()\n", EMBEDDINGS),
    ],
    "solrl_lightning/policies/compilation.py": [
        ("8 variants of a block", "max(config.recompile_limit, _MOST_VARIANTS)", "config.recompile_limit", COMPILED),
        ("DDP splits a block", "config.optimize_ddp = False", "config.optimize_ddp = True", COMPILATION),
        ("a GPU needs no headers", '(Path(headers) / "Python.h").is_file()', "True", COMPILATION),
        ("a GPU calls g++", '["gcc", "clang"]', '["g++", "clang++"]', COMPILATION),
    ],
    "solrl_lightning/policies/checkpointing.py": [
        ("other blocks", "index % 2 == 0", "index % 2 == 1", f"{PIPELINES}::{CHECKPOINTED}"),
    ],
    "solrl_lightning/objectives/nft.py": [
        ("no mirror", "((1 + beta) * v_old - beta * v)", "((1 - beta) * v_old + beta * v)", NFT),
        ("normaliser trained", "error.detach().abs()", "error.abs()", NFT),
        ("NFT clip off", ".clamp(-advantage_clip, advantage_clip) / advantage_clip / 2", " / advantage_clip / 2", NFT),
        ("NFT scale", "policy = advantage_clip * (", "policy = (", NFT),
        ("NFT KL without gradient", "kl_weight * kl).float()", "kl_weight * kl.detach()).float()", NFT),
        ("NFT old trained", "old_velocity.detach().float()", "old_velocity.float()", LOSSES),
        ("NFT sign", "(r * positive + (1 - r) * negative)", "((1 - r) * positive + r * negative)", NFT),
    ],
    "solrl_lightning/objectives/awm.py": [
        ("optimistic clip", "torch.maximum(-a * ratio", "torch.minimum(-a * ratio", AWM),
        (
            "ratio inverted",
            "(log_likelihood - old_log_likelihood).exp()",
            "(old_log_likelihood - log_likelihood).exp()",
            AWM,
        ),
        ("AWM clip off", ".clamp(-advantage_clip, advantage_clip) / advantage_clip", " / advantage_clip", AWM),
        ("Huber without sigma", "power * sigma / _HUBER_POWER", "power / _HUBER_POWER", AWM),
        (
            "AWM likelihood sign",
            "log_likelihood = -weighting(mean_square(v - target)",
            "log_likelihood = weighting(mean_square(v - target)",
            AWM,
        ),
    ],
    "solrl_lightning/objectives/ram.py": [
        ("RAM sign", "(v_ref + correction)", "(v_ref - correction)", RAM),
        ("RAM without the old policy", " - old_velocity.detach().double()", "", RAM),
        ("RAM without strength", "correction = strength * advantage", "correction = advantage", RAM),
        ("RAM old trained", "old_velocity.detach().double()", "old_velocity.double()", LOSSES),
    ],
    "solrl_lightning/objectives/pepg.py": [
        ("no proximal term", "* (a - log_ratio) *", "* a *", PEPG),
        ("ratio trained", "likelihood.detach() + normalised_error", "likelihood + normalised_error", PEPG),
        ("no ratio", "-log_ratio.exp() * (a", "-(a", PEPG),
        ("PEPG KL without gradient", "kl_weight * kl).float()", "kl_weight * kl.detach()).float()", PEPG),
        ("PEPG scale", "a = advantage_scale * advantage", "a = advantage", PEPG),
        ("log-ratios of both signs cancel", "log_ratio=log_ratio.abs()", "log_ratio=log_ratio", PEPG),
    ],
    "solrl_lightning/rewards/weighted.py": [
        ("error of a frame names another video", "error.row // each", "error.row", FRAMES),
        (
            "prompts beside other frames",
            "for prompt in prompts for _ in range(each)",
            "for _ in range(each) for prompt in prompts",
            FRAMES,
        ),
        ("GDPO centres only", "(centred / std)", "centred", COMBINE),
        ("GDPO amplifies rounding", "std > _EQUAL * root_mean_square", "std > 0", COMBINE),
        ("GDPO counts broken candidates", "finite.sum(dim=1, keepdim=True)", "scores.shape[1]", COMBINE),
        (
            "evaluations combined",
            "        return weighted_sum(scores, self._weights",
            "        return self.combine(scores, self._weights",
            GDPO,
        ),
        (
            "rollouts forget the combination",
            "self.weights, self.combine, self.frames)",
            "self.weights, frames=self.frames)",
            GDPO,
        ),
        ("negative weights not trained on", "if weight != 0", "if weight > 0", WEIGHTED),
    ],
    "solrl_lightning/objectives/grpo.py": [
        ("GRPO optimistic clip", "torch.maximum(-a * ratio", "torch.minimum(-a * ratio", GRPO),
        ("GRPO ratio inverted", "(log_prob - old_log_prob.detach())", "(old_log_prob.detach() - log_prob)", GRPO),
        ("GRPO clip off", "advantage.to(ratio).clamp(-advantage_clip, advantage_clip)", "advantage.to(ratio)", GRPO),
        ("GRPO KL scale", "distance / (2 * noise_std.detach().square())", "distance / noise_std.detach()", GRPO),
        ("GRPO trains the last step", "return range(num_steps - 1)", "return range(num_steps)", GRPO),
        ("old ratios called first", "if batch.optimizer_step == 0", "if batch.optimizer_step >= 0", RATIOS),
    ],
    "solrl_lightning/objectives/flow_grpo.py": [
        ("fixed window", "window/{self.seed}/{iteration}", "window/{self.seed}", GRPO),
        ("window anywhere", "places = most - self.window + 1", "places = num_steps - self.window", GRPO),
    ],
    "solrl_lightning/sampling/sde.py": [
        ("score sign", "velocity - 0.5 * eta**2 * score", "velocity + 0.5 * eta**2 * score", SDE),
        ("noise without the step", "mean, s * (-dt).sqrt()", "mean, s", SDE),
        ("log-probability as a sum", "square().flatten(1).mean(1)", "square().flatten(1).sum(1)", SDE),
        ("noise in every step", "if drawn is None:", "if noise is None:", SDE),
        ("log-probability of the mean", "log_prob=log_prob(x, mean, std)", "log_prob=log_prob(mean, mean, std)", SDE),
    ],
    "solrl_lightning/sampling/__init__.py": [
        ("resumed from the first step", "range(state.step, stop_step)", "range(stop_step)", SOLVERS),
    ],
    "solrl_lightning/sampling/state.py": [
        ("history lost", "tensor: tensor[index], self)", "tensor: tensor[index], self._replace(x0=None))", SOLVERS),
    ],
    "solrl_lightning/sampling/euler.py": [
        ("Euler backwards", "(sigma_next - sigma) * velocity", "(sigma - sigma_next) * velocity", SOLVERS),
        ("x0 at the next level", "state.x - sigma * velocity", "state.x - sigma_next * velocity", SOLVERS),
    ],
    "solrl_lightning/sampling/dpm2.py": [
        ("dpm2 step ratio", "* h / h_before", "* h_before / h", SOLVERS),
        ("dpm2 correction doubled", "return 0.5 *", "return 1.0 *", SOLVERS),
        ("dpm2 extrapolates back", "weight * (after.x0 - state.x0)", "weight * (state.x0 - after.x0)", SOLVERS),
    ],
    "solrl_lightning/quantization/nvfp4.py": [
        ("E2M1 spacing", ".floor_().add_(0.5)", ".floor_().add_(0.25)", NVFP4),
        ("E4M3 with two fraction bits", "1.5 * 2.0**20", "1.5 * 2.0**21", NVFP4),
        ("E4M3 subnormals", "clamp_(min=2.0**-6)", "clamp_(min=2.0**-9)", NVFP4),
        (
            "nibbles swapped",
            "code[..., 0::2] | (code[..., 1::2] << 4)",
            "code[..., 1::2] | (code[..., 0::2] << 4)",
            NVFP4,
        ),
        ("sign lost", "blocks.signbit(), code | 8, code", "blocks.signbit(), code, code", NVFP4),
        ("global scale", "(amax / (E4M3_MAX * E2M1_MAX))", "(amax / E4M3_MAX)", NVFP4),
    ],
    "solrl_lightning/machine/threads.py": [
        ("quota of the outermost group only", "return min(limits)", "return limits[-1]", THREADS),
        ("ranks do not divide the cores", "limit)) // ranks)", "limit)))", THREADS),
        ("busy cores count as free", "share >= _FREE * allowed", "share >= 0", THREADS),
        ("starting ranks count as busy", "(free + ranks - 1) / ranks", "free / ranks", THREADS),
        ("one thread spins", "if threads > 1 and not any", "if not any", THREADS),
        ("variables of the starting process stay", "del os.environ[name]", "pass", THREADS),
    ],
    "solrl_lightning/quantization/scaled_linear.py": [
        ("weight scale lost", "scale * self.weight_scale", "scale", EMULATED),
        ("bias lost", "y if self.bias is None else y.add_(self.bias)", "y", EMULATED),
    ],
    "solrl_lightning/quantization/linear.py": [
        ("weight not requantised", "self.get_buffer(name).copy_(value)", "pass", REQUANTIZE),
    ],
    "solrl_lightning/quantization/rowwise.py": [
        ("negative side of a row", "torch.maximum(high, -low)", "high", CODES),
    ],
    "solrl_lightning/quantization/cached_quantizer.py": [
        ("input changed in place", "self.version != x._version or", "", EMULATED),
    ],
    "solrl_lightning/quantization/rules.py": [
        ("excluded layers quantised", "layer.quantized and", "", "tests/quantization/test_rules.py"),
    ],
    "solrl_lightning/policies/lora.py": [
        ("LoRA's gradient without its scale", "(g @ up) * ctx.scale", "g @ up", LORA),
        ("LoRA's input gradient left out", ".addmm_(low_gradient, down)", "", LORA),
        ("merge without alpha / r", "alpha=layer.scaling[TRAINED]", "alpha=1.0", LORA),
        ("old decay inverted", "1.0 - decay", "decay", LORA),
        ("adapters in BF16", "            weights.float()", "            weights", LORA),
        ("weights of an evaluation stay", "parameter.data = former[name]", "pass", LORA),
        ("old policy trains", "inference_mode=not requires_gradients", "inference_mode=False", LORA),
        ("unused adapters train again", " and layer.is_trained", "", PIPELINES),
    ],
    "solrl_lightning/policies/lora_files.py": [
        ("alpha of a file for its share of the rank", "(alpha.item() / rank)", "alpha.item()", LORA),
        ("rsLoRA at the scale of LoRA", "math.sqrt(rank) if", "rank if", LORA),
        ("peft's alpha unread", "if of_peft and beside.is_file():", "if False:", LORA),
    ],
    "solrl_lightning/policies/guidance.py": [
        ("unconditional velocity trained", "with torch.no_grad():", "with torch.enable_grad():", GUIDANCE),
        ("guidance from the prompt", "return unconditional + scale", "return scale", GUIDANCE),
    ],
    "solrl_lightning/policies/flux2.py": [
        ("latents without variance", "x * std + mean", "x + mean", ARCHITECTURES),
    ],
    "solrl_lightning/policies/qwen_image.py": [
        ("the last block's text is trained", 'f"transformer_blocks.{len(', 'f"other_blocks.{len(', PIPELINES),
        ("norm of the guided velocity", "combined.norm(dim=-1", "combined.norm(dim=1", ARCHITECTURES),
        ("padding unmasked", "F.pad(mask, (0, missing))", "F.pad(mask, (0, missing), value=True)", ARCHITECTURES),
    ],
    "solrl_lightning/policies/qwen_image_edit.py": [
        ("input image before the noise", "[x, conditioning[", "[conditioning[", EDIT),
        ("guidance without the image", 'self._embed([""] * len(prompts), images', "self._embed([''], images[:1]", EDIT),
        ("one embedding for all images", 'return f"{prompt.text} {content}"', "return prompt.text", EDIT),
        ("text with the name of the image", "self._embed([prompt.text for", "self._embed([prompt.identity for", EDIT),
    ],
    "solrl_lightning/policies/z_image.py": [
        ("velocity towards the image", "return -torch.stack", "return torch.stack", ARCHITECTURES),
        (
            "padding of captions unmasked",
            "F.pad(mask, (0, missing))",
            "F.pad(mask, (0, missing), value=True)",
            ARCHITECTURES,
        ),
        ("captions of the batch's length", "if pad_token is self.cap_pad_token:", "if False:", ARCHITECTURES),
        (
            "the card guides by one more",
            '{"guidance_scale": self.guidance_scale - 1}',
            '{"guidance_scale": self.guidance_scale}',
            GUIDANCE,
        ),
    ],
    "solrl_lightning/policies/wan.py": [
        ("levels without the shift", "shift=scheduler.config.flow_shift", "shift=1.0", ARCHITECTURES),
        ("levels down to 0", "1 / scheduler.config.num_train_timesteps", "0", ARCHITECTURES),
        ("frames among the channels", ".transpose(1, 2)", "", ARCHITECTURES),
        ("prompts without their zeros", "self.max_sequence_length - embeds.shape[1]", "0", ARCHITECTURES),
    ],
    "solrl_lightning/frames.py": [
        ("frames from the first on", "torch.linspace(0, count - 1, number", "torch.arange(number", FRAMES),
        ("strip from top to bottom", "permute(0, 2, 3, 1, 4)", "permute(0, 2, 1, 3, 4)", FRAMES),
    ],
    "solrl_lightning/policies/base_weights.py": [
        ("stored gradient transposed", "@ dense(weight).to", "@ dense(weight).T.to", BASE_WEIGHTS),
    ],
    "solrl_lightning/rewards/aesthetic.py": [
        (
            "embedding of any length",
            "F.normalize(self.embeddings(images), dim=-1)",
            "self.embeddings(images)",
            AESTHETIC,
        ),
    ],
    "solrl_lightning/rewards/geneval.py": [
        ("left is right", '"left of": x < -0.5', '"left of": x > 0.5', GENEVAL),
        ("colour without objects", "/ count if holds else 0.0", "/ count", GENEVAL),
        ("objects that are excluded", "None not in groups and not excluded", "None not in groups", GENEVAL),
        ("no counting threshold", 'self.thresholds.get(row.get("tag", ""), self.threshold)', "self.threshold", GENEVAL),
        ("a clause of partly coloured objects holds", "holds = share == 1", "holds = share > 0", GENEVAL),
        ("metadata by the number of the prompt", "metadata[int(rows[0])]", "metadata[number]", GENEVAL),
    ],
    "solrl_lightning/rewards/client.py": [
        ("posts not repeated", "allowed_methods=None", "allowed_methods={'GET'}", HTTP),
        ("answers without an end", "if time.monotonic() > end:", "if False:", HTTP),
        ("answers of any length", "len(content) <= _LONGEST and ", "", HTTP),
    ],
    "solrl_lightning/rewards/http.py": [
        ("metadata of the first request", "metadata[part]", "metadata[: self.batch]", HTTP),
        ("scores in the order of answers", "threads.imap(", "threads.imap_unordered(", HTTP),
        ("any answer is a list of scores", "isinstance(scores, list) and", "", HTTP),
        (
            "true and false are scores",
            "type(score) in (int, float, type(None))",
            "isinstance(score, float | int | None)",
            HTTP,
        ),
    ],
    "solrl_lightning/policies/replica.py": [
        (
            "base overwritten",
            "dense(layer._parameters[name]).detach().clone()",
            "dense(layer._parameters[name]).detach()",
            REPLICA,
        ),
        ("quantised layers stay", "layer.requantize_(value.float())", "pass", REPLICA),
        ("replica with copied weights", "{id(tensor): tensor for tensor in tensors}", "{}", REPLICA),
    ],
    "solrl_lightning/training/sharded_full.py": [
        ("gathered root outlives its weights", ", reshard_after_forward=True", "", SHARDED_STEPS),
        ("inputs rounded at every block", "cast_forward_inputs=False", "cast_forward_inputs=True", SHARDED_STEPS),
        ("gradients reduced as rounded", "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16", SHARDED_STEPS),
        ("distances of one rank's part", "distributed.all_reduce(square)", "pass", SHARDED_STEPS),
        ("old policy is not written", "parameter.copy_(state[name])", "pass", SHARDED_STEPS),
        ("layers in float32 are rounded", "== torch.float32 else None", "!= torch.float32 else None", SHARDED_STEPS),
    ],
    "solrl_lightning/training/shards.py": [
        ("moments and average stay whole", "or not isinstance(example, DTensor)", "or example.ndim", SHARDED_RUNS),
        ("every rank keeps the whole", "if distributed.get_rank() == 0 else", "if True else", SHARDED_STEPS),
    ],
    "solrl_lightning/training/schedules.py": [
        ("ramp without start", "max(step - self.start, 0)", "max(step, 0)", SCHEDULES),
        ("type 1 up to 0.9", "slope=0.001, maximum=0.5", "slope=0.001, maximum=0.9", SCHEDULES),
        ("average of eleven", "(1 + step) / (10 + step)", "(1 + step) / (11 + step)", SCHEDULES),
    ],
    "callbacks/ema.py": [
        ("average inverted", "1.0 - decay", "decay", EMA),
        ("an update per micro-batch", "if self.updates < trainer.global_step", "if trainer.global_step >= 0", EMA),
        ("average is the policy", "value.detach().float().clone()", "value.detach().float()", EMA),
        ("average's decay a step late", "ema_decay(trainer.global_step)", "ema_decay(self.updates)", EMA),
        (
            "a step is not in the first evaluation's average",
            "            self._catch_up(trainer, pl_module)\n        else:",
            "            pass\n        else:",
            EMA,
        ),
    ],
    "callbacks/alarms.py": [
        ("falls measured from the base", "best = int(means[:-1].argmax())", "best = 0", ALARMS),
        ("errors over images of all prompts", "/ values.shape[1] ** 0.5", "* 1.0", ALARMS),
        (
            "training rise over the first iterations",
            "if i <= since][-len(after) :]",
            "if i <= since][: len(after)]",
            ALARMS,
        ),
        (
            "least fall in the spread of the last evaluation",
            "_LEAST_FALL * float(values[0].std())",
            "_LEAST_FALL * float(values[-1].std())",
            ALARMS,
        ),
        ("gain of the best over the last evaluation", "means[best] - means[0]", "means[best] - means[-1]", ALARMS),
        ("distance since the last iteration", "iterations[last] if last >= 0 else 0", "iterations[last]", ALARMS),
        ("drift of the last iteration only", "any(values[-limit:])", "values[-1]", ALARMS),
        ("eight prompts are too few", ">= _FEWEST_PROMPTS", "> _FEWEST_PROMPTS", ALARMS),
    ],
    "callbacks/guard.py": [
        (
            "a persisting alarm is repeated",
            "if alarm.name not in self._active",
            "if alarm.name",
            GUARD,
        ),
        (
            "constant rewards before a resume",
            'list(state_dict["active"]), state_dict["faulty"]',
            'list(state_dict["active"]), 0',
            GUARD,
        ),
        ("rewards of weight 0 not watched", "if w >= 0 and", "if w > 0 and", GUARD),
        ("rewards of negative weight watched", "if w >= 0 and name", "if name", GUARD),
        (
            "alarms of the last iteration lost in a resume",
            "alarm.iteration <= trainer.current_epoch",
            "alarm.iteration < trainer.current_epoch",
            GUARD,
        ),
        (
            "a repeated iteration counts twice",
            "self.history = self.history.until(trainer.current_epoch)",
            "pass",
            GUARD,
        ),
        ("a repeated evaluation counts twice", "self.history = self.history.until(iteration - 1)", "pass", GUARD),
        ("an old alarm is the reason of a stop", "if not trainer.should_stop:", "if False:", GUARD),
    ],
    "callbacks/checkpoints.py": [
        ("no checkpoint of the last iteration", "if ends or loop", "if loop", CHECKPOINTS),
        ("best is the newest", "reward > self.reward", "reward is not None", CHECKPOINTS),
        ("a branch keeps the best of the other run", "self.reward = self.iteration = None", "pass", CHECKPOINTS),
        ("best of the trained reward", "self.monitor or module.rewards.name", "module.rewards.name", CHECKPOINTS),
        ("oldest of the periodic ones kept", "[: -self.keep]", "[self.keep :]", CHECKPOINTS),
    ],
    "callbacks/requantize.py": [
        (
            "shadow never requantised",
            "module_of(pl_module).requantize(loop_of(trainer).iterations_done)",
            "pass",
            "tests/callbacks/test_requantize.py",
        ),
    ],
    "solrl_lightning/tasks/train.py": [
        (
            "other training prompts",
            "recorded not in (None, digest(identities(prompts)))",
            "False",
            EDITED,
        ),
    ],
    "callbacks/export.py": [
        ("no export of shards on SIGTERM", "not sharded or isinstance", "not sharded and isinstance", SIGTERM),
        ("a diverged LoRA is exported", "WriteError | NonFiniteError", "WriteError", DIVERGED),
        ("best exported after every run", " and stop_reason(trainer) is not None", "", CHECKPOINTS),
    ],
    "callbacks/rank_correlation.py": [
        (
            "seconds of all probes",
            '.seconds["probe"] - before',
            '.seconds["probe"]',
            RANK_CORRELATION,
        ),
        (
            "probes of another reward",
            "if self._reward not in (None, reward):",
            "if False:",
            RANK_CORRELATION,
        ),
        (
            "repeated probe recorded twice",
            'row["iteration"] < iteration]',
            'row["iteration"] <= iteration]',
            RANK_CORRELATION,
        ),
    ],
    "callbacks/rollout_stats.py": [
        ("prompts compared with the first", "rewards[:, :1]", "rewards[:1]", ROLLOUT_STATS),
        ("first reward under every name", "each[:, i]", "each[:, 0]", ROLLOUT_STATS),
    ],
    "callbacks/summary.py": [
        ("max_seconds stops a run early", " or loop_of(trainer).is_time_up", "", OUT_OF_SECONDS),
        ("first metrics are the last", "self._last | self._first", "self._first | self._last", SUMMARY),
        (
            "interrupted evaluation wins",
            "for row in module.evaluation.history}",
            "for row in module.evaluation.history[::-1]}",
            SUMMARY,
        ),
        ("base is the first evaluation", 'for row in scored if row["iteration"] == 0', "for row in scored", SUMMARY),
    ],
    "callbacks/timings.py": [
        ("time of earlier callbacks lost", "iteration += sum(stages", "iteration += 0 * sum(stages", TIMINGS),
        (
            "seconds before a resume lost",
            "dict(self._resumed + Counter(self._stopwatch.seconds))",
            "dict(self._stopwatch.seconds)",
            TIMINGS,
        ),
    ],
    "callbacks/sample_grid.py": [
        (
            "rewards of the best under the worst samples",
            "[labels[place] for place in chosen.tolist()]",
            "labels[: len(chosen)]",
            "tests/callbacks/test_sample_grid.py",
        ),
    ],
    "callbacks/progress.py": [
        ("ETA of the iterations", "min(left, self._budget - elapsed)", "left", PROGRESS),
        ("lines of all iterations", "min(expected, done * loop.max_seconds / trained)", "expected", PROGRESS),
        (
            "a whole iteration beside the stage",
            "(iterations - 1) * each + stage",
            "iterations * each + stage",
            PROGRESS,
        ),
        ("median seconds of evaluations", "fmean(extra)", "median(extra)", PROGRESS),
    ],
    "solrl_lightning/rewards/shapes.py": [
        (
            "relation with one of the objects",
            "* measured.present.prod(1)",
            "* measured.present.mean(1)",
            "tests/rewards/test_shapes_reward.py",
        ),
    ],
    "solrl_lightning/rewards/imagereward.py": [
        (
            "padding of the prompt attended to",
            'tokens["attention_mask"][place]',
            'tokens["attention_mask"][place] ** 0',
            "tests/rewards/test_imagereward.py",
        ),
    ],
    "solrl_lightning/policies/bf16_attention.py": [
        ("sums that overflow", "most < key.shape[1] * _GREATEST_MEAN", "True", ATTENTION),
        ("sums that vanish", "least > key.shape[1] / _GREATEST_MEAN and", "", ATTENTION),
        ("softmax of rounded scores", "query.float(), key.float().mT, scale)", "query, key.mT, scale)", ATTENTION),
        ("softmax divided again", "torch.ones_like(sums, dtype=exact.dtype)", "sums", ATTENTION),
        ("gradient of weights that are not divided", "weights.div_(sums)", "weights", ATTENTION),
    ],
    "solrl_lightning/rewards/hpsv3.py": [
        ("spread for mean", ".float())[:, 0]", ".float())[:, 1]", HPSV3),
        ("tokens of a prompt as the chat's own", 'prompt.replace("<|", "< |")', "prompt", HPSV3),
        ("images of another area", "_PIXELS = 256 * 28 * 28", "_PIXELS = 64 * 28 * 28", HPSV3),
    ],
    "solrl_lightning/rewards/vlm_local.py": [
        ("padding after the question", 'padding_side="left"', 'padding_side="right"', VLM_LOCAL),
        ("answers not renormalised", " / answers.sum(dim=1)", "", VLM_LOCAL),
    ],
    "solrl_lightning/data/input_images.py": [
        ("left part of the image", "(width - square) // 2", "0", INPUTS),
        ("upper part of the image", "(height - square) // 2", "0", INPUTS),
        ("image as the camera lay", "ImageOps.exif_transpose(opened)", "opened", INPUTS),
    ],
    "solrl_lightning/rewards/server.py": [
        ("a request opens files", "if key != INPUT_IMAGE", "", "tests/rewards/test_server.py"),
    ],
    "solrl_lightning/rewards/vlm.py": [
        ("input image no part of the question", 'b"".join([*pngs,', 'b"".join([pngs[-1],', VLM),
        ("share of all words", " / total if total else", " if total else", VLM),
        ("likeliest word alone", "weights[word] += ", "weights[word] = ", VLM),
        ("equal images asked about again", "if key not in self._scored}", "}", VLM),
    ],
    "solrl_lightning/rewards/ocr.py": [
        ("red and blue swapped", "[..., ::-1]", "", "tests/rewards/test_ocr.py"),
    ],
    "solrl_lightning/data/sources.py": [
        ("prompts of seven words", ">= PICKAPIC_SPACES", "> PICKAPIC_SPACES", SOURCES),
        ("text before JSON lines in a folder", '(".jsonl", ".txt")]', '(".txt", ".jsonl")]', SOURCES),
        ("text after a quote taken", "delimiter=separator, strict=True", "delimiter=separator", SOURCES),
        ("quotes without need taken", "and not _NEEDLESS_QUOTES.search(names)", "and False", SOURCES),
        ("first column of a table", "place = names.index(column)", "place = 0", SOURCES),
    ],
    "solrl_lightning/data/prompt.py": [
        ("prompts equal whatever their metadata", "hash=False)", "compare=False)", CHUNKS),
    ],
    "solrl_lightning/data/prompts.py": [
        (
            "iterations that share prompts",
            "order[position * self.per_iteration :]",
            "order[position:]",
            PROMPTS,
        ),
        ("metadata of the last of equal rows", "in reversed(rows)", "in rows", PROMPTS),
    ],
    "solrl_lightning/tasks/compare.py": [
        ("share of the plateau, not of the progress", "fmean(rises) / (level - base)", "fmean(rises) / level", COMPARE),
        ("a rise is a plateau", "rise < _LEVELLED_OFF", "rise > _LEVELLED_OFF", COMPARE),
        (
            "above the plateau by the final reward",
            "group.plateaus[seed].level -",
            "group.finals[seed] -",
            COMPARE,
        ),
        (
            "lowest of the groups",
            "key=lambda group: -fmean(group.finals.values())",
            "key=lambda group: fmean(group.finals.values())",
            COMPARE,
        ),
    ],
    "solrl_lightning/study/time_to_reward.py": [
        (
            "plateau of the last half",
            "3 * (cost - first) >= 2 * (last - first)",
            "2 * (cost - first) >= last - first",
            REACHED,
        ),
        ("last third from cost 0", "3 * (cost - first) >= 2 * (last - first)", "3 * cost >= 2 * last", REACHED),
        (
            "share of the plateau",
            "self.base + percent / 100 * (self.level - self.base)",
            "percent / 100 * self.level",
            REACHED,
        ),
        ("middle evaluation in the first half", "fmean(end[:half])", "fmean(end[:-half])", REACHED),
    ],
    "solrl_lightning/study/run_groups.py": [
        ("plateau by iterations", 'costs(run, "seconds") or costs', "costs", COMPARE),
        ("cost of one seed", "fmean(spent[iteration] for _, _, spent in known)", "known[0][2][iteration]", COMPARE),
        (
            "a run that stopped early replaces a completed one",
            '("completed", "stopped early")',
            '("stopped early", "completed")',
            COMPARE,
        ),
    ],
    "solrl_lightning/study/elsewhere.py": [
        ("factors of the sum", "cost.factors.get(stage, 1) * seconds", "cost.factors.get(stage, 1)", COMPARE),
        ("BF16 at the price of the shadow", "stage.sampler == SHADOW and cheap", "cheap", COMPARE),
        ("the rows of one prompt", "prompts * family.keep * rows", "family.keep * rows", COMPARE),
    ],
    "solrl_lightning/study/drawing.py": [
        ("a chart has the lines of the one before", "artist.remove()", "pass", DRAWING),
        ("texts as short as coordinates", '(?=[ "])', "", DRAWING),
    ],
    "solrl_lightning/study/learning_curves.py": [
        ("dots in other units than the axis", 'at["mean"] / scale', 'at["mean"]', COMPARE),
    ],
    "solrl_lightning/sizing/plan.py": [
        (
            "every card holds packed weights",
            "replica_bytes(weights, replaced, names, each.bits_per_weight)",
            "packed",
            CARDS,
        ),
        (
            "latents of all devices",
            "cfg.family.stages(sigmas, objective.solver), math.ceil(cfg.prompts_per_iteration / devices)",
            "cfg.family.stages(sigmas, objective.solver), cfg.prompts_per_iteration",
            SHARE,
        ),
        ("cards of 2^30 bytes", "(card.memory - task.reserve) * 1e9", "(card.memory - task.reserve) * 2**30", PLAN),
        (
            "training in the batches of rollouts",
            'size["training"] = cfg.model.micro_batch',
            'size["training"] = cfg.model.rollout_batch',
            PLAN,
        ),
    ],
    "solrl_lightning/sizing/trace.py": [
        ("tokens of the whole batch", "count // images for", "count for", PLAN),
        ("training bytes of the whole batch", "training.peak // images", "training.peak", PLAN),
        (
            "decoding bytes of the whole batch",
            "decoding_bytes=decoding.peak // images",
            "decoding_bytes=decoding.peak",
            PLAN,
        ),
    ],
    "solrl_lightning/tasks/audit_search.py": [
        (
            "regeneration without its cost",
            "velocities_per_prompt([*stages, regenerate], pool)",
            "velocities_per_prompt(stages, pool)",
            AUDIT,
        ),
        (
            "too little of the gap is enough",
            "self.gap_kept + error >= min_gap",
            "self.gap_kept + error <= min_gap",
            AUDIT,
        ),
        ("scores of the step before", "scores[stage.end]", "scores[min(scores)]", AUDIT),
        ("gap of the search without its error", "self.gap_kept + error", "self.gap_kept", AUDIT),
    ],
    "solrl_lightning/tasks/audit.py": [
        ("seconds of a prompt under those of a candidate", "value / seeds.numel()", "value / len(seeds)", AUDIT),
        (
            "an iteration without training",
            "sum(explorer.seconds.values()) + training",
            "sum(explorer.seconds.values())",
            AUDIT,
        ),
        ("pool of the family without selection", "task.keep, task.keep)], task", "task.pool, task.keep)], task", AUDIT),
    ],
    "solrl_lightning/tasks/audit_verdict.py": [
        ("cost inverted", "gain.times(1 / cost)", "gain.times(cost)", AUDIT),
        ("a chance pays", 'if ratio["low"] > 1', 'if ratio["mean"] > 1', AUDIT),
        ("equal gains by the largest", 'best["mean"] - (0', 'best["mean"] + (0', AUDIT),
    ],
    "solrl_lightning/metrics/selection_gain.py": [
        ("variance of the pool", "* (1 - 1 / keep)", "", "tests/metrics/test_selection_gain.py"),
        ("error of a mean of ratios", "(prompts - 1) * (without", "(without", "tests/metrics/test_selection_gain.py"),
    ],
    "solrl_lightning/tasks/evaluate.py": [
        ("columns of models and rewards swapped", "scores.permute(1, 2, 3, 0)", "scores.permute(1, 2, 0, 3)", EVALUATE),
        ("first score below a picture", "pictures.shape[1], -1]", "pictures.shape[1], 0]", EVALUATE),
    ],
    "solrl_lightning/sizing/benchmark.py": [
        (
            "forward passes with their warm-up",
            "median(values[_WARM_UP:]) for",
            "median(values) for",
            "tests/sizing/test_benchmark.py",
        ),
    ],
    "solrl_lightning/tasks/generate.py": [
        ("seeds of the first prompts", "seeds[part]", "seeds[: len(prompts[part])]", "tests/tasks/test_generate.py"),
    ],
    "solrl_lightning/study/report.py": [
        ("seconds on an axis of hours", "row[cost] / scale, row", "row[cost], row", DRAWING),
    ],
    "solrl_lightning/quantization/backends.py": [
        ("every GPU computes in FP4", "return hardware.capability >= candidate.capability", "return True", BACKENDS),
        ("a package that is not installed computes", "if candidate.package and", "if False and", BACKENDS),
        ("resumed run takes another precision", "if precision != AUTO or ckpt is None:", "if True:", BACKENDS),
    ],
    "solrl_lightning/quantization/formats.py": [
        ("auto is INT8", "for each in (NVFP4, FP8, INT8)", "for each in (INT8, NVFP4, FP8)", BACKENDS),
    ],
    "solrl_lightning/sizing/layers.py": [
        ("a chosen backend that fails is ok", "if chosen in failures:", "if False:", "tests/sizing/test_layers.py"),
    ],
    "solrl_lightning/sizing/footprint.py": [
        ("chunks are joined in place", "count * (resumed + 2 + recorded)", "count * resumed", LATENTS),
        ("auto recomputes all blocks", "self.peak(choice) <= room", "self.peak(choice) < 0", PLAN),
    ],
    "conf/trainer/auto.yaml": [
        (
            "gradient clip off",
            "gradient_clip_val: ${model.max_grad_norm}",
            "gradient_clip_val: null",
            PUBLISHED,
        ),
    ],
    "solrl_lightning/study/confidence.py": [
        (
            "degrees of freedom of the larger sample",
            "min(len(first), len(second))",
            "max(len(first), len(second))",
            CONFIDENCE,
        ),
    ],
    "solrl_lightning/options/model.py": [
        ("all frames are not scored", "self.frames > (self.num_frames", "self.frames >= (self.num_frames", WRONG),
    ],
    "solrl_lightning/artifacts/complete.py": [
        ("shards without an index", 'if shard.name.count(".") == 1:', "if False:", VLM_LOCAL),
    ],
    "solrl_lightning/artifacts/lettering.py": [
        ("bold fonts first", "return any(style in", "return not any(style in", LETTERING),
        ("wide letters as narrow ones", "(0.62 * (1 - wide) + wide)", "0.62", LETTERING),
    ],
    "solrl_lightning/artifacts/formatting.py": [
        ("umlauts without quotes", "[A-Za-z0-9_./@:+-]+", "[\\w./@:+-]+", FORMATTING),
        ("numbers with three digits", "return digits - 1 - math", "return digits - 2 - math", FORMATTING),
    ],
    "solrl_lightning/artifacts/run_folder.py": [
        (
            "folders in other encodings",
            "if os.fsencode(existing) !=",
            "if False and os.fsencode(existing) !=",
            RUN_FOLDER,
        ),
    ],
    "solrl_lightning/artifacts/loggers.py": [
        ("an error of a logger ends the run", "self.has_failed = True", "raise", LOGGERS),
    ],
    "solrl_lightning/policies/schedulers.py": [
        (
            "settings that no sampler reads",
            "if value != rule and (rule is not False or value):",
            "if False:",
            SCHEDULERS,
        ),
        ("levels that ascend", "not bool((levels.diff() < 0).all()) or", "", SCHEDULERS),
    ],
    "solrl_lightning/policies/sana_checkpoint.py": [
        (
            "values for keys",
            '"attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v")',
            '"attn.qkv": ("attn1.to_q", "attn1.to_v", "attn1.to_k")',
            SANA_FILE,
        ),
    ],
    "solrl_lightning/policies/embeddings.py": [
        ("damaged embeddings", 'if (file.metadata() or {}).get("digest") == _digest(row):', "if True:", EMBEDDINGS),
    ],
    "solrl_lightning/policies/fused_lora.py": [
        (
            "a fused LoRA replaces the weights",
            "weight.copy_(weight.float() + update.view_as(weight))",
            "weight.copy_(update.view_as(weight))",
            LORA,
        ),
    ],
    "solrl_lightning/rewards/answers.py": [
        ("answers of one value", "for mark in value.values()}) > 1", "for mark in value.values()}) > 0", WRONG),
        ("4.0 is another answer than 4", 'return f"{float(word):.15g}" if', "return word if", VLM),
    ],
    "solrl_lightning/rewards/preprocessing.py": [
        (
            "levels are cut off, not rounded",
            "(images.float().clamp(0, 1) * 255).round() / 255",
            "(images.float().clamp(0, 1) * 255).floor() / 255",
            "tests/rewards/test_preprocessing.py",
        ),
        (
            "one crop for odd margins",
            "top, left = (high - self.height) // 2,",
            "top, left = (high - self.height + 1) // 2,",
            "tests/rewards/test_preprocessing.py",
        ),
    ],
    "solrl_lightning/rewards/geneval_metadata.py": [
        ("positions relative to a later clause", "for i in range(number)]:", "for i in range(number + 1)]:", GENEVAL),
    ],
    "solrl_lightning/rewards/towers.py": [
        (
            "embeddings of any length",
            "F.normalize(image_features, dim=-1) * F.normalize(text_features",
            "image_features * F.normalize(text_features",
            CLIPSCORE,
        ),
    ],
    "solrl_lightning/metrics/images.py": [
        ("edges in one direction", "+ luma.diff(dim=2).abs().mean((1, 2))) / 2", ") / 1", IMAGES),
    ],
    "solrl_lightning/metrics/rank.py": [
        (
            "tied ranks are the first",
            "(smaller + not_larger).double() / 2",
            "not_larger.double()",
            "tests/metrics/test_rank.py",
        ),
    ],
    "solrl_lightning/shapes/world.py": [
        ("a training caption is held out", "[NUM_EVAL:]", "[NUM_EVAL - 1:]", "tests/shapes/test_world.py"),
    ],
    "solrl_lightning/training/stopwatch.py": [
        (
            "a stage counts what precedes it",
            "        self._charge()\n        outer =",
            "        outer =",
            "tests/training/test_stopwatch.py",
        ),
    ],
    "solrl_lightning/training/optimizer_state.py": [
        (
            "the checkpoint's learning rate",
            "[group | optimizer.defaults for",
            "[optimizer.defaults | group for",
            "tests/training/test_optimizer_state.py",
        ),
    ],
    "solrl_lightning/quantization/nvfp4_packed.py": [
        (
            "scales of a tile in order",
            "tiles.permute(0, 3, 2, 1, 4)",
            "tiles.permute(0, 3, 1, 2, 4)",
            "tests/quantization/test_nvfp4_packed.py",
        ),
    ],
}


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


class Outcome(NamedTuple):
    status: int | None  # of pytest; negative after a signal, None after the time limit
    seconds: float
    log: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names or files of mutants; default: all mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant")
    options = parser.parse_args()
    mutants = [Mutant(*edit[:1], file, *edit[1:3], edit[3:]) for file, edits in MUTANTS.items() for edit in edits]
    if options.names:
        mutants = [m for m in mutants if any(part in m.name or part in m.file for part in options.names)]
    if not mutants:
        parser.error(f"no mutant is named {' or '.join(options.names)}")
    stale = [m for m in mutants if (ROOT / m.file).read_text(encoding="utf-8").count(m.old) != 1]
    for mutant in stale:
        print(f"stale      {mutant.name}: {mutant.file} does not have {mutant.old!r} exactly once")
    if stale:
        return 1
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    for library in LIBRARIES:
        importlib.import_module(library)
    targets = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    unchanged = Mutant("no mutant", mutants[0].file, "", "", targets)
    ((_, sound),) = run([unchanged], jobs=1, limit=options.limit * len(targets))
    if sound.status != 0:
        print(f"{sound.log}\nthe tests fail without a mutant")
        return 1
    print(f"the tests pass without a mutant in {sound.seconds:.0f} s", flush=True)
    began, killed = time.monotonic(), 0
    for mutant, outcome in run(mutants, options.jobs, options.limit):
        verdict = {0: "SURVIVED", 1: "killed"}.get(outcome.status, "UNDECIDED")
        killed += verdict == "killed"
        print(f"{verdict:10} {outcome.seconds:4.0f} s  {mutant.file}: {mutant.name}", flush=True)
        if verdict == "UNDECIDED":
            print(outcome.log)
    print(f"{killed} of {len(mutants)} mutants killed in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(mutants) else 1


def run(mutants: list[Mutant], jobs: int, limit: float) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield every mutant when its tests end; runs ``jobs`` mutants at once."""
    waiting = mutants[::-1]
    running: dict[int, tuple[Mutant, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant, tree = waiting.pop(), Path(folder) / str(len(waiting))
                plant(mutant, tree)
                running[start(tree, mutant.tests)] = (mutant, tree, time.monotonic())
            time.sleep(0.05)
            for process, (mutant, tree, began) in list(running.items()):
                seconds = time.monotonic() - began
                ended, status = os.waitpid(process, os.WNOHANG)
                if not ended and seconds < limit:
                    continue
                if not ended:
                    os.killpg(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                log = "\n".join((tree / "log").read_text(encoding="utf-8").splitlines()[-40:])
                yield mutant, Outcome(os.waitstatus_to_exitcode(status) if ended else None, seconds, log)
                del running[process]
                shutil.rmtree(tree)


def plant(mutant: Mutant, tree: Path) -> None:
    """Copy the repository to ``tree`` with the mutant, in the layout of the installed package."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("solrl_lightning", "tests", "dev", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for folder in ("callbacks", "conf"):
        shutil.copytree(ROOT / folder, tree / "solrl_lightning" / folder, ignore=ignored)
        (tree / folder).symlink_to(tree / "solrl_lightning" / folder)
    shutil.copy(ROOT / "pyproject.toml", tree)
    file = tree / mutant.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")


def start(tree: Path, tests: tuple[str, ...]) -> int:
    """Fork a process that runs the tests in ``tree`` and return its id; it leads a process group and logs to a file."""
    process = os.fork()
    if process:
        return process
    status = 3  # pytest's for internal errors
    try:
        os.setsid()
        log = os.open(tree / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        sys.path.insert(0, str(tree))  # ahead of an editable install
        os.environ["PYTHONPATH"] = str(tree)
        imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # before pytest could rewrite their assertions
        plain = ["-o", "addopts=", "-p", "no:cacheprovider", "-x", "-q", "--tb=line"]
        status = int(pytest.main([*plain, *imported, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
