"""task=audit: how well do cheap proxies order the candidates?"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from solrl_lightning.build import build_module, device_of, load_adapters
from solrl_lightning.metrics.rank import NAMES, RankFidelity
from solrl_lightning.module import Stage
from solrl_lightning.rollout.seeds import pool_seeds


def audit(cfg: DictConfig) -> dict[str, Any]:
    """Rank fidelity of every proxy of ``cfg.task.proxies`` against BF16 at full steps; writes ``audit.json``."""
    options = cfg.task
    truth = Stage("regenerate", "merged", cfg.model.full_steps)
    proxies = [Stage("explore", proxy.sampler, proxy.steps) for proxy in options.proxies]
    module = build_module(cfg, device_of(cfg), [truth, *proxies])
    if cfg.ckpt is not None:
        load_adapters(module, cfg.ckpt)
    module.refresh_shadow()
    texts = module.eval_prompts[: options.prompts]
    seeds = pool_seeds(cfg.seed, 0, texts, options.pool)
    prompts = module.encode(texts)

    def scored(stage: Stage) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        rewards = module.run_stage(stage, prompts, seeds).rewards
        return rewards, (time.perf_counter() - start) / seeds.numel()

    rewards, seconds = scored(truth)
    rows = []
    for proxy in proxies:
        proxy_rewards, proxy_seconds = scored(proxy)
        fidelity = RankFidelity(keep=options.keep)
        fidelity.update(proxy_rewards.cpu(), rewards.cpu())
        values = {name: float(value) for name, value in fidelity.compute().items() if name in NAMES}
        precision = cfg.precision.name if proxy.sampler == "shadow" else "bf16"
        rows.append({"precision": precision, "steps": proxy.steps, "seconds": proxy_seconds, **values})
    result = {
        "prompts": len(texts),
        "pool": options.pool,
        "keep": options.keep,
        "truth": {"steps": truth.steps, "seconds": seconds, "reward": rewards.mean().item()},
        "precision_backend": module.precision_backend,
        "proxies": rows,
    }
    (Path(cfg.run_dir) / "audit.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"against BF16, {truth.steps} steps: {len(texts)} prompts x {options.pool} seeds, kept {options.keep}")
    columns = ["precision", "steps", *NAMES, "seconds"]
    print("  ".join(f"{name:>16}" for name in columns))
    for row in rows:
        cells = (f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in columns)
        print("  ".join(f"{cell:>16}" for cell in cells))
    return result
