"""task=audit: rank fidelity and cost of cheap proxies.

Every explorer of ``task.proxies`` and the truth (BF16 at full steps) score the same pool; their rankings are compared
prompt by prompt. An explorer is a sampler (the shadow in some precision, or BF16), a number of steps, a solver and a
decoder. It may stop at a step and score the predicted image, as in ``family=prefix``, or select candidates at rungs, as
in ``family=race``. Its cost is in seconds, with decoding and reward, and in forward passes. Then its kept candidates
are regenerated, as in a family with this explorer, and a training step is timed. The report ends with a verdict,
whether selection pays (``audit_verdict.py``), and one command.

Shapes: P prompts, N pool.
"""

import io
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.formatting import command_line
from solrl_lightning.artifacts.tables import write_json
from solrl_lightning.build import build_with_weights, device_of, with_option
from solrl_lightning.data.prompt import identities
from solrl_lightning.metrics.rank import RankFidelity
from solrl_lightning.metrics.selection_gain import equal_random, equal_selected, gap_of_prompts, ratio_of_sums
from solrl_lightning.names import MERGED, SHADOW
from solrl_lightning.options.family import Exploration
from solrl_lightning.options.rules import written
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Audit
from solrl_lightning.policies.guidance import forward_passes
from solrl_lightning.quantization import resolve_from
from solrl_lightning.rollout.chunks import fill_missing
from solrl_lightning.rollout.explore import run_family
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.stage import REGENERATE, Sigmas, Stage, velocities_per_prompt
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.tasks.audit_search import cheapest, label, levels_at, score_steps, search
from solrl_lightning.tasks.audit_text import format_audit, format_search, wrapped
from solrl_lightning.tasks.audit_verdict import expected_gain, judge, recommend, seconds_without_selection, with_verdict
from solrl_lightning.training.module import SolRLModule

log = logging.getLogger(__name__)

_PROXY = "proxy"  # name of an explorer's stages here, where an image that is not finite is an error


class Scored(NamedTuple):
    """A pool scored by one explorer or, the truth, in BF16 at full steps."""

    explorer: Exploration
    stages: list[Stage]  # one, or the rungs of a race; then, except for the truth, regeneration
    precision: str
    backend: str  # of the shadow
    merits: Tensor  # [P, N] on the CPU; later rungs of a race reorder them
    seconds: Mapping[str, float]  # by name of the stage, per candidate of the pool
    reward: float  # mean of the pool
    levels: list[str]  # noise levels from which the rungs predict their images

    @property
    def rungs(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.name == _PROXY]


def audit(cfg: Run) -> dict[str, Any]:
    """Measure the rank fidelity of every explorer of ``cfg.task.proxies``, of the base, ``cfg.ckpt`` or
    model.init_lora.

    Writes audit.json and audit.png, fidelity against cost.
    """
    options = cfg.task_as(Audit)
    scored: list[Scored] = []
    device, precision = device_of(cfg.trainer), cfg.precision
    default_precision = resolve_from(cfg.ckpt, precision.name, precision.backend, device).precision
    grouped: dict[str | None, dict[str, Exploration]] = {}
    for index, explorer in enumerate(options.proxies):
        other = None if explorer.precision == default_precision else explorer.precision
        grouped.setdefault(other, {})[f"task.proxies.{index}"] = explorer
    without = seconds_without_selection(cfg, device)  # first: its prompts are others, which the reward must score, too
    for other, group in grouped.items():
        changed = cfg if other is None else with_option(cfg, "precision", other)
        scored += score_pool(changed, group, with_truth=not scored)
    truth, *explorers = scored
    result = describe_all(truth, explorers, *without, cfg)
    searches = options.search and cfg.model.full_steps > 2 and not math.isnan(result["truth"]["spread_ratio"])
    result["search"] = search_stops(cfg, truth.merits) if searches else []
    folder = Path(cfg.run_dir)
    write_json(folder / "audit.json", result)
    write_atomically(folder / "audit.png", draw(result))
    print(f"{format_audit(result)}\n  {folder / 'audit.json'}, {folder / 'audit.png'}")
    if result["search"]:
        print(format_search(result, options.min_gap))
    print(f"{wrapped(result['recommended']['verdict'])}\n  {result['recommended']['command']}")
    return result


