"""task=audit: rank fidelity and cost of cheap proxies.

Every explorer of ``task.proxies`` and the truth (BF16 at full steps) score the same pool; their rankings are compared
prompt by prompt. An explorer is a sampler (the shadow in some precision, or BF16), a number of steps, a solver and a
decoder. It may stop at a step and score the predicted image, as in ``family=prefix``, or select candidates at rungs, as
in ``family=race``. Its cost is in seconds per candidate of the pool, with decoding and reward,
and in model evaluations of a pool. Then its kept candidates are regenerated, as in a family with this explorer. The
report ends with the command of the cheapest family that keeps enough of the reward gap.

Shapes: P prompts, N pool.
"""

import io
import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import Tensor

from solrl_lightning.artifacts.files import write_atomically
from solrl_lightning.artifacts.tables import format_table, write_json
from solrl_lightning.build import build_module, device_of, exploring_stages, load_adapters, with_option
from solrl_lightning.metrics.rank import NAMES, RankFidelity
from solrl_lightning.options.family import Explorer
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Audit
from solrl_lightning.policies.guidance import forward_passes
from solrl_lightning.quantization import resolve_from
from solrl_lightning.rollout.explore import run_family
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.select import select_contrastive, take
from solrl_lightning.rollout.stage import REGENERATE, Stage, evaluations, steps_label
from solrl_lightning.sampling import SolverState
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.training.samplers import MERGED, SHADOW

_PROXY = "proxy"  # name of an explorer's stages here, where an image that is not finite is an error
# Of a label in the picture: offset in points, alignment.
_SIDES = ((5, 3, "left", "bottom"), (-5, -3, "right", "top"), (-5, 3, "right", "bottom"), (5, -3, "left", "top"))


class Scored(NamedTuple):
    """A pool scored by one explorer or, the truth, in BF16 at full steps."""

    stages: list[Stage]  # one, or the rungs of a race; then, except for the truth, regeneration
    precision: str
    backend: str  # of the shadow
    merits: Tensor  # [P, N] on the CPU; later rungs of a race reorder them
    seconds: Mapping[str, float]  # by name of the stage, per candidate of the pool
    reward: float  # mean of the pool

    @property
    def rungs(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.name == _PROXY]


def audit(cfg: Run) -> dict[str, Any]:
    """Rank fidelity of every explorer of ``cfg.task.proxies``, of the base or of ``cfg.ckpt``.

    Writes audit.json and audit.png, fidelity against cost.
    """
    options = cfg.task_as(Audit)
    scored: list[Scored] = []
    default_precision = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device_of(cfg)).precision
    grouped: dict[str | None, list[list[Stage]]] = {}
    for explorer in options.proxies:
        requested = explorer.precision
        group = grouped.setdefault(None if requested == default_precision else requested, [])
        if (stages := _stages(explorer, cfg)) not in group:  # precision=auto may be one that is listed
            group.append(stages)
    for precision, group in grouped.items():
        changed = cfg if precision is None else with_option(cfg, "precision", precision)
        first = [] if scored else [[Stage(_PROXY, *_full(cfg), keep=options.keep)]]
        scored += score_pool(changed, [*first, *group])
    truth, *explorers = scored
    gap = reward_gap(truth.merits, truth.merits, options.keep)
    result: dict[str, Any] = {
        "prompts": truth.merits.shape[0],
        "pool": truth.merits.shape[1],
        "keep": options.keep,
        "checkpoint": cfg.ckpt,
        "truth": {
            "steps": truth.stages[0].steps,
            "solver": truth.stages[0].solver,
            "reward": truth.reward,
            "seconds": truth.seconds[_PROXY],
            "gap": gap,
        },
        "proxies": [describe(explorer, truth.merits, gap, cfg) for explorer in explorers],
    }
    result["recommended"] = recommend(result["proxies"], options.min_gap)
    folder = Path(cfg.run_dir)
    write_json(folder / "audit.json", result)
    write_atomically(folder / "audit.png", draw(result))
    print(f"{format_audit(result)}\n  {folder / 'audit.json'}, {folder / 'audit.png'}")
    print(format_recommendation(result, options.min_gap))
    return result


