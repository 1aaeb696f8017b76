"""report.html: what a run, or a study of several runs, was and found, in one self-contained file without scripts."""

import base64
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from omegaconf import OmegaConf
from PIL import Image

from solrl_lightning import __version__
from solrl_lightning.artifacts.files import finite_only
from solrl_lightning.artifacts.formatting import (
    change,
    command_line,
    counted,
    difference,
    duration,
    gibibytes,
    measured,
    number,
    numbers,
    shell_quoted,
    two_decimals,
)
from solrl_lightning.artifacts.run_folder import RECORD
from solrl_lightning.cli.config import as_written, finding, own_sources
from solrl_lightning.metrics.selection_gain import GAIN_ERROR
from solrl_lightning.study.confidence import mean_of
from solrl_lightning.study.drawing import ITERATIONS, Chart, Series, cost_axis, draw_chart

_LARGE = 2**20  # bytes of a PNG file from which a page holds it as JPEG

Rows = Sequence[Mapping[str, Any]]

_CLEAR = math.exp(2 * GAIN_ERROR)
"""The factor between an estimated gain and its cost from which one is said to be larger."""
_FRACTIONS = ("reward/zero_std_fraction", "train/clipped", "rank/top_overlap", "rank/bottom_overlap")
_MEANINGS = {
    "reward/group_std": "Spread of the rewards of a prompt's kept samples: what the advantages are made of.",
    "reward/zero_std_fraction": "Share of prompts whose kept samples all have one reward, and so teach nothing.",
    "explore/proxy_reward": "Mean proxy reward of the whole pool. It only selects.",
    "explore/lag": "By how many iterations the weights of the exploration were older than the policy's.",
    "explore/explorers": "Explorers that answer.",
    "explore/explorer_seconds": "Seconds of all explorers: their number times time/explore, if none of them waits.",
    "explore/explorers_lost": "How often an explorer was lost; others got its candidates.",
    "rank/spearman": "1: the proxy orders the pool as BF16 does; 0: it selects by chance.",
    "rank/top_overlap": "Share of the best and of the worst by the proxy that are so in BF16, too; by chance half of "
    "family.keep over family.pool (12 of 96: 0.125).",
    "rank/top_mean_rank": "Ranks in BF16 of the seeds that the proxy calls the best and the worst; by chance both are "
    "in the middle.",
    "rank/kept_spearman": "Of every iteration, and above the pool's correlation: only the extremes are in it, which "
    "are easy to order.",
    "train/loss": "What the optimiser minimises; it need not fall while the reward rises.",
    "train/kl": "The KL term: distance of the policy from the base. A steep rise announces a collapse. Not computed, "
    "and 0, with objective.kl_weight=0.",
    "train/grad_norm": "Norm of the gradient before clipping.",
    "train/clipped": "Share beyond the clip: of advantages (nft), or of likelihood ratios (awm, GRPO).",
    "train/drift": "Distance of the policy's velocity from the velocity of the old policy, which sampled.",
    "train/policy": "The part of the loss that depends on the rewards.",
    "train/positive": "Error of the velocity against the samples. Good samples lower it.",
    "train/negative": "Error of the mirrored velocity, which bad samples lower; near the old policy both are equal.",
    "lr": "Learning rate.",
    "policy/base_distance": "How far the trained weights are from the base's, relative to their norm.",
    "policy/old_distance": "How far the trained weights are from the old policy's, relative to the base's norm.",
}
"""Sentences for tags that iterations log."""


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    detail: str


