"""The pages of report.html, from hand-written summaries."""

import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from solrl_lightning.metrics.rank import NAMES
from solrl_lightning.study.report import (
    data_uri,
    held_out_section,
    history_chart,
    parts_learned,
    rank_section,
    recorded_command,
    render,
    run_page,
    selection_text,
    shown_stages,
)
from solrl_lightning.training.evaluation import evaluation_errors

pytestmark = pytest.mark.usefixtures("drawn_charts")

RUN = dict(status="completed", error=None, stopped_by=None, iterations=12, seconds_total=89.4, reward="shapes")
CHANGE = dict(base_reward=0.4321, final_reward=0.5361, final_reward_iteration=12, improvement=0.1040)
BEST = dict(best_reward=0.5404, best_iteration=9)
ALARM = dict(name="collapse", iteration=9, since=6, saw="It fell <b>much</b>", helps="lower lr & wait")
MEMORY = dict(precision_backend="nvfp4 (emulated)", peak_memory_bytes=2**30, peak_memory_reserved_bytes=None)
FACTS: dict[str, Any] = {
    **(RUN | CHANGE | BEST | MEMORY),
    "alarms": [ALARM],
    "guarded": True,
    "selection": {"gain": 1.38, "cost": 2.19, "probes": 4},
    "other_rewards": {"watched": {"weight": 0.0, "base": 0.75, "final": 0.7}},
    "seconds_per_stage": {
        "explore": {"total": 36.2, "median": 3.008},
        "evaluate": {"total": 18.8, "median": None},
        "iteration": {"total": None, "median": 5.431},
    },
    "held_out": {"prompts": 64, "images_per_prompt": 8, "steps": 10},
    "evaluations": [
        dict(iteration=i, seconds=5.0 * i, evaluations=100 * i, shapes=reward, watched=0.75 - 0.004 * i)
        | {"statistics": {"diversity": 0.14 - 0.001 * i}}
        | {"standard_error": {"shapes": 0.0182, "watched": 0.01}, "change_error": {"shapes": 0.0053, "watched": 0.002}}
        for i, reward in ((0, 0.4321), (9, 0.5404), (12, 0.5361))
    ],
    "config": {"model": "tiny", "family": "sol_rl", "objective": "nft", "reward": "shapes", "seed": 42},
    "versions": {"solrl_lightning": "0.1.0", "torch": "2.15.0"},
    "machine": {"device": "NVIDIA H100", "devices": 1, "cores": 16, "threads": 8},
    "paths": {"run": "/runs/one"},
}
BRANCH = dict(evaluations=[FACTS["evaluations"][0] | {"iteration": 3}, *FACTS["evaluations"][1:]], best_reward=0.4)
HISTORY = [
    {"iteration": i, "train/loss": 3.0 - i, "lr": 1e-3, "reward/mean": 0.5, "reward/std": 0.2, "time/explore": 3.0}
    | ({"rank/spearman": 0.9 - 0.1 * i, "rank/kendall": 0.7} if i in (1, 3) else {})
    for i in (1, 2, 3, 4)
]


