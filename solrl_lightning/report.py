"""report.html: what a run, or a study of several runs, was and found, in one self-contained file without scripts.

``run_page`` and ``solrl_lightning.tasks.compare`` choose the content, and ``render`` puts it into the one template.
"""

import base64
import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from PIL import Image

from solrl_lightning.metrics.confidence import mean_of
from solrl_lightning.svg_charts import Series, draw_lines, look

_HOURS_FROM = 10_000  # seconds
_LARGE = 2**20  # bytes of a PNG file from which a page holds it as JPEG
_MOODS = {"completed": "ok", "stopped early": "ok", "interrupted": "warn", "failed": "bad"}

Rows = Sequence[Mapping[str, Any]]


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    detail: str = ""


class Chart(NamedTuple):
    """An SVG element with its title; legend entries are (label, CSS colour, SVG dashes), shown if there are several."""

    title: str
    svg: str
    note: str = ""
    legend: Sequence[tuple[str, str, str]] = ()


class Table(NamedTuple):
    """``folded``: the text to click on to see the table."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: str = ""
    is_text: bool = False


class Picture(NamedTuple):
    """An image as a data URI."""

    source: str
    text: str


class Section(NamedTuple):
    """A part of the page; everything in it is shown in the order of these fields, except ``tables``, then ``files``."""

    title: str
    text: Sequence[str] = ()
    alarms: Sequence[Mapping[str, Any]] = ()
    code: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    files: Sequence[tuple[str, str]] = ()  # title and content, folded


class Page(NamedTuple):
    """The whole report."""

    title: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    status: str = ""
    mood: str = ""  # CSS class of the status
    error: str | None = None
    footer: str = ""


def render(page: Page) -> bytes:
    """Return the page as UTF-8; all text in it is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("solrl_lightning") / "assets" / "report.html.jinja").read_text())
    sections = [
        section._replace(charts=[chart._replace(svg=Markup(chart.svg)) for chart in section.charts])
        for section in page.sections
    ]
    return template.render(page=page._replace(sections=sections)).encode()


# A run


def run_page(facts: Mapping[str, Any], history: Rows, folder: Path) -> Page:
    """Return the report of a training run.

    Args:
        facts: the content of summary.json.
        history: what each iteration has logged, by tag; see ``MetricHistory``.
        folder: the run's; its pictures and its recorded options are read.
    """
    config = facts["config"]
    parts = [str(config[key]) for key in ("model", "family", "objective", "reward") if key in config]
    sections = [
        alarm_section(facts),
        held_out_section(facts),
        picture_section(folder / "samples"),
        other_rewards_section(facts),
        rollout_section(facts, history),
        rank_section(history),
        training_section(history),
        time_section(facts, history),
        origin_section(facts, folder),
    ]
    versions = facts.get("versions", {})
    return Page(
        title=" · ".join(parts) or "run",
        status=facts["status"],
        mood=_MOODS[facts["status"]],
        error=facts["error"],
        lead=lead(facts),
        tiles=tiles(facts),
        sections=[section for section in sections if section is not None],
        footer=f"solrl_lightning {versions.get('solrl_lightning', '')}, {facts['paths']['run']}",
    )


def lead(facts: Mapping[str, Any]) -> str:
    """The result in a sentence."""
    done = f"{facts['iterations']} iterations in {duration(facts['seconds_total'])}."
    if facts.get("stopped_by") is not None:
        done = f"{done[:-1]}, ended by {facts['stopped_by']}."
    base, final = facts["base_reward"], facts["final_reward"]
    if base is None or final is None:
        return f"{done} The {facts['reward']} reward on held-out prompts was not evaluated before and after training."
    change = signed(final - base, error_of(facts, "change_error"))
    return f"{done} The {facts['reward']} reward on held-out prompts changed from {base:.4f} to {final:.4f} ({change})."