class Table(NamedTuple):
    """A cell that is None is shown as a dash; ``folded`` is the text to click on to see the table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    folded: str = ""
    is_text: bool = False


class Section(NamedTuple):
    """A part of the page; everything in it is shown in the order of these fields."""

    title: str
    text: Sequence[str] = ()
    alarms: Sequence[Mapping[str, Any]] = ()
    command: str = ""
    charts: Sequence[Chart] = ()
    pictures: Sequence[tuple[str, str]] = ()  # data URI and caption
    tables: Sequence[Table] = ()
    files: Sequence[tuple[str, str]] = ()  # title and content, folded


class Page(NamedTuple):
    title: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    footer: str = ""
    status: str = ""
    error: str | None = None


def render(page: Page) -> bytes:
    """Return the page as UTF-8; all text in it is escaped, and bytes of file names that are none are shown."""
    origin = f"solrl_lightning {__version__}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    return _template().render(page=page, origin=origin, svg=Markup).encode(errors="backslashreplace")


@cache  # a sweep writes many
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files("solrl_lightning") / "assets" / "report.html.jinja").read_text())


# A run


def run_page(facts: Mapping[str, Any], history: Rows, folder: Path) -> Page:
    """Return the report of a training run: of summary.json, ``MetricHistory``, and what is in its folder."""
    config = facts["config"]
    sections = [
        Section("Alarms", alarms=facts["alarms"]),
        held_out_section(facts),
        picture_section(folder / "samples"),
        other_rewards_section(facts),
        rollout_section(facts, history),
        rank_section(history),
        training_section(history),
        time_section(facts, history),
        origin_section(facts, folder),
    ]
    return Page(
        " · ".join(str(config[key]) for key in ("model", "family", "objective", "reward") if key in config) or "run",
        lead(facts),
        tiles(facts),
        [section for section in sections if section.alarms or section.charts or section.pictures or section.tables],
        footer=facts["paths"]["run"],
        status=facts["status"],
        error=facts["error"],
    )


def lead(facts: Mapping[str, Any]) -> str:
    """Return the result as a sentence."""
    end = "" if facts["stopped_by"] is None else f", ended by {facts['stopped_by']}"
    done = f"{counted(facts['iterations'], 'iteration')} in {duration(facts['seconds_total'])}{end}."
    base, final = facts["base_reward"], facts["final_reward"]
    if facts["improvement"] is None:
        what = "not evaluated" if base is None else f"{number(base)} before training, and not evaluated after"
        return f"{done} The {facts['reward']} reward on held-out prompts was {what}."
    error = error_of(facts, facts["final_reward_iteration"], "change_error")
    what = "changed from {} to {}".format(*numbers([base, final])) + f" ({change(base, final, error)})"
    if first := first_iteration(facts):
        what += f" after iteration {first}, where these evaluations begin"
    alarms = " No alarm was raised." if facts["guarded"] and not facts["alarms"] else ""
    selection = selection_text(facts)
    paid = f" {selection[0].upper()}{selection[1:]}." if selection else ""
    return f"{done} The {facts['reward']} reward on held-out prompts {what}.{alarms}{paid}"


def selection_text(facts: Mapping[str, Any]) -> str:
    """Return whether selection paid in seconds, by the estimate of ``facts``; an empty text without one."""
    if not (estimate := facts["selection"]):
        return ""
    gain, cost = estimate["gain"], estimate["cost"]
    verdict = "pays" if gain > _CLEAR * cost else "does not pay" if cost > _CLEAR * gain else "is about level"
    times = f"{gain:.2f} times as much as without it (estimated from {counted(estimate['probes'], 'probe')})"
    return f"selection {verdict} here: an iteration learns {times} and takes {cost:.2f} times as long"


def tiles(facts: Mapping[str, Any]) -> list[Tile]:
    reward, last, reserved = facts["reward"], facts["final_reward_iteration"], facts["peak_memory_reserved_bytes"]
    base, final, first = facts["base_reward"], facts["final_reward"], first_iteration(facts)
    gain = None if facts["improvement"] is None else difference(base, final)
    quantities = [
        (f"{reward} reward, before", base, error_of(facts, first), f"iteration {first}"),
        (f"{reward} reward, trained", final, error_of(facts, last), f"iteration {last}"),
        ("change", gain, error_of(facts, last, "change_error"), "prompt by prompt, same noise"),
        ("best evaluation", facts["best_reward"], None, best_text(facts)),
    ]
    shown = [
        Tile(
            label,
            value if isinstance(value, str) else number(value),
            ("" if error is None else f"± {number(error, 3)}, ") + detail,
        )
        for label, value, error, detail in quantities
        if value is not None
    ]
    each = facts["seconds_per_stage"].get("iteration", {}).get("median")
    if each is not None:
        shown.append(Tile("an iteration", f"{each:.2f} s", "median, without evaluation, probe, grid"))
    more = "of the process" if reserved is None else f"{gibibytes(reserved)} reserved by the allocator"
    return [
        *shown,
        Tile("whole run", duration(facts["seconds_total"]), counted(facts["iterations"], "iteration")),
        Tile("peak memory", gibibytes(facts["peak_memory_bytes"]), more),
    ]


def best_text(facts: Mapping[str, Any]) -> str:
    """Return the iteration of the best evaluation, and the reward before training if it is better."""
    monitor = facts.get("best_monitor") or facts["reward"]
    monitored = facts["other_rewards"].get(monitor, {"base": facts["base_reward"], "weight": 1.0})
    base, best, sign = monitored["base"], facts["best_reward"], -1 if monitored["weight"] < 0 else 1
    is_worse = best is not None and base is not None and sign * best < sign * base
    start = f"at iteration {first}" if (first := first_iteration(facts)) else "before training"
    worse = f", {'below' if sign > 0 else 'above'} {number(base)} {start}" if is_worse else ""
    return f"iteration {facts['best_iteration']}{worse}"


def first_iteration(facts: Mapping[str, Any]) -> int:
    """Return the iteration of the first evaluation of the trained reward: not 0 where a branch is evaluated anew."""
    return next((row["iteration"] for row in facts["evaluations"] if facts["reward"] in row), 0)


def shown_stages(facts: Mapping[str, Any]) -> dict[str, Mapping[str, float | None]]:
    """Return ``seconds_per_stage`` without the stages that the family does not have."""
    every = facts["seconds_per_stage"]
    return {name: seconds for name, seconds in every.items() if seconds["total"] or seconds["median"]}


def error_of(facts: Mapping[str, Any], iteration: int, key: str = "standard_error") -> float | None:
    """Return the standard error of the trained reward after an iteration, or ("change_error") of its change."""
    rows = [row for row in facts["evaluations"] if row["iteration"] == iteration]
    return error_in(rows[-1], facts["reward"], key) if rows else None


def error_in(row: Mapping[str, Any], reward: str, key: str = "standard_error") -> float | None:
    """Return the error of a reward in an evaluation; None for a single prompt."""
    return row.get(key, {}).get(reward)


def sample_size(facts: Mapping[str, Any]) -> str:
    """Return how many images an evaluation is a mean of, and what its errors are."""
    size = facts["held_out"]
    images = size["prompts"] * size["images_per_prompt"]
    prompts, each = counted(size["prompts"], "held-out prompt"), counted(size["images_per_prompt"], "image")
    text = f"Means over the scores of {counted(images, 'image')}: {prompts}, {each} each."
    if size["prompts"] > 1:
        text += (
            " ± and bands are one standard error over prompts. Every evaluation has the same prompts and the same "
            "noise, so the change is taken prompt by prompt: how hard the prompts are is no part of its "
            "error."
        )
    return text


def held_out_section(facts: Mapping[str, Any]) -> Section:
    reward, title = facts["reward"], f"Held-out {facts['reward']} reward"
    rows = [row for row in facts["evaluations"] if row.get(reward) is not None]
    if not rows:
        return Section(title)
    at = [alarm["since"] for alarm in facts["alarms"]]
    charts = [evaluation_chart(f"{reward} reward by iteration", rows, reward, "iteration", at)] if len(rows) > 1 else []
    costed = [row for row in rows if row.get("seconds") is not None]
    if len(costed) > 1:
        charts.append(evaluation_chart(f"{reward} reward by training time", costed, reward, "seconds"))
        charts.append(evaluation_chart(f"{reward} reward by forward passes", costed, reward, "evaluations"))
    described = [row for row in rows if "diversity" in row.get("statistics", {})]  # of several images of a prompt
    if len(described) > 1:
        values = [row["statistics"]["diversity"] for row in described]
        note = "How much the pictures of a prompt differ: standard deviation of their thumbnails over its seeds."
        series = Series("diversity", [row["iteration"] for row in described], values)
        charts.append(draw_chart("diversity", [series], ITERATIONS, note=note))
    columns = ["iteration", "training, s", "forward passes", f"{reward} reward", "change"]
    cells = []
    for row in rows:
        cost = [f"{row['seconds']:.1f}", f"{row['evaluations']:,}"] if row in costed else [None, None]
        error = error_in(row, reward, "change_error")
        gain = None if row is rows[0] else change(rows[0][reward], row[reward], error)
        cells.append([row["iteration"], *cost, measured(row[reward], error_in(row, reward)), gain])
    text = [
        sample_size(facts),
        "Seconds and forward passes count training only: no evaluation, probe or grid.",
        *(["Vertical lines: since when an alarm is raised."] if at else []),
    ]
    tables = [Table(columns, cells, folded=f"All {len(rows)} evaluations" if len(rows) > 1 else "")]
    if learned := parts_learned(facts):
        shares = [[name, *two_decimals(base, last)] for name, base, last in learned]
        columns = ["parts of the reward, and shares of what is right", "before", "last evaluation"]
        tables.insert(0, Table(columns, shares, "Means over the held-out images."))
    return Section(title, text, charts=charts, tables=tables)


def parts_learned(facts: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Return (part, first, last evaluation) of the parts of a run's rewards; empty without parts or two evaluations.

    None where a part is undefined for an image.
    """
    evaluated = [row["parts"] for row in facts["evaluations"] if "parts" in row]
    if len(evaluated) < 2:
        return []
    first, last = evaluated[0], evaluated[-1]
    return [(name.removeprefix(f"{facts['reward']}_"), first[name], last[name]) for name in first if name in last]


