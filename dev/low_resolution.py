"""Measure how well the embedded model ranks seeds at half its resolution: ``python dev/low_resolution.py [SEED ...]``.

The noise of a seed is averaged over 2 x 2 latents and doubled, which keeps its unit variance. The noise levels are
those of the policy at the smaller resolution. The decoded picture is enlarged to the size that the reward takes. The
printed columns are those of ``task=audit``: 12 held-out prompts x 96 seeds, 24 kept, against BF16 at 10 steps.
"""

import sys
import time
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from solrl_lightning.build import build_module
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.metrics.selection_gain import gap_of_prompts
from solrl_lightning.options.run import Run
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.seeds import noise, pool_seeds
from solrl_lightning.tasks.audit import fidelity

PROMPTS, POOL, KEEP, STEPS = 12, 96, 24, (10, 6)


class Small(Flux1):
    """The embedded model at half its resolution, with the pooled noise of the full one.

    Args:
        spacing: distance of neighbouring image tokens in the positions of the transformer; 2 spans the full picture.
    """

    def __init__(self, spacing: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._image_ids = spacing * self._image_ids

    def noise(self, seeds: Tensor) -> Tensor:
        channels, height, width = self._latent_grid
        spatial = 2 * avg_pool2d(noise(seeds, (channels, 2 * height, 2 * width)), 2)
        return FluxPipeline._pack_latents(spatial, *spatial.shape).to(self.device)

    def decode(self, x: Tensor) -> Tensor:
        return interpolate(super().decode(x), scale_factor=2, mode="bilinear")


def measure(seed: int) -> None:
    with ConfigTree() as tree:
        cfg = Run.of(application_config(tree.compose(["task=audit", "family.compile=false", f"seed={seed}"]), "."))
    module = build_module(cfg, torch.device("cpu"), ())
    prompts = module.encode(module.evaluation.prompts[:PROMPTS])
    seeds = pool_seeds(seed, 0, prompts.texts, POOL)

    def scored(steps: int) -> tuple[Candidates, float]:
        start = time.perf_counter()
        return module.run_stage(Stage("explore", "merged", steps, "euler"), prompts, seeds), time.perf_counter() - start

    module.sync_samplers(version=0)
    full, _ = scored(STEPS[0])
    truth = full.rewards
    rows = {f"32 px, {STEPS[1]} steps": scored(STEPS[1])}
    full_policy = module.policy
    arguments = {key: value for key, value in cfg.model.policy.items() if key != "_target_"}
    arguments["resolution"] = cfg.model.resolution // 2
    for spacing in (1, 2):
        module.policy = Small(spacing, **arguments)
        for sampler in module.transformers.samplers.values():
            sampler.policy = module.policy
        for steps in STEPS:
            rows[f"16 px, {steps} steps, token spacing {spacing}"] = scored(steps)
    enlarged = module.rewards.for_training  # how much the size of the picture alone costs: the truth's, shrunk first
    with torch.no_grad():
        images = torch.cat([full_policy.decode(x) for x in full.x0])
        shrunk = interpolate(avg_pool2d(images, 2), scale_factor=2, mode="bilinear")
        texts = [text for text in prompts.texts for _ in range(POOL)]
        rows["32 px, 10 steps, picture shrunk to 16"] = (
            full._replace(rewards=enlarged.total(enlarged(shrunk, texts)).view_as(truth)),
            0.0,
        )
    whole = gap_of_prompts(truth, truth, KEEP).mean()
    for name, (candidates, seconds) in rows.items():
        values = fidelity(candidates.rewards, truth, KEEP)
        columns = " ".join(f"{value:7.3f}" for value in values.values())
        share = 100 * gap_of_prompts(candidates.rewards, truth, KEEP).mean() / whole
        milliseconds, mean = 1000 * seconds / seeds.numel(), candidates.rewards.mean()
        print(f"seed {seed}  {name:40} {columns}  gap {share:4.0f} %  mean reward {mean:.3f}  {milliseconds:5.1f} ms")


if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or ["42"]):
        measure(number)