def tiles(facts: Mapping[str, Any]) -> list[Tile]:
    """The numbers at the top of the page."""
    reward, found = facts["reward"], []
    if facts["base_reward"] is not None:
        error = plus_minus(facts["evaluations"][0].get("standard_error", {}).get(reward))
        found.append(Tile(f"{reward} reward, base", f"{facts['base_reward']:.4f}", f"{error}iteration 0"))
    if facts["final_reward"] is not None:
        detail = f"{plus_minus(error_of(facts, 'standard_error'))}iteration {facts['final_reward_iteration']}"
        found.append(Tile(f"{reward} reward, trained", f"{facts['final_reward']:.4f}", detail))
    if facts["improvement"] is not None:
        detail = f"{plus_minus(error_of(facts, 'change_error'))}prompt by prompt, same noise"
        found.append(Tile("change", f"{facts['improvement']:+.4f}", detail))
    if facts.get("best_reward") is not None:
        found.append(Tile("best evaluation", f"{facts['best_reward']:.4f}", f"iteration {facts['best_iteration']}"))
    each = facts["seconds_per_stage"].get("iteration", {}).get("median")
    if each is not None:
        found.append(Tile("an iteration", f"{each:.2f} s", "median, without evaluation, probe, grid"))
    found.append(Tile("whole run", duration(facts["seconds_total"]), f"{facts['iterations']} iterations"))
    reserved = facts["peak_memory_reserved_bytes"]
    more = "of the process" if reserved is None else f"{reserved / 2**30:.2f} GiB reserved by the allocator"
    return [*found, Tile("peak memory", f"{facts['peak_memory_bytes'] / 2**30:.2f} GiB", more)]


def plus_minus(error: float | None) -> str:
    return "" if error is None else f"± {error:.4f}, "


def error_of(facts: Mapping[str, Any], key: str) -> float | None:
    """The standard error of the final reward ("standard_error") or of its change ("change_error")."""
    rows = [row for row in facts["evaluations"] if row["iteration"] == facts["final_reward_iteration"]]
    return rows[-1].get(key, {}).get(facts["reward"]) if rows else None


def alarm_section(facts: Mapping[str, Any]) -> Section | None:
    """The alarms; None without any."""
    alarms = [{"name": "alarm", "since": None, "saw": "", "helps": ""} | a for a in facts.get("alarms") or []]
    return Section("Alarms", alarms=alarms) if alarms else None


def sample_size(facts: Mapping[str, Any]) -> str:
    """How many images an evaluation is a mean of, and what its errors are."""
    size = facts.get("held_out")
    if size is None:
        return "Means over the held-out prompts."
    images = size["prompts"] * size["images_per_prompt"]
    text = f"Means over {images} images: {size['prompts']} held-out prompts, {size['images_per_prompt']} images each."
    if size["prompts"] > 1:
        text += (
            " ± and bands are one standard error over prompts. Every evaluation has the same prompts and the same "
            "noise, so the change from the base is taken prompt by prompt: how hard the prompts are is no part of its "
            "error."
        )
    return text


def held_out_section(facts: Mapping[str, Any]) -> Section | None:
    """The learning curve of the held-out reward; None without an evaluation."""
    reward = facts["reward"]
    rows = [row for row in facts["evaluations"] if row.get(reward) is not None]
    if not rows:
        return None
    at = [alarm["since"] for alarm in facts.get("alarms") or [] if alarm.get("since") is not None]
    charts = [evaluation_chart(f"{reward} reward by iteration", rows, reward, "iteration", at)]
    costed = [row for row in rows if row.get("seconds") is not None]
    if len(costed) > 1:
        title = f"{reward} reward by training time"
        charts.append(evaluation_chart(title, costed, reward, "seconds"))
        charts.append(evaluation_chart(f"{reward} reward by model evaluations", costed, reward, "evaluations"))
    columns = ["iteration", "training, s", "model evaluations", f"{reward} reward", "change from the base"]
    cells = [
        [
            str(row["iteration"]),
            "-" if row.get("seconds") is None else f"{row['seconds']:.1f}",
            "-" if row.get("evaluations") is None else f"{row['evaluations']:,}",
            measured(row[reward], row.get("standard_error", {}).get(reward)),
            "-"
            if rows[0]["iteration"] > 0 or row is rows[0]
            else signed(row[reward] - rows[0][reward], row.get("change_error", {}).get(reward)),
        ]
        for row in rows
    ]
    text = [
        sample_size(facts),
        "Seconds and model evaluations are those of training, without evaluation, probe and grid.",
    ]
    if at:
        text.append("Vertical lines: since when an alarm is raised.")
    tables = [Table(columns, cells, folded=f"All {len(rows)} evaluations")]
    return Section(f"Held-out {reward} reward", text, charts=charts, tables=tables)


def evaluation_chart(title: str, rows: Rows, reward: str, cost: str, at: Sequence[float] = ()) -> Chart:
    """A chart of an evaluated reward with its standard error against a cost."""
    names = {"iteration": "iterations", "seconds": "seconds", "evaluations": "model evaluations"}
    unit, scale = names[cost], 1
    if cost == "seconds" and rows[-1]["seconds"] > _HOURS_FROM:
        unit, scale = "hours", 3600
    x, y = [row[cost] / scale for row in rows], [row[reward] for row in rows]
    errors = [row.get("standard_error", {}).get(reward) for row in rows]
    low: list[float] = []
    high: list[float] = []
    if None not in errors:
        low, high = ([m + sign * e for m, e in zip(y, errors, strict=True)] for sign in (-1, 1))
    svg = draw_lines([Series(reward, x, y, low, high)], unit, whole_x=cost == "iteration", at=at)
    return Chart(title, svg)