def describe_all(
    truth: Scored, explorers: Sequence[Scored], sampling: float, training: float, cfg: Run
) -> dict[str, Any]:
    """Return the content of audit.json except for the search.

    ``sampling``, ``training``: seconds of a prompt without selection.
    """
    task, merits = cfg.task_as(Audit), truth.merits
    pool, keep = task.pool, task.keep
    without = sampling + training
    proxies = [
        with_verdict(
            describe(explorer, merits, cfg),
            *expected_gain(explorer.merits, merits, keep),
            pool * sum(explorer.seconds.values()) + training,
            without,
        )
        for explorer in explorers
    ]
    rho, gain = expected_gain(merits, merits, keep)

    def passes_of(candidates: int) -> int:
        return forward_passes(cfg.model.guidance_scale) * sum(velocities_per_prompt(truth.stages, candidates))

    chosen = recommend(proxies)
    learnt = chosen["gain"]["mean"] if chosen else 1.0
    pays, verdict = judge(chosen, len(merits), equal=math.isnan(rho))
    return {
        "prompts": len(merits),
        "pool": pool,
        "keep": keep,
        "checkpoint": cfg.ckpt,
        "lora": cfg.lora,
        "truth": with_verdict(
            {
                "steps": truth.stages[0].steps,
                "solver": truth.stages[0].solver,
                "evaluations": passes_of(pool),
                "reward": truth.reward,
                "seconds": truth.seconds[_PROXY],
                "gap": gap_of_prompts(merits, merits, keep).mean().item(),
                "equal_groups": equal_selected(merits, merits, keep),
            },
            rho,
            gain,
            pool * truth.seconds[_PROXY] + training,
            without,
        ),
        "without_selection": {
            "evaluations": passes_of(keep),
            "sampling_seconds": sampling,
            "training_seconds": training,
            "iteration_seconds": without,
            "equal_groups": equal_random(merits, keep),
        },
        "proxies": proxies,
        "recommended": {
            "name": chosen["name"] if chosen and pays else "diffusionnft",
            "closest": chosen and chosen["name"],
            "pays": pays,
            "verdict": verdict,
            "command": chosen["command"] if chosen and pays else command_without_selection(cfg, learnt),
        },
    }


def describe(explorer: Scored, truth: Tensor, cfg: Run) -> dict[str, Any]:
    """Return an explorer's settings, cost and fidelity to the merits ``truth`` [P, N]."""
    task = cfg.task_as(Audit)
    first, keep, passes = explorer.stages[0], task.keep, forward_passes(cfg.model.guidance_scale)
    *explored, regenerated = velocities_per_prompt(explorer.stages, task.pool)
    gaps = gap_of_prompts(explorer.merits, truth, keep)
    gap_kept, gap_error = ratio_of_sums(gaps, gap_of_prompts(truth, truth, keep))
    return {
        "name": name_of(explorer, cfg.model.solver),
        "command": command_of(explorer.explorer, explorer.precision, cfg),
        **sampling_of(first),
        "precision": explorer.precision,
        "backend": explorer.backend,
        "rungs": [
            {"step": stage.stop_after, "level": float(level), "keep": stage.keep}
            for stage, level in zip(explorer.rungs, explorer.levels, strict=True)
        ],
        "evaluations": passes * sum(explored),
        "regenerate_evaluations": passes * regenerated,
        "reward": explorer.reward,
        "seconds": explorer.seconds[_PROXY],
        "regenerate_seconds": explorer.seconds[REGENERATE],
        "gap": gaps.mean().item(),
        "gap_kept": gap_kept,
        "gap_error": gap_error,
        "equal_groups": equal_selected(explorer.merits, truth, keep),
        **{name: float(value) for name, value in RankFidelity(keep=keep)(explorer.merits, truth).items()},
    }


def load_pool(cfg: Run, samplers: Collection[str]) -> tuple[SolRLModule, EncodedPrompts, Tensor]:
    """Return the model, the prompts and the pool's seeds [P, N]."""
    task, module = cfg.task_as(Audit), build_with_weights(cfg, device_of(cfg.trainer), samplers)
    module.requantize(version=0)
    prompts = module.encode(module.evaluation.prompts[: task.prompts])
    return module, prompts, pool_seeds(cfg.seed, 0, identities(prompts.prompts), task.pool)