def evaluation_chart(title: str, rows: Rows, reward: str, cost: str, at: Sequence[float] = ()) -> Chart:
    """Draw an evaluated reward with its standard error against a cost."""
    unit, scale = cost_axis(cost, rows[-1][cost])
    x, y, errors = zip(*((row[cost] / scale, row[reward], error_in(row, reward)) for row in rows), strict=True)
    return draw_chart(title, [banded(reward, x, y, errors)], unit, at=at)


def banded(label: str, x: Sequence[float], y: Sequence[float], errors: Sequence[float | None]) -> Series:
    """Return a series with a band of y ± error; without a band if an error is unknown."""
    finite = [error for error in errors if error is not None]
    if len(finite) < len(y):
        return Series(label, x, y)
    low, high = ([m + sign * e for m, e in zip(y, finite, strict=True)] for sign in (-1, 1))
    return Series(label, x, y, low, high)


def other_rewards_section(facts: Mapping[str, Any]) -> Section:
    rows, charts = [], []
    for name, other in facts["other_rewards"].items():
        scored = [row for row in facts["evaluations"] if row.get(name) is not None]
        first, last = (scored[0], scored[-1]) if scored else ({}, {})
        base, final, watched = other["base"], other["final"], other["weight"] == 0
        weight = "0: watched, not trained on" if watched else f"{other['weight']:g}"
        gain = None if base is None or final is None else change(base, final, error_in(last, name, "change_error"))
        rows.append([name, weight, measured(base, error_in(first, name)), measured(final, error_in(last, name)), gain])
        if scored:
            charts.append(evaluation_chart(f"{name} reward{', watched' * watched}", scored, name, "iteration"))
    tables = [Table(["reward", "weight", "before", "trained", "change"], rows)] if rows else []
    return Section("Other rewards", [sample_size(facts)], charts=charts, tables=tables)