def other_rewards_section(facts: Mapping[str, Any]) -> Section | None:
    """The other rewards of the evaluations, watched ones among them; None without any."""
    others = facts["other_rewards"]
    if not others:
        return None
    evaluations, rows, charts = facts["evaluations"], [], []
    for name, other in others.items():
        scored = [row for row in evaluations if row.get(name) is not None]
        watched = other["weight"] == 0
        weight = "0: watched, not trained on" if watched else f"{other['weight']:g}"
        base, final = other["base"], other["final"]
        errors = (scored[-1].get("standard_error", {}), scored[-1].get("change_error", {})) if scored else ({}, {})
        known = base is not None and final is not None
        first = scored[0].get("standard_error", {}).get(name) if scored else None
        change = signed(final - base, errors[1].get(name)) if known else "-"
        rows.append([name, weight, measured(base, first), measured(final, errors[0].get(name)), change])
        if scored:
            charts.append(evaluation_chart(f"{name} reward{', watched' * watched}", scored, name, "iteration"))
    columns = ["reward", "weight", "base", "trained", "change"]
    return Section("Other rewards", [sample_size(facts)], charts=charts, tables=[Table(columns, rows)])


def picture_section(samples: Path) -> Section | None:
    """The last sample grid and the last pool; None without pictures."""
    pictures = []
    for name, text in (
        ("grid", "Left the base, right the trained model: same held-out prompts, same noise, after iteration {}."),
        ("pool", "Best and worst samples of a prompt that iteration {} trained on, with their rewards."),
    ):
        if found := sorted(samples.glob(f"{name}_*.png")):
            pictures.append(Picture(data_uri(found[-1]), text.format(int(found[-1].stem.rpartition("_")[2]))))
    return Section("Pictures", pictures=pictures) if pictures else None


def data_uri(file: Path) -> str:
    """Return a PNG file as a data URI; a large one as JPEG."""
    content, kind = file.read_bytes(), "png"
    if len(content) > _LARGE:
        buffer = io.BytesIO()
        with Image.open(file) as picture:
            picture.convert("RGB").save(buffer, "JPEG", quality=90)
        content, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def rollout_section(facts: Mapping[str, Any], history: Rows) -> Section | None:
    """Rewards of the samples that are trained on."""
    charts = []
    x, mean = column(history, "reward/mean")
    spread = dict(zip(*column(history, "reward/std"), strict=True))
    if mean:
        low = [y - spread.get(i, 0.0) for i, y in zip(x, mean, strict=True)]
        high = [y + spread.get(i, 0.0) for i, y in zip(x, mean, strict=True)]
        svg = draw_lines([Series("reward/mean", x, mean, low, high)], "iterations", whole_x=True)
        charts.append(Chart("reward/mean: kept samples", svg, "band: standard deviation of the samples"))
    own = [name for name in names_of(history) if name.startswith(("reward/", "explore/"))]
    charts += [history_chart(history, name) for name in own if name not in ("reward/mean", "reward/std")]
    if not charts:
        return None
    text = [
        f"In the {facts['reward']} reward's unit. Each iteration has other prompts, so these curves also vary with "
        "their difficulty; the held-out curve does not."
    ]
    return Section("Rewards of the samples trained on", text, charts=charts)


def rank_section(history: Rows) -> Section | None:
    """How well the proxy ranks, by probes; None without a proxy."""
    probes = [row for row in history if "rank/spearman" in row]
    charts = []
    if probes:
        charts += [
            history_chart(probes, "rank/spearman", "rank/kendall", title="rank correlation of a probe"),
            history_chart(
                probes, "rank/top_overlap", "rank/bottom_overlap", title="overlap with the true best and worst"
            ),
        ]
    kept = [name for name in ("rank/kept_spearman", "rank/kept_kendall") if name in names_of(history)]
    if kept:
        title = "rank correlation on the kept set"
        charts.append(history_chart(history, *kept, title=title, note="too high: the kept seeds are the extremes"))
    if not charts:
        return None
    rows = []
    for name in names_of(probes):
        values = column(probes, name)[1]
        if name.startswith("rank/") and name not in kept and values:
            mean = mean_of(values)
            ends = [f"{value:.3f}" for value in (values[0], values[-1])]
            rows.append([name, *ends, measured(mean.mean, mean.standard_error, 3)])
    text = [
        "A probe generates the whole pool of one prompt in BF16 at full steps, and compares its order with that of the "
        f"proxy. {len(probes)} probes; ± is one standard error over them. Mean ranks count from 1, the best."
    ]
    tables = [Table(["tag", "first probe", "last probe", "mean"], rows)] if rows else []
    return Section("Rank fidelity of the proxy", text, charts=charts, tables=tables)