def _full(cfg: Run) -> Stage:
    return Stage(sampler=MERGED, steps=cfg.model.full_steps, solver=cfg.model.solver)


def _stages(key: str, explorer: Exploration, cfg: Run, sigmas: Sigmas) -> list[Stage]:
    keep = cfg.task_as(Audit).keep
    return [*explorer.stages(key, cfg.model.solver, keep, sigmas, name=_PROXY), _full(cfg)]


def score_pool(cfg: Run, explorers: Mapping[str, Exploration], with_truth: bool) -> list[Scored]:
    """Sample and score the pool by ``explorers`` by key, after a warm-up in which compiled samplers compile."""
    module, prompts, seeds = load_pool(cfg, {explorer.sampler for explorer in explorers.values()})
    sigmas = module.model.sigmas
    truth = Exploration(sampler="merged", steps=cfg.model.full_steps)
    families = [(truth, _stages("", truth, cfg, sigmas)[:1])] if with_truth else []
    for key, explorer in explorers.items():
        stages = _stages(key, explorer, cfg, sigmas)
        if stages not in (others for _, others in families):  # precision=auto may be one that is listed
            families.append((explorer, stages))
    seconds_of: defaultdict[str, float] = defaultdict(float)

    def run(stage: Stage, *on: Any) -> Candidates:
        start = time.perf_counter()
        candidates = run_filled(module, stage, *on)
        candidates.rewards.cpu()  # waits for a GPU
        seconds_of[stage.name] += time.perf_counter() - start
        return candidates

    scored = []
    for explorer, stages in families:
        for stage in (stages[0], stages[-1]):
            module.run_stage(stage.but(steps=1, stop_after=None), prompts, seeds[:, :1])
        seconds_of.clear()
        pool = run_family(stages, prompts, seeds, run).pool
        seconds = {name: value / seeds.numel() for name, value in seconds_of.items()}
        shadow = stages[0].sampler == SHADOW
        backend = module.transformers.precision_backend if shadow else "no shadow"
        precision = backend.partition(" ")[0] if shadow else "bf16"
        merits, reward = pool.merits.cpu(), pool.rewards.mean().item()
        levels = levels_at([stage for stage in stages if stage.name == _PROXY], sigmas)
        scored.append(Scored(explorer, stages, precision, backend, merits, seconds, reward, levels))
        log.info("scored by %s in %.1f s", name_of(scored[-1], cfg.model.solver), sum(seconds_of.values()))
    return scored


def run_filled(module: SolRLModule, stage: Stage, prompts: EncodedPrompts, *on: Any) -> Candidates:
    """Run a stage. A candidate without a finite reward has the means of its prompt's others."""
    return fill_missing(module.run_stage(stage, prompts, *on), prompts.prompts)


def search_stops(cfg: Run, truth: Tensor) -> list[dict[str, Any]]:
    """Return the rows of ``search`` in the pool with merits ``truth``; the cheapest of each family has a command."""
    module, prompts, seeds = load_pool(cfg, {MERGED})
    explorer = with_option(cfg, "family", "prefix").family.explore
    assert explorer is not None
    whole = explorer.but(name=_PROXY, stop_after=None, stop_below=None)
    scores = score_steps(whole, prompts, seeds, partial(run_filled, module))
    merits, sigmas = module.rewards.for_training.merits, module.model.sigmas
    task, passes = cfg.task_as(Audit), forward_passes(cfg.model.guidance_scale)
    stops = search(explorer, scores, merits, truth, sigmas, task.keep)
    chosen = [cheapest(stops, family, task.min_gap) for family in ("prefix", "race")]
    return [
        {
            "family": stop.family,
            "name": stop.name,
            "keep": stop.keep,
            "evaluations": passes * stop.velocities,
            "gap_kept": stop.gap_kept,
            "gap_error": stop.gap_error,
            "enough": stop.enough(task.min_gap),
            "command": command_of(stop.explorer, "bf16", cfg) if stop in chosen else None,
        }
        for stop in stops
    ]


