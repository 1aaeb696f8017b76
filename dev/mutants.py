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

LOOP = "tests/test_loop.py"
REGENERATED = f"{LOOP}::test_regenerated_samples_have_same_seeds_and_new_rewards"
ITERATION = f"{LOOP}::test_iteration_requantises_explores_regenerates_and_steps_once"
PREFIX = f"{LOOP}::test_prefix_family_resumes_kept_trajectories"
RESUME = f"{LOOP}::test_resume_is_bit_exact_from_a_checkpoint_taken"
FOLLOWS = f"{LOOP}::test_only_policy_is_trained_and_old_policy_follows"
CHECKPOINT = f"{LOOP}::test_checkpoint_holds_adapters_only"
WEIGHTS = "tests/test_which_weights.py"
RANKS = "tests/test_ddp.py"
METRICS = f"{LOOP}::test_all_metrics_of_objective_are_logged"
STEPS = f"{LOOP}::test_optimizer_steps_split_the_rows"
ADVANTAGES = "tests/rollout/test_advantages.py"
SEEDS = "tests/test_seeds.py"
SELECT = "tests/rollout/test_select.py"
STAGE = "tests/rollout/test_stage.py"
ROWS = "tests/rollout/test_micro_batches.py"
NFT = "tests/objectives/test_nft.py"
QWEN = "tests/policies/test_qwen_image.py"
COMPILATION, COMPILED = "tests/policies/test_compilation.py", "tests/test_compiled_runs.py"
BASE_WEIGHTS = "tests/policies/test_base_weights.py"
AESTHETIC, GENEVAL, HTTP = (f"tests/rewards/test_{name}.py" for name in ("aesthetic", "geneval", "http"))
GRPO = "tests/objectives/test_grpo.py"
RATIOS = f"{LOOP}::test_first_ratios_are_one_where_the_policy_samples"
SDE = "tests/sampling/test_sde.py"
AWM = "tests/objectives/test_awm.py"
SOLVERS = "tests/sampling/test_solvers.py"
NVFP4 = "tests/quantization/test_nvfp4.py"
EMULATED = "tests/quantization/test_nvfp4_linear.py"
REFRESH = "tests/quantization/test_shadow.py::test_requantize_does_not_recompile"
CODES = "tests/quantization/test_rowwise.py::test_codes_and_scales_match_definition"
ADAPTERS = "tests/policies/test_adapters.py"
REPLICA = "tests/policies/test_replica.py"
ALARMS = "tests/callbacks/test_alarms.py"
EMA = "tests/callbacks/test_ema.py"
PUBLISHED = "tests/test_config.py::test_the_published_hyperparameters_are_the_defaults"
PIPELINES = "tests/policies/test_pipelines.py"
CHECKPOINTED = "test_gradients_are_the_same_with_checkpointing_and_without"
SCHEDULES = "tests/test_schedules.py"
GUIDANCE = "tests/policies/test_guidance.py"

