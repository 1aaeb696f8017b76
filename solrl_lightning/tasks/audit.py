"""task=audit: how well do cheap proxies order the candidates?

Every proxy scores the same pool as BF16 at full steps does; their rankings are compared prompt by prompt. What a proxy
costs is given beside it, in seconds per candidate with decoding and reward.

Shapes: P prompts, N pool.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from torch import Tensor

from solrl_lightning.build import build_module, device_of, load_adapters, with_option
from solrl_lightning.config import SAMPLERS
from solrl_lightning.errors import UserError
from solrl_lightning.metrics.rank import NAMES, RankFidelity
from solrl_lightning.module import Stage
from solrl_lightning.rollout.seeds import pool_seeds
from solrl_lightning.tasks.report import format_table, write_json


class Scored(NamedTuple):
    """A pool as one sampler sees it."""

    stage: Stage
    precision: str
    backend: str  # of the shadow, where it is one
    rewards: Tensor  # [P, N] on the CPU
    seconds: float  # per candidate


def audit(cfg: DictConfig) -> dict[str, Any]:
    """Rank fidelity of every proxy of ``cfg.task.proxies``, of the base or of ``cfg.ckpt``; writes ``audit.json``."""
    options = cfg.task
    _check(options)
    scored: list[Scored] = []
    for precision in dict.fromkeys(proxy.get("precision") for proxy in options.proxies):
        own = cfg if precision is None else with_option(cfg, "precision", precision)
        stages = [Stage("explore", p.sampler, p.steps) for p in options.proxies if p.get("precision") == precision]
        scored += score_pool(own, stages if scored else [Stage("regenerate", "merged", cfg.model.full_steps), *stages])
    truth, *proxies = scored
    result = {
        "prompts": truth.rewards.shape[0],
        "pool": truth.rewards.shape[1],
        "keep": options.keep,
        "checkpoint": cfg.ckpt,
        "truth": {"steps": truth.stage.steps, "reward": truth.rewards.mean().item(), "seconds": truth.seconds},
        "proxies": [
            {
                "sampler": proxy.stage.sampler,
                "precision": proxy.precision,
                "backend": proxy.backend,
                "steps": proxy.stage.steps,
                "reward": proxy.rewards.mean().item(),
                "seconds": proxy.seconds,
                **fidelity(proxy.rewards, truth.rewards, options.keep),
            }
            for proxy in proxies
        ],
    }
    path = Path(cfg.run_dir) / "audit.json"
    write_json(path, result)
    print(f"{format_audit(result)}\n  {path}")
    return result


def score_pool(cfg: DictConfig, stages: Sequence[Stage]) -> list[Scored]:
    """Samples and scores the pool with every stage, each after a warm-up, in which compiled samplers compile."""
    module = build_module(cfg, device_of(cfg), list(stages))
    if cfg.ckpt is not None:
        load_adapters(module, cfg.ckpt)
    module.refresh_shadow()
    prompts = module.encode(module.eval_prompts[: cfg.task.prompts])
    seeds = pool_seeds(cfg.seed, 0, prompts.texts, cfg.task.pool)
    scored = []
    for stage in stages:
        module.run_stage(stage._replace(steps=1), prompts, seeds[:, :1])
        start = time.perf_counter()
        rewards = module.run_stage(stage, prompts, seeds).rewards.cpu()
        seconds = (time.perf_counter() - start) / seeds.numel()
        shadow = stage.sampler == "shadow"
        precision, backend = (cfg.precision.name, module.precision_backend) if shadow else ("bf16", "no shadow")
        scored.append(Scored(stage, precision, backend, rewards, seconds))
    return scored


def fidelity(proxy: Tensor, truth: Tensor, keep: int) -> dict[str, float]:
    """The rank fidelity of rewards [P, N]."""
    metric = RankFidelity(keep=keep)
    metric.update(proxy, truth)
    values = metric.compute()
    return {name: float(values[name]) for name in NAMES}


def format_audit(result: dict[str, Any]) -> str:
    truth, pool, k = result["truth"], result["pool"], result["keep"] // 2
    columns = ["proxy", "steps", "spearman", "kendall", "top", "bottom", "top rank", "bottom rank", "ms"]
    rows = [
        [
            f"{row['sampler']} {row['precision']}",
            row["steps"],
            *(f"{row[name]:.3f}" for name in NAMES[:4]),
            *(f"{row[name]:.1f}" for name in NAMES[4:]),
            f"{1000 * row['seconds']:.1f}",
        ]
        for row in result["proxies"]
    ]
    perfect = ["perfect", "", *["1.000"] * 4, f"{(k + 1) / 2:.1f}", f"{pool - (k - 1) / 2:.1f}", ""]
    truth_row = ["merged bf16", truth["steps"], *[""] * 6, f"{1000 * truth['seconds']:.1f}"]
    return (
        f"against BF16 at {truth['steps']} steps, mean reward {truth['reward']:.4f}: {result['prompts']} prompts x "
        f"{pool} seeds; overlap of the {k} best and of the {k} worst, their mean true rank, milliseconds a candidate\n"
        + format_table(columns, [*rows, perfect, truth_row])
    )


def _check(options: DictConfig) -> None:
    if not options.proxies:
        raise UserError("task.proxies is empty: name at least one, e.g. task.proxies=[{sampler:shadow,steps:6}]")
    if options.keep < 2:
        raise UserError(f"task.keep counts the best and the worst that are compared: at least 2; got {options.keep}")
    for proxy in options.proxies:
        if proxy.get("sampler") not in SAMPLERS or not isinstance(proxy.get("steps"), int) or proxy.steps < 1:
            raise UserError(
                f"a proxy has a sampler ({', '.join(SAMPLERS)}), at least 1 step and, if not the run's, a precision; "
                f"got {proxy}"
            )