def picture_section(samples: Path) -> Section:
    pictures = []
    for name, text in {
        "grid": "Left the base, right the trained model: same held-out prompts, same noise, after iteration {}.",
        "pool": "Some of the best and of the worst samples of a prompt of iteration {}, with their rewards.",
    }.items():
        if files := sorted(samples.glob(f"{name}_*.png")):
            pictures.append((data_uri(files[-1]), text.format(int(files[-1].stem.rpartition("_")[2]))))
    return Section("Pictures", pictures=pictures)


def data_uri(file: Path) -> str:
    """Return a PNG file as a data URI; a large one as JPEG."""
    content, kind = file.read_bytes(), "png"
    if len(content) > _LARGE:
        buffer = io.BytesIO()
        with Image.open(file) as picture:
            picture.convert("RGB").save(buffer, "JPEG", quality=90)
        content, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def rollout_section(facts: Mapping[str, Any], history: Rows) -> Section:
    charts = []
    x, mean = column(history, "reward/mean")
    if mean:
        spread = dict(zip(*column(history, "reward/std"), strict=True))
        series = banded("reward/mean", x, mean, [spread.get(i, 0.0) for i in x])
        note = "band: standard deviation of the samples"
        charts.append(draw_chart("reward/mean: kept samples", [series], ITERATIONS, note=note))
    names = [name for name in names_of(history) if name.startswith(("reward/", "explore/"))]
    names = [name for name in names if name not in ("reward/mean", "reward/std")]
    curves, tables = charts_and_constants(history, names)
    text = [
        f"In the {facts['reward']} reward's unit. Each iteration has other prompts, so these curves also vary with "
        "their difficulty; the held-out curve does not."
    ]
    return Section("Rewards of the samples trained on", text, charts=[*charts, *curves], tables=tables)