def name_of(explorer: Scored, solver: str) -> str:
    """Return the label in the table and the picture: ``nvfp4 6 steps``, ``bf16 2/4 of 10 steps (0.90/0.70)``."""
    first = explorer.stages[0]
    usual = {key: field.default for key, field in Stage.model_fields.items()}
    usual |= {"sampler": first.sampler, "steps": first.steps, "solver": solver}
    others = {key: value for key, value in sampling_of(first).items() if value != usual[key]}
    options = [value if isinstance(value, str) else f"{key}={written(value)}" for key, value in others.items()]
    return " ".join([explorer.precision, label(explorer.rungs, explorer.levels), *options])


def sampling_of(stage: Stage) -> dict[str, Any]:
    """Return the options of sampling by key, without the stop."""
    return stage.model_dump(exclude={*Exploration.no_keys, "stop_after", "stop_below"})


# The recommendation


def command_of(explorer: Exploration, precision: str, cfg: Run) -> str | None:
    """Return the command of a run with this explorer and the audit's other options; None if no family can.

    Exploration on merged weights that stops early continues in regeneration, so steps and solver are equal; an explorer
    that is the truth leaves nothing to regenerate.
    """
    explorer = explorer.model_copy(update={"solver": explorer.solver or cfg.model.solver})
    stops, is_truth = explorer.stops_early, explorer.trajectory == _full(cfg).trajectory
    to_the_end = explorer.steps in [rung.step for rung in explorer.rungs or ()]
    if explorer.sampler == MERGED and (to_the_end or stops != is_truth):
        return None
    family = "race" if explorer.rungs else "prefix" if stops else "sol_rl"
    precisions = [f"precision={precision}"] if explorer.sampler == SHADOW else []
    return _command(cfg, family, cfg.task_as(Audit).pool, precisions, explorer=explorer)


def command_without_selection(cfg: Run, gain: float = 1.0) -> str:
    """Return the command of a run that trains on ``keep`` random candidates, with the audit's other options.

    Above 1, ``gain`` multiplies its iterations: so many learn as much as the audit's do with selection. NaN: unknown.
    """
    iterations = [f"iterations={math.ceil(cfg.iterations * gain)}"] if gain > 1 else []
    return _command(cfg, "diffusionnft", cfg.task_as(Audit).keep, last=iterations)


def _command(
    cfg: Run,
    family: str,
    pool: int,
    precisions: Sequence[str] = (),
    explorer: Exploration | None = None,
    last: Sequence[str] = (),
) -> str:
    """Return the command of a run of ``family`` with the options that differ from its file, and the audit's others."""
    task, default = cfg.task_as(Audit), with_option(cfg, "family", family).family
    values: dict[str, Any] = {"pool": pool, "keep": task.keep}
    defaults: dict[str, Any] = {"pool": default.pool, "keep": default.keep}
    if explorer is not None and default.explore is not None:
        for options, stage in ((values, explorer), (defaults, default.explore)):
            dump = stage.model_dump(exclude_none=True, include=Exploration.model_fields.keys() - Exploration.no_keys)
            options |= {f"explore.{key}": value for key, value in dump.items()}
    with_experiment = any(override.startswith("experiment=") for override in task.overrides)  # which may set these, too
    arguments = [f"family={family}", *precisions]
    for key in [*values, *(key for key in defaults if key not in values)]:
        value = values.get(key)
        if value != defaults.get(key) or (with_experiment and key in defaults):
            arguments.append(f"family.{key}={written(value).replace(' ', '')}")
    kept = [override for override in task.overrides if _is_kept(override)]
    return command_line([*arguments, *(o for o in kept if not (last and o.startswith("iterations="))), *last])


def _is_kept(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    return key == "family.compile" or key.partition(".")[0] not in ("task", "family", "precision", "ckpt")


def draw(result: Mapping[str, Any]) -> bytes:
    """Draw Spearman's correlation of every proxy against its cost, as a share of the truth's; return a PNG file."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    truth, precisions = result["truth"], [*dict.fromkeys(row["precision"] for row in result["proxies"])]
    axes.scatter(1.0, 1.0, marker="*", color="black", label=f"truth: bf16 {truth['steps']} steps")
    for row in result["proxies"]:
        marker = Line2D.filled_markers[1 + precisions.index(row["precision"])]  # the first one is a dot
        axes.scatter(row["seconds"] / truth["seconds"], row["spearman"], marker=marker, label=row["name"])
    axes.set_xlabel("seconds a candidate, as a share of the truth's")
    axes.set_ylabel("Spearman correlation with the truth")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