def training_section(history: Rows) -> Section | None:
    """All that an iteration logs and no other section shows."""
    shown = ("reward/", "explore/", "rank/", "time/", "eval/", "iteration")
    names = [name for name in names_of(history) if not name.startswith(shown)]
    if not names:
        return None
    names.sort(key=lambda name: (name != "train/loss", name != "train/kl", name != "train/grad_norm", name))
    charts = [history_chart(history, name) for name in names]
    text = [
        "The value of an iteration: the mean over its micro-batches and ranks. train/grad_norm is the norm before "
        "clipping, lr the learning rate; losses have no unit."
    ]
    return Section("Training", text, charts=charts)


def time_section(facts: Mapping[str, Any], history: Rows) -> Section | None:
    """Seconds of every stage."""
    stages = {name: seconds for name, seconds in facts["seconds_per_stage"].items() if name != "iteration"}
    if not stages:
        return None
    whole = facts["seconds_total"]
    rows = []
    for name, seconds in facts["seconds_per_stage"].items():
        values = column(history, f"time/{name}")[1]
        middle = quantiles(values, n=4) if len(values) > 3 else []
        total = seconds["total"]
        rows.append(
            [
                name,
                "-" if total is None else f"{total:.1f}",
                "-" if total is None else f"{100 * total / whole:.0f} %",
                "-" if seconds["median"] is None else f"{seconds['median']:.3f}",
                f"{middle[0]:.3f} to {middle[2]:.3f}" if middle else "-",
            ]
        )
    rest = whole - sum(seconds["total"] or 0 for seconds in stages.values())
    rows.append(["outside of the stages", f"{rest:.1f}", f"{100 * rest / whole:.0f} %", "-", "-"])
    columns = ["stage", "total, s", "of the run", "median iteration, s", "middle half of the iterations, s"]
    note = (
        "The stage iteration is without evaluation, probe and grid. Outside: checkpoints, loading, and other callbacks."
    )
    names = [f"time/{name}" for name in stages if column(history, f"time/{name}")[1]]
    title = "seconds of an iteration by stage"
    charts = [history_chart(history, *names, title=title)] if names else []
    return Section("Time", charts=charts, tables=[Table(columns, rows, note)])


def origin_section(facts: Mapping[str, Any], folder: Path) -> Section:
    """Command, options, versions and machine."""
    record = folder / ".hydra"
    code = []
    if (record / "overrides.yaml").is_file():
        options: Iterable[Any] = OmegaConf.load(record / "overrides.yaml")
        code.append(shlex.join(["python", "-m", "solrl_lightning", *map(str, options)]))
    found = {
        "option": facts["config"],
        "machine": facts.get("machine", {}) | {"shadow": facts["precision_backend"]},
        "version": facts.get("versions", {}),
    }
    tables = [
        Table((name, ""), [[key, str(value)] for key, value in values.items()], is_text=True)
        for name, values in found.items()
    ]
    config = record / "config.yaml"
    kept = [("The whole configuration (.hydra/config.yaml)", config.read_text())] if config.is_file() else []
    return Section("What was run", code=code, tables=tables, files=kept)


# Parts


def names_of(history: Rows) -> list[str]:
    """Tags in the order of their first appearance."""
    return list(dict.fromkeys(name for row in history for name in row if name != "iteration"))


def column(history: Rows, name: str) -> tuple[list[float], list[float]]:
    """Iterations and finite values of a tag."""
    pairs = [(row["iteration"], row[name]) for row in history if name in row and abs(row[name]) < float("inf")]
    return [x for x, _ in pairs], [y for _, y in pairs]


def history_chart(history: Rows, *names: str, title: str = "", note: str = "") -> Chart:
    """A chart of some tags against iterations."""
    series = [Series(name, *column(history, name)) for name in names]
    svg = draw_lines(series, "iterations", whole_x=True)
    return Chart(title or names[0], svg, note, legend_of(names))


def legend_of(labels: Sequence[str]) -> list[tuple[str, str, str]]:
    return [(label, *look(number)) for number, label in enumerate(labels)]


def measured(value: float | None, error: float | None = None, digits: int = 4) -> str:
    """``value ± error``; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def signed(value: float, error: float | None = None) -> str:
    return f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}")


def duration(seconds: float) -> str:
    """Seconds, or minutes or hours where there are many."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