def describe(explorer: Scored, truth: Tensor, gap: float, cfg: Run) -> dict[str, Any]:
    """An explorer's settings, cost and fidelity to the merits ``truth`` [P, N], whose gap is ``gap``."""
    task = cfg.task_as(Audit)
    first, keep, passes = explorer.stages[0], task.keep, forward_passes(cfg.model.guidance_scale)
    *explored, regenerated = evaluations(explorer.stages, task.pool)
    proxy_gap = reward_gap(explorer.merits, truth, keep)
    return {
        "name": name_of(explorer, cfg.model.solver),
        "command": command_of(explorer, cfg),
        "sampler": first.sampler,
        "precision": explorer.precision,
        "backend": explorer.backend,
        "steps": first.steps,
        "solver": first.solver,
        "rungs": [{"step": stage.stop_step, "keep": stage.keep} for stage in explorer.rungs],
        "decoder": first.decoder,
        "evaluations": passes * sum(explored),
        "regenerate_evaluations": passes * regenerated,
        "reward": explorer.reward,
        "seconds": explorer.seconds[_PROXY],
        "regenerate_seconds": explorer.seconds[REGENERATE],
        "gap": proxy_gap,
        "gap_kept": proxy_gap / gap,
        **fidelity(explorer.merits, truth, keep),
    }


def _stages(explorer: Explorer, cfg: Run) -> list[Stage]:
    keep = cfg.task_as(Audit).keep
    return [*exploring_stages(explorer, cfg.model.solver, keep, name=_PROXY), Stage(REGENERATE, *_full(cfg))]


def _full(cfg: Run) -> tuple[str, int, str]:
    return MERGED, cfg.model.full_steps, cfg.model.solver


def score_pool(cfg: Run, families: Sequence[list[Stage]]) -> list[Scored]:
    """Sample and score the pool by each of ``families``, after a warm-up in which compiled samplers compile."""
    task = cfg.task_as(Audit)
    module = build_module(cfg, device_of(cfg), [stage for stages in families for stage in stages])
    if cfg.ckpt is not None:
        load_adapters(module, cfg.ckpt)
    module.sync_samplers(version=0)
    prompts = module.encode(module.evaluation.prompts[: task.prompts])
    seeds = pool_seeds(cfg.seed, 0, prompts.texts, task.pool)

    seconds_of: defaultdict[str, float] = defaultdict(float)

    def run(stage: Stage, seeds: Tensor, state: SolverState | None) -> Candidates:
        start = time.perf_counter()
        candidates = module.run_stage(stage, prompts, seeds, initial_state=state)
        candidates.rewards.cpu()  # waits for a GPU
        seconds_of[stage.name] += time.perf_counter() - start
        return candidates

    scored = []
    for stages in families:
        for stage in (stages[0], stages[-1]):
            module.run_stage(stage._replace(steps=1, stop_step=None), prompts, seeds[:, :1])
        seconds_of.clear()
        pool = run_family(stages, seeds, prompts.texts, run).pool
        seconds = {name: value / seeds.numel() for name, value in seconds_of.items()}
        shadow = stages[0].sampler == SHADOW
        backend = module.transformers.precision_backend if shadow else "no shadow"
        precision = backend.partition(" ")[0] if shadow else "bf16"
        scored.append(Scored(stages, precision, backend, pool.merits.cpu(), seconds, pool.rewards.mean().item()))
    return scored


def fidelity(proxy: Tensor, truth: Tensor, keep: int) -> dict[str, float]:
    """The rank fidelity of merits [P, N]."""
    metric = RankFidelity(keep=keep)
    metric.update(proxy, truth)
    return {name: float(value) for name, value in metric.compute().items()}