class Nesting(HTMLParser):
    """Checks that every element is closed in the order in which it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(folder: Path, changes: dict[str, Any] | None = None, history: Any = HISTORY) -> str:
    text = render(run_page(FACTS | (changes or {}), history, folder)).decode()
    reader = Nesting()
    reader.feed(text)
    assert reader.open == []
    return text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    for name in ("grid_000006", "grid_000012", "pool_000012"):
        Image.new("RGB", (8, 8), "red").save(tmp_path / "samples" / f"{name}.png")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- reward=[shapes,watched]\n- seed=42\n")
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 42 # <script>\n")
    return tmp_path


def test_every_rank_tag_has_a_chart_and_those_of_probes_a_row() -> None:
    probed = [f"rank/{name}" for name in NAMES]
    others = ["rank/kept_spearman", "rank/kept_kendall"]
    section = rank_section([{"iteration": i} | dict.fromkeys([*probed, *others], 0.5) for i in (1, 2)])
    assert sorted(label for chart in section.charts for label, *_ in chart.legend) == sorted([*probed, *others])
    assert [row[0] for row in section.tables[0].rows] == probed
    assert not rank_section([{"iteration": 1}]).charts


def test_a_probe_without_an_order_is_not_replaced_by_another_one() -> None:
    values = (math.nan, 0.9, 0.5, math.nan)
    section = rank_section([{"iteration": i, "rank/spearman": value} for i, value in enumerate(values)])
    assert section.tables[0].rows == [["rank/spearman", "-", "-", "0.70 ± 0.20"]]


def test_the_page_has_the_results_with_their_errors_and_where_they_come_from(run: Path) -> None:
    without = re.sub(r"<(style|svg).*?</\1>", "", page(run), flags=re.DOTALL)
    seen = " ".join(re.sub(r"<[^>]*>", " ", without).split())
    for text in (
        "completed 12 iterations in 89 s. The shapes reward on held-out prompts changed from 0.4321 to 0.5361",
        "(+0.1040 ± 0.0053)",
        "Selection does not pay here: an iteration learns 1.38 times as much as without it (estimated from 4 probes)",
        "and takes 2.19 times as long.",
        "Means over the scores of 512 images: 64 held-out prompts, 8 images each.",
        "How much the pictures of a prompt differ",
        "best evaluation 0.5404 iteration 9",
        "9 45.0 900 0.540 ± 0.018 +0.1083 ± 0.0053",
        "watched 0: watched, not trained on 0.750 ± 0.010 0.700 ± 0.010 -0.0500 ± 0.0020",
        "rank/spearman 0.800 0.600 0.70 ± 0.10",
        "explore 36.2 40 % 3.008 3.000 to 3.000",
        "python -m solrl_lightning &#39;reward=[shapes,watched]&#39; seed=42",
        "device NVIDIA H100",
        "torch 2.15.0",
        "same noise, after iteration 12",
        "train/loss",
    ):
        assert text in seen
    assert re.search(r"solrl_lightning [\d.]+, \d{4}-\d\d-\d\d \d\d:\d\d UTC, /", seen)


def test_the_command_can_be_pasted_with_its_folders_and_modules(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "lib").mkdir()
    (run / "lib" / "mine.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"/nowhere:{run / 'lib'}")
    (run / ".hydra" / "overrides.yaml").write_text("- prompts_per_iteration=${family.keep}\n- seed=42\n")
    (run / ".hydra" / "config.yaml").write_text("reward: {redness: {_target_: mine.Redness}}\n")
    (run / ".hydra" / "hydra.yaml").write_text(
        "hydra:\n"
        "  overrides: {hydra: ['hydra.run.dir=runs/${seed}', hydra.mode=RUN]}\n"
        "  runtime:\n"
        "    cwd: /my work\n"
        "    config_sources: [{path: solrl_lightning.conf, schema: pkg, provider: main},"
        " {path: mine, schema: file, provider: command-line}]\n"
    )
    assert recorded_command(run / ".hydra") == (
        f"cd '/my work'\nPYTHONPATH={run / 'lib'} python -m solrl_lightning '--config-dir=/my work/mine' "
        "'prompts_per_iteration=${family.keep}' seed=42 'hydra.run.dir=runs/${seed}'"
    )


LESS = {"best_monitor": "noise", "other_rewards": {"noise": {"weight": -1.0, "base": 0.25, "final": 0.2}}}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"final_reward": None, "improvement": None}, "was 0.4321 before training, and not evaluated after."),
        ({"best_reward": 0.4}, "iteration 9, below 0.4321 before training"),
        (BRANCH, "iteration 9, below 0.4321 at iteration 3"),
        (LESS | {"best_reward": 0.3}, "iteration 9, above 0.2500 before training"),
        (LESS | {"best_reward": 0.2}, "iteration 9<"),
        (BRANCH, "± 0.0182, iteration 3"),
        (BRANCH, "after iteration 3, where these evaluations begin"),
    ],
)
def test_a_run_that_ends_early_or_below_its_base_says_so(run: Path, changes: dict[str, Any], text: str) -> None:
    assert text in page(run, changes)


@pytest.mark.parametrize(
    ("gain", "cost", "verdict"),
    [(1.6, 1.2, "selection pays here"), (1.2, 1.6, "selection does not pay here"), (1.4, 1.2, "is about level here")],
)
def test_selection_pays_if_the_gain_is_clearly_above_the_cost(gain: float, cost: float, verdict: str) -> None:
    assert verdict in selection_text({"selection": {"gain": gain, "cost": cost, "probes": 1}})


def test_stages_that_the_family_does_not_have_are_left_out() -> None:
    kept = {"requantize": {"total": 0.1, "median": 0.01}, "evaluate": {"total": 1.0, "median": None}}
    assert shown_stages({"seconds_per_stage": {"explore": {"total": 0.0, "median": 0.0}} | kept}) == kept


def test_text_from_outside_is_escaped_and_nothing_is_loaded(run: Path) -> None:
    text = page(run, {"status": "failed", "error": "ValueError: <img src=x>"})
    assert "It fell &lt;b&gt;much&lt;/b&gt;." in text and "What usually helps: lower lr &amp; wait." in text
    assert "&lt;img src=x&gt;" in text and "&lt;script&gt;" in text
    assert "<script" not in text and "since iteration 6" in text
    assert set(re.findall(r'(?:src|href)="(?!#)(.{5})', text)) <= {"data:"}
    assert "no file caf\\udce9" in page(run, {"error": "OSError: no file " + os.fsdecode(b"caf\xe9")})


def test_a_run_without_results_has_a_page(tmp_path: Path) -> None:
    nothing = dict.fromkeys([*CHANGE, *BEST]) | {"alarms": [], "evaluations": [], "status": "interrupted"}
    nothing |= {"other_rewards": {}, "seconds_per_stage": {}}
    text = page(tmp_path, nothing, [])
    assert "interrupted" in text and "was not evaluated" in text
    assert "Alarms" not in text and "Pictures" not in text


@pytest.mark.parametrize("guarded", [True, False])
def test_a_run_without_alarms_says_so_where_something_has_watched(run: Path, guarded: bool) -> None:
    assert ("No alarm was raised." in page(run, {"alarms": [], "guarded": guarded})) == guarded


def test_values_that_are_not_finite_are_left_out_of_a_curve() -> None:
    values = (1.0, float("nan"), 2.0, float("inf"))
    history = [{"iteration": i, "train/loss": value} for i, value in enumerate(values)]
    assert history_chart(history, "train/loss") == history_chart([history[0], history[2]], "train/loss")


def test_diversity_has_a_curve_where_it_was_measured() -> None:
    titles = [chart.title for chart in held_out_section(FACTS).charts]
    single = [row | {"statistics": {"edges": 0.1}} for row in FACTS["evaluations"]]
    assert (
        [chart.title for chart in held_out_section(FACTS | {"evaluations": single}).charts]
        == [title for title in titles if title != "diversity"]
        != titles
    )


def test_errors_of_an_evaluation_are_those_of_means_over_prompts() -> None:
    base = torch.tensor([[0.1, 1.0], [0.3, 1.0], [0.5, 1.0], [0.9, 1.0]], dtype=torch.float64)
    actual = evaluation_errors(["a", "b"], base + torch.tensor([[0.2, 0.0]]), base)
    assert actual["standard_error"] == pytest.approx({"a": np.std([0.1, 0.3, 0.5, 0.9], ddof=1) / 2, "b": 0.0})
    assert actual["change_error"] == pytest.approx({"a": 0.0, "b": 0.0}, abs=1e-8)
    assert "change_error" not in evaluation_errors(["a", "b"], base, base[:3])
    half = base.clone()
    half[1:, 1] = torch.nan  # of another reward
    assert evaluation_errors(["a", "b"], half, None)["standard_error"] == {"a": actual["standard_error"]["a"]}
    assert evaluation_errors(["a", "b"], base[:1], base[:1]) == {}


def test_a_large_picture_is_embedded_as_jpeg(tmp_path: Path) -> None:
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    Image.new("RGB", (8, 8)).save(small)
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(large)
    assert data_uri(small).startswith("data:image/png;base64,")
    assert data_uri(large).startswith("data:image/jpeg;base64,")
    assert len(data_uri(large)) < large.stat().st_size


def test_parts_of_a_reward_are_those_of_the_first_and_the_last_evaluation() -> None:
    rows = [{"iteration": i, "parts": {"shapes_all_right": 0.2 * i, "ocr_letters": 1.0}} for i in range(3)]
    facts = {"reward": "shapes", "evaluations": [*rows, {"iteration": 3}]}
    assert parts_learned(facts) == [("all_right", 0.0, 0.4), ("ocr_letters", 1.0, 1.0)]
    assert parts_learned({"reward": "shapes", "evaluations": [{"iteration": 0}]}) == []
    assert parts_learned(facts | {"evaluations": facts["evaluations"][:1]}) == []
    undefined = [row | {"parts": {"shapes_box": i or None}} for i, row in enumerate(FACTS["evaluations"])]
    assert re.search(
        "box</t[hd]><td[^>]*>-</td><td[^>]*>2.00<",
        render(run_page(FACTS | {"evaluations": undefined}, HISTORY, Path())).decode(),
    )