MUTANTS: dict[str, list[Edit]] = {
    "solrl_lightning/loop.py": [
        (
            "guided evaluations counted once",
            "velocities * forward_passes(self._module.policy.guidance_scale)",
            "velocities",
            GUIDANCE,
        ),
        ("labels from proxies", "advantages(kept.rewards,", "advantages(proxy_rewards,", REGENERATED),
        ("statistics of one rank", "(kept.rewards, self._sum)", "(kept.rewards, lambda total: total)", RANKS),
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
            ITERATION,
        ),
        (
            "timesteps of exploration",
            "rows_per_sample(stages[-1].steps)",
            "rows_per_sample(stages[0].steps)",
            WEIGHTS,
        ),
        (
            "sigmas of exploration",
            "module.policy.sigmas(self.stages[-1].steps)",
            "module.policy.sigmas(self.stages[0].steps)",
            WEIGHTS,
        ),
        (
            "cut-short iteration skipped",
            '.get("iterations_done", self.trainer.global_step)',
            '.get("iterations_done", self.trainer.global_step) + 1',
            RESUME,
        ),
    ],
    "solrl_lightning/samplers.py": [
        ("stale shadow", "OLD), self.replicas.values())", "OLD), [self.replicas[MERGED]])", WEIGHTS),
        ("stale merged replica", "OLD), self.replicas.values())", "OLD), list(self.replicas.values())[1:])", WEIGHTS),
        (
            "shadow of the trained adapter",
            "adapter_state(OLD), self.replicas",
            "adapter_state(TRAINED), self.replicas",
            WEIGHTS,
        ),
        ("merged not restored", "self._write(self.adapter_state(OLD), [merged])", "pass", WEIGHTS),
        ("default samples", "self.lora_layers, OLD) as", "self.lora_layers, TRAINED) as", WEIGHTS),
        ("old policy stays", "adapters.update_old_adapter(self.lora_layers, decay)", "pass", FOLLOWS),
    ],
    "solrl_lightning/module.py": [
        (
            "loss without guidance",
            "self.policy.guided_velocity(transformer, batch",
            "self.policy.velocity(transformer, batch",
            GUIDANCE,
        ),
        (
            "reference in the same micro-batches",
            "(batch_idx + self.trainer.fit_loop.iterations_done) % every",
            "batch_idx % every",
            f"{LOOP}::test_reference_is_computed_in_every_nth_micro_batch_and_each_iteration_begins_with_the_next",
        ),
        ("default evaluated", 'weights="ema", steps', 'weights="default", steps', WEIGHTS),
        (
            "evaluation noise by iteration",
            "evaluation_seeds(self.seed,",
            "evaluation_seeds(self.trainer.global_step,",
            WEIGHTS,
        ),
        ("evaluation of one rank", 'self.trainer.strategy.reduce(table, reduce_op="sum").cpu()', "table.cpu()", RANKS),
        ("old velocity is the base's", '{"old": old_velocity,', '{"old": REFERENCE,', WEIGHTS),
        ("reference is the old policy", '"reference": REFERENCE}', '"reference": old_velocity}', WEIGHTS),
        (
            "old velocity is the policy's",
            "batch, **others)",
            "batch, old=self._velocity(self.transformer, batch), reference=others['reference'])",
            WEIGHTS,
        ),
        ("row weights off", "(per_sample * batch.weight).mean()", "per_sample.mean()", RANKS),
        ("metrics not logged", "for name, value in metrics.items()}", "for name, value in ()}", METRICS),
        ("old policy moves at every step", "if loop.count_step():", "if loop.count_step() or True:", STEPS),
        ("old policy not saved", 'if ".lora_" in name', 'if ".default." in name', CHECKPOINT),
        ("watched rewards explored", "rewards = self.rewards.for_training", "rewards = self.rewards", WEIGHTS),
    ],
    "solrl_lightning/rollout/advantages.py": [
        ("no std", "(std + eps)", "1.0", ADVANTAGES),
        (
            "mean of all prompts",
            "((rewards - rewards.mean(dim=1, keepdim=True))",
            "((rewards - rewards.mean())",
            ADVANTAGES,
        ),
        ("sample std", "(squares / count)", "(squares / (count - 1))", ADVANTAGES),
        ("std around the rank's mean", "rewards - total / count", "rewards - rewards.mean()", ADVANTAGES),
        ("float32 advantages", "rewards.double()\n    count", "rewards.float()\n    count", ADVANTAGES),
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
            "select_contrastive(candidates.rewards,",
            "select_contrastive(-candidates.rewards,",
            REGENERATED,
        ),
        ("other seeds regenerated", "seeds = candidates.seeds\n", "seeds = candidates.seeds + 1\n", REGENERATED),
        (
            "prefix lost",
            "state = candidates.state if",
            "state = candidates.state._replace(x=candidates.x0) if",
            PREFIX,
        ),
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
    ],
    "solrl_lightning/rollout/stage.py": [
        (
            "samples without guidance",
            "policy.guided_velocity(transformer",
            "policy.velocity(transformer",
            GUIDANCE,
        ),
        ("conditioning of the first prompt", "prompts.gather(owner[index])", "prompts.gather(0 * owner[index])", STAGE),
        ("caption of the first prompt", "in owner[index].tolist()", "in (0 * owner[index]).tolist()", STAGE),
        ("noise scored", "partial(score, rewards, state.x0,", "partial(score, rewards, state.x,", STAGE),
        ("prefix loses its place", "if state.x is state.x0:", "if True:", STAGE),
        ("no second try", "return retry_with_empty_cache(chunk)", "return chunk()", STAGE),
        ("chunk without its own noise", "policy.noise(flat[index])", "policy.noise(flat[: len(index)])", STAGE),
    ],
    "solrl_lightning/rollout/scoring_worker.py": [
        ("scores on GPU 0", '(1, "scoring", *settings)', '(1, "scoring")', STAGE),
    ],
    "solrl_lightning/rollout/micro_batches.py": [
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
    "solrl_lightning/objectives/base.py": [
        ("noise level reversed", "torch.lerp(x0, eps,", "torch.lerp(eps, x0,", ROWS),
        ("rare reference of the same weight", "self.kl_weight * self.reference_every if", "self.kl_weight if", NFT),
        ("one noise for all timesteps", "training_noise(seeds, steps,", "training_noise(seeds, 0 * steps,", ROWS),
    ],
    "solrl_lightning/policies/compilation.py": [
        ("8 variants of a block", "max(config.recompile_limit, _MOST_VARIANTS)", "config.recompile_limit", COMPILED),
        ("a GPU needs no headers", '(Path(headers) / "Python.h").is_file()', "True", COMPILATION),
        ("a GPU calls g++", '["gcc", "clang"]', '["g++", "clang++"]', COMPILATION),
    ],
    "solrl_lightning/policies/gelu.py": [
        ("slope of GELU", ".mul_(1 - s)", ".mul_(s)", COMPILATION),
    ],
    "solrl_lightning/policies/checkpointing.py": [
        ("other blocks", "all_blocks[::2]", "all_blocks[1::2]", f"{PIPELINES}::{CHECKPOINTED}"),
    ],
    "solrl_lightning/objectives/nft.py": [
        ("no mirror", "((1 + beta) * v_old - beta * v)", "((1 - beta) * v_old + beta * v)", NFT),
        ("normaliser trained", "error.detach().abs()", "error.abs()", NFT),
        ("NFT clip off", ".clamp(-advantage_clip, advantage_clip) / advantage_clip / 2", " / advantage_clip / 2", NFT),
        ("NFT scale", "policy = advantage_clip * (", "policy = (", NFT),
        ("NFT KL without gradient", "kl_weight * kl).float()", "kl_weight * kl.detach()).float()", NFT),
        ("NFT old trained", "old_velocity.detach().float()", "old_velocity.float()", NFT),
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
        ("window anywhere", "num_steps // 2 - self.window + 1", "num_steps - self.window", GRPO),
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
    "solrl_lightning/quantization/scaled_linear.py": [
        ("weight scale lost", "scale * self.weight_scale", "scale", EMULATED),
        ("bias lost", "y if self.bias is None else y.add_(self.bias)", "y", EMULATED),
    ],
    "solrl_lightning/quantization/linear.py": [
        ("weight not refreshed", "self.get_buffer(name).copy_(value)", "pass", REFRESH),
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
    "solrl_lightning/policies/adapters.py": [
        ("LoRA's gradient without its scale", "(g @ up) * ctx.scale", "g @ up", ADAPTERS),
        ("LoRA's input gradient left out", ".addmm_(low_gradient, down)", "", ADAPTERS),
        ("merge without alpha / r", "alpha=layer.scaling[TRAINED]", "alpha=1.0", ADAPTERS),
        ("old decay inverted", "1.0 - decay", "decay", ADAPTERS),
        ("adapters in BF16", "            weights.float()", "            weights", ADAPTERS),
        ("old policy trains", "inference_mode=adapter != TRAINED", "inference_mode=False", ADAPTERS),
    ],
    "solrl_lightning/policies/guidance.py": [
        ("unconditional velocity trained", "with torch.no_grad():", "with torch.enable_grad():", GUIDANCE),
        ("guidance from the prompt", "return unconditional + scale", "return scale", GUIDANCE),
    ],
    "solrl_lightning/policies/flux2.py": [
        ("latents without variance", "x * std + mean", "x + mean", "tests/policies/test_flux2.py"),
    ],
    "solrl_lightning/policies/qwen_image.py": [
        ("norm of the guided velocity", "combined.norm(dim=-1", "combined.norm(dim=1", QWEN),
        ("padding unmasked", "F.pad(mask, (0, missing))", "F.pad(mask, (0, missing), value=True)", QWEN),
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
    ],
    "solrl_lightning/rewards/http.py": [
        ("scores in the order of answers", "threads.imap(", "threads.imap_unordered(", HTTP),
        ("posts not repeated", "allowed_methods=None", "allowed_methods={'GET'}", HTTP),
    ],
    "solrl_lightning/policies/replica.py": [
        ("base overwritten", "dense(layer.weight).detach().clone()", "dense(layer.weight).detach()", REPLICA),
        ("quantised layers stay", "layer.requantize_(weight)", "pass", REPLICA),
        ("replica with copied weights", "{id(tensor): tensor for tensor in tensors}", "{}", REPLICA),
    ],
    "solrl_lightning/schedules.py": [
        ("ramp without start", "max(step - self.start, 0)", "max(step, 0)", SCHEDULES),
        ("type 1 up to 0.9", "slope=0.001, maximum=0.5", "slope=0.001, maximum=0.9", SCHEDULES),
        ("average of eleven", "(1 + step) / (10 + step)", "(1 + step) / (11 + step)", SCHEDULES),
    ],
    "callbacks/ema.py": [
        ("average inverted", "1.0 - decay", "decay", EMA),
        ("an update per micro-batch", "if self.updates < trainer.global_step", "if trainer.global_step >= 0", EMA),
        ("average is the policy", "value.detach().float().clone()", "value.detach().float()", EMA),
    ],
    "callbacks/alarms.py": [
        ("falls measured from the base", "best = int(means[:-1].argmax())", "best = 0", ALARMS),
        ("errors over images of all prompts", "/ values.shape[1] ** 0.5", "* 1.0", ALARMS),
        ("a jump of a single iteration", "median(before), median(recent)", "median(before), max(recent)", ALARMS),
    ],
    "callbacks/guard.py": [
        (
            "a persisting alarm is repeated",
            "if alarm.name not in self._active",
            "if alarm.name",
            "tests/callbacks/test_guard.py",
        ),
    ],
    "callbacks/checkpoints.py": [
        ("best is the newest", "reward > self.reward", "reward is not None", "tests/callbacks/test_guard.py"),
    ],
    "callbacks/requantize.py": [
        (
            "shadow never refreshed",
            "module_of(pl_module).samplers.sync()",
            "pass",
            "tests/callbacks/test_requantize.py",
        ),
    ],
    "conf/trainer/auto.yaml": [
        (
            "gradient clip off",
            "gradient_clip_val: ${model.max_grad_norm}",
            "gradient_clip_val: null",
            PUBLISHED,
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