def reward_gap(proxy: Tensor, truth: Tensor, keep: int) -> float:
    """Mean true merit of the best half minus the worst half of the candidates that the proxy's merits [P, N] select.

    This is the contrast that training gets. It is largest if the proxy is the truth.
    """
    merits = take(truth, select_contrastive(proxy, keep))
    best, worst = merits[:, : keep // 2], merits[:, keep // 2 :]
    return (best.mean() - worst.mean()).item()


def name_of(explorer: Scored, solver: str) -> str:
    """The label in the table and the picture: ``nvfp4 6 steps``, ``bf16 4 of 10 steps``, ``bf16 2/4/6 of 10 steps``."""
    first = explorer.stages[0]
    options = [str(value) for value, default in ((first.solver, solver), (first.decoder, "full")) if value != default]
    return " ".join([explorer.precision, steps_label(explorer.rungs), *options])


# The recommendation


def command_of(explorer: Scored, cfg: Run) -> str | None:
    """The command of a run with this explorer and the audit's other options; None if no family can.

    Exploration on merged weights that stops early continues in regeneration, so steps and solver are equal; an explorer
    that is the truth leaves nothing to regenerate.
    """
    task, rungs, first = cfg.task_as(Audit), explorer.rungs, explorer.stages[0]
    stops = rungs[-1].stop_step is not None
    if first.sampler == MERGED and stops != ((first.sampler, first.steps, first.solver) == _full(cfg)):
        return None
    family = "race" if len(rungs) > 1 else "prefix" if stops else "sol_rl"
    explore: dict[str, Any] = first._asdict() | {"stop_after": first.stop_step}
    if len(rungs) > 1:
        explore["rungs"] = [{"step": stage.stop_step or stage.steps, "keep": stage.keep} for stage in rungs]
    defaults = with_option(cfg, "family", family).family.model_dump(exclude_unset=True)
    counts = {"pool": task.pool, "keep": task.keep}
    arguments = [f"family={family}"] + [f"precision={explorer.precision}"] * (first.sampler == SHADOW)
    arguments += [f"family.{key}={count}" for key, count in counts.items() if count != defaults[key]]
    for key, value in defaults["explore"].items():
        if value != explore[key]:
            text = str(explore[key]).replace("'", "").replace(" ", "")
            arguments.append(f"family.explore.{key}={text}")
    return shlex.join(["python", "-m", "solrl_lightning", *arguments, *filter(_is_kept, task.overrides)])


def _is_kept(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    return key == "family.compile" or key.partition(".")[0] not in ("task", "family", "precision", "ckpt", "hydra")


def recommend(rows: Sequence[Mapping[str, Any]], min_gap: float) -> Mapping[str, Any] | None:
    """The cheapest row whose ``gap_kept`` is at least ``min_gap``; without one, the row with the largest.

    The cost is the measured seconds of exploring and regenerating. Seconds that are equal to two digits are compared by
    evaluations. Rows without a command are left out; None if no row has one.
    """

    def cost(row: Mapping[str, Any]) -> tuple[float, int]:
        seconds = row["seconds"] + row["regenerate_seconds"]
        return float(f"{seconds:.2g}"), row["evaluations"] + row["regenerate_evaluations"]

    possible = [row for row in rows if row["command"] is not None]
    enough = [row for row in possible if row["gap_kept"] >= min_gap]
    if enough:
        return min(enough, key=cost)
    return max(possible, key=lambda row: row["gap_kept"], default=None)


def format_recommendation(result: Mapping[str, Any], min_gap: float) -> str:
    row, pool = result["recommended"], result["pool"]
    if row is None:
        return "no recommendation: no family can explore as these proxies do and then regenerate"
    share, least = (f"{100 * gap:.1f} %" for gap in (row["gap_kept"], min_gap))
    verdict = (
        f"recommended: {row['name']}, the cheapest that keeps {least} of the gap (task.min_gap): {share}"
        if row["gap_kept"] >= min_gap
        else f"no proxy keeps {least} of the gap (task.min_gap); the closest is {row['name']} with {share}"
    )
    explored, regenerated = row["evaluations"], row["regenerate_evaluations"]
    cheap = row["sampler"] == SHADOW and row["precision"] != "bf16"
    counts = [f"{explored} {row['precision']}", f"{regenerated} BF16"] if cheap else [f"{explored + regenerated} BF16"]
    seconds, regenerating, all_of_it = (
        pool * value for value in (row["seconds"], row["regenerate_seconds"], result["truth"]["seconds"])
    )
    return (
        f"{verdict}\n  {' + '.join(counts)} evaluations a prompt; {seconds + regenerating:.3g} s a prompt, "
        f"{seconds:.3g} to explore and {regenerating:.3g} to regenerate (the pool in BF16 at full steps: "
        f"{all_of_it:.3g} s)\n  the cheapest by measured seconds, by evaluations where the seconds agree to two digits"
        f"\n  {row['command']}"
    )


def format_audit(result: dict[str, Any]) -> str:
    truth, pool, k = result["truth"], result["pool"], result["keep"] // 2
    columns = ["proxy", "spearman", "kendall", "top", "bottom", "top rank", "bottom rank", "gap kept", "evals", "ms"]
    rows = []
    for row in result["proxies"]:
        ranks = [*(f"{row[name]:.3f}" for name in NAMES[:4]), *(f"{row[name]:.1f}" for name in NAMES[4:])]
        share, seconds = f"{100 * row['gap_kept']:.0f} %", f"{1000 * row['seconds']:.1f}"
        rows.append([row["name"], *ranks, share, row["evaluations"], seconds])
    ranks = [f"{(k + 1) / 2:.1f}", f"{pool - (k - 1) / 2:.1f}"]
    costs = [truth["steps"] * pool, f"{1000 * truth['seconds']:.1f}"]
    perfect = ["the truth itself", *["1.000"] * 4, *ranks, "100 %", *costs]
    return (
        f"against BF16 at {truth['steps']} steps, mean reward {truth['reward']:.4f}: {result['prompts']} prompts x "
        f"{pool} seeds\noverlap of the {k} best and of the {k} worst, their mean true rank, share of the true reward "
        "gap between both that is kept, model evaluations a prompt and milliseconds a candidate\n"
        + format_table(columns, [*rows, perfect])
    )


def draw(result: Mapping[str, Any]) -> bytes:
    """PNG: Spearman's correlation of every proxy against its cost, as a share of the truth's."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    labels: list[tuple[str, tuple[float, float]]] = []
    for precision in dict.fromkeys(row["precision"] for row in result["proxies"]):
        rows = [row for row in result["proxies"] if row["precision"] == precision]
        points = [(row["seconds"] / result["truth"]["seconds"], row["spearman"]) for row in rows]
        axes.scatter(*zip(*points, strict=True), label=precision)
        labels += zip((row["name"].removeprefix(f"{precision} ") for row in rows), points, strict=True)
    axes.scatter([1.0], [1.0], marker="*", color="black", label=f"truth: bf16 {result['truth']['steps']} steps")
    axes.set_xlabel("seconds a candidate, as a share of the truth's")
    axes.set_ylabel("Spearman correlation with the truth")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=5)
    figure.draw_without_rendering()  # sets the positions that annotate reads
    annotate(axes, labels)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def annotate(axes: Axes, labels: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Put each label on the side of its point where it covers the fewest points and other labels."""
    marks = [axes.transData.transform(point) for _, point in labels]
    occupied = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in marks]
    for text, point in labels:
        notes = [
            axes.annotate(text, point, (x, y), textcoords="offset points", ha=ha, va=va, fontsize=9)
            for x, y, ha, va in _SIDES
        ]
        boxes = [note.get_window_extent() for note in notes]
        covered = [box.count_overlaps(occupied) + 2 * (not axes.bbox.containsx(box.x1)) for box in boxes]
        best = covered.index(min(covered))
        occupied.append(boxes[best])
        for number, note in enumerate(notes):
            if number != best:
                note.remove()