def rank_section(history: Rows) -> Section:
    probes = [row for row in history if "rank/spearman" in row]
    unordered = len(probes) - len(column(probes, "rank/spearman")[1])
    on_kept = ["rank/kept_spearman", "rank/kept_kendall"]
    charts, rows = [], []
    for title, *names in (
        ("rank correlation of a probe", "rank/spearman", "rank/kendall"),
        ("overlap with the true best and worst", "rank/top_overlap", "rank/bottom_overlap"),
        ("mean true rank of the best and the worst", "rank/top_mean_rank", "rank/bottom_mean_rank"),
        ("rank correlation on the kept set", *on_kept),
    ):
        if set(names) & set(names_of(history)):
            charts.append(history_chart(history, *names, title=title))
    for name in names_of(probes):
        values = column(probes, name)[1]
        if name.startswith("rank/") and name not in on_kept and values:
            mean = mean_of(values)
            ends = finite_only([row.get(name) for row in (probes[0], probes[-1])])
            rows.append([name, *numbers(ends, 3), measured(mean.mean, mean.standard_error)])
    text = [
        "A probe generates the whole pool of one prompt of each device, another one each time, in BF16 at full steps, "
        f"and compares its order with the proxy's. {counted(len(probes), 'probe')}"
        f"{f', {unordered} of which have no order' * bool(unordered)}; ± is one standard error over all with a value. "
        "Mean ranks count from 1, the best; spread_ratio is the spread of the kept rewards over the spread of as many "
        "random ones."
    ]
    tables = [Table(["tag", "first probe", "last probe", "mean"], rows)] if rows else []
    return Section("Rank fidelity of the proxy", text, charts=charts, tables=tables)


def training_section(history: Rows) -> Section:
    """Return all that an iteration logs and no other section shows."""
    names = [n for n in names_of(history) if not n.startswith(("reward/", "explore/", "rank/", "time/", "eval/"))]
    names.sort(key=lambda name: (name != "train/loss", name != "train/kl", name != "train/grad_norm", name))
    text = ["The value of an iteration: the mean over its micro-batches and ranks. Losses have no unit."]
    charts, tables = charts_and_constants(history, names)
    return Section("Training", text, charts=charts, tables=tables)


def charts_and_constants(history: Rows, names: Sequence[str]) -> tuple[list[Chart], list[Table]]:
    """Return a chart of each tag with different values, and a table of those with one value in all iterations."""
    values = {name: set(column(history, name)[1]) for name in names}
    charts = [history_chart(history, name) for name in names if len(values[name]) > 1]
    rows = [[name, number(next(iter(one))), _MEANINGS.get(name, "")] for name, one in values.items() if len(one) == 1]
    return charts, [Table(["tag", "value in all iterations", ""], rows, is_text=True)] if rows else []


def time_section(facts: Mapping[str, Any], history: Rows) -> Section:
    stages, whole, rows = shown_stages(facts), facts["seconds_total"], []
    if not stages.keys() - {"iteration"}:
        return Section("Time")
    for name, seconds in stages.items():
        total, median, values = seconds["total"], seconds["median"], column(history, f"time/{name}")[1]
        middle = quantiles(values, n=4) if len(values) > 3 else None
        rows.append(
            [
                name,
                *([None, None] if total is None else [f"{total:.1f}", f"{100 * total / whole:.0f} %"]),
                None if median is None else f"{median:.3f}",
                None if middle is None else f"{middle[0]:.3f} to {middle[2]:.3f}",
            ]
        )
    rest = whole - sum(seconds["total"] or 0 for seconds in stages.values())
    rows.append(["outside of the stages", f"{rest:.1f}", f"{100 * rest / whole:.0f} %", None, None])
    columns = ["stage", "total, s", "of the run", "median iteration, s", "middle half of the iterations, s"]
    note = (
        "The row iteration has no evaluation, probe and grid. Outside of the stages: loading the model, and callbacks "
        "that have no row."
    )
    names = [f"time/{n}" for n in stages if n != "iteration" and column(history, f"time/{n}")[1]]
    charts = [history_chart(history, *names, title="seconds of an iteration by stage")] if names else []
    return Section("Time", charts=charts, tables=[Table(columns, rows, note)])


def origin_section(facts: Mapping[str, Any], folder: Path) -> Section:
    config = folder / RECORD / "config.yaml"
    groups = {
        "option": facts["config"],
        "machine": facts["machine"] | {"shadow": facts["precision_backend"]},
        "version": facts["versions"],
    }
    files = [("The whole configuration (.hydra/config.yaml)", config.read_text())] if config.is_file() else []
    tables = [Table((name, ""), list(values.items()), is_text=True) for name, values in groups.items()]
    return Section("What was run", command=recorded_command(folder / RECORD), tables=tables, files=files)


def recorded_command(record: Path) -> str:
    """Return the command of a run, from any folder, by its record and, for PYTHONPATH, by this environment."""
    overrides, hydra_file, config = (record / f"{name}.yaml" for name in ("overrides", "hydra", "config"))
    arguments = as_written(OmegaConf.load(overrides)) if overrides.is_file() else []
    if not hydra_file.is_file():
        return command_line(arguments) if overrides.is_file() else ""
    hydra: Any = OmegaConf.load(hydra_file).hydra
    arguments += finding(own_sources(hydra))
    arguments += [each for each in as_written(hydra.overrides.hydra) if each.startswith("hydra.run.dir=")]
    modules = set(re.findall(r"_target_: (\w+)", config.read_text(encoding="utf-8")))
    paths = [
        str(Path(hydra.runtime.cwd) / path)
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and any((Path(path) / name).is_dir() or (Path(path) / f"{name}.py").is_file() for name in modules)
    ]
    prefix = f"PYTHONPATH={shell_quoted(os.pathsep.join(paths))} " if paths else ""
    return f"cd {shell_quoted(hydra.runtime.cwd)}\n{prefix}{command_line(arguments)}"


def names_of(history: Rows) -> list[str]:
    """Return the tags in the order of their first appearance."""
    return list(dict.fromkeys(name for row in history for name in row if name != "iteration"))


def column(history: Rows, name: str) -> tuple[list[float], list[float]]:
    """Return the iterations and finite values of a tag."""
    pairs = [(row["iteration"], row[name]) for row in history if name in row and abs(row[name]) < float("inf")]
    return [x for x, _ in pairs], [y for _, y in pairs]


def history_chart(history: Rows, *names: str, title: str = "") -> Chart:
    """Draw some tags against iterations."""
    series = [Series(name, *column(history, name)) for name in names]
    limits = (0.0, 1.0) if names[0] in _FRACTIONS else None
    return draw_chart(title or names[0], series, ITERATIONS, limits=limits, note=_MEANINGS.get(names[0], ""))
