"""Costs of another machine."""

import re
from pathlib import Path
from typing import Any

import pytest

from solrl_lightning.errors import UserError
from solrl_lightning.quantization.first_run import first_run
from solrl_lightning.study.elsewhere import TABLES, read_cost, table_of

REPOSITORY = Path(__file__).parents[2]

# 6 prompts, 96 candidates in 6 steps, 24 kept in 10 steps and trained at 4 (flux1) or 6 noise levels.
COUNTS = {"shadow": 6 * 96 * 6, "bf16": 6 * 24 * 10, "image": 6 * 120}


@pytest.mark.parametrize(
    ("table", "levels", "seconds"),
    [
        ("flux1_h100", 4, 206),
        ("flux1_b200", 4, 97),
        ("flux1_paper", 4, 79 + 90),
        ("sd3_h100", 6, 560),
        ("sd3_b200", 6, 381),
        ("sd3_paper", 6, 187 + 240),
        ("sana_h100", 6, 91),
        ("sana_b200", 6, 37),
        ("sana_paper", 6, 46 + 30),
    ],
)
def test_units_sum_to_the_seconds_of_the_iteration_they_are_of(table: str, levels: int, seconds: float) -> None:
    assert TABLES[table].seconds(COUNTS | {"row": 6 * 24 * levels}) == pytest.approx(seconds)
    assert ("30 %" in TABLES[table].source) and ("paper" in TABLES[table].source) == table.endswith("paper")


def test_units_of_flux1_on_an_h100() -> None:
    bf16, shadow, image, row, _ = TABLES["flux1_h100"]
    assert [1000 * unit for unit in (bf16, shadow, image, row)] == pytest.approx([29.2, 20.0, 11.1, 151], rel=0.003)


def test_texts_have_the_numbers_of_the_estimates() -> None:
    ratios = {}
    for name in set(TABLES) - {name for name in TABLES if name.endswith("paper")}:
        table, rows = TABLES[name], 6 * 24 * (4 if name.startswith("flux1") else 6)
        alone = {"bf16": COUNTS["bf16"], "image": 6 * 24, "row": rows}  # without exploration
        ratios[name] = table.seconds(COUNTS | {"row": rows}) / table.seconds(alone)
    words = f"{min(ratios.values()):.1f} to {max(ratios.values()):.1f} times as long"
    for page in ("README.md", "docs/measurements.md"):
        assert words in " ".join((REPOSITORY / page).read_text().split())
    h100, text = TABLES["flux1_h100"], " ".join(str(first_run.__doc__).split())
    prefix = h100.seconds({"bf16": 6 * (96 * 4 + 24 * 6), "image": COUNTS["image"], "row": 576})
    assert f"it takes {h100.shadow / h100.bf16:.1f} in FP8".replace("0.", ".") in text
    assert f"{h100.seconds(COUNTS | {'row': 576}):.0f} s an iteration, {prefix:.0f} with ``prefix``" in text


@pytest.mark.parametrize(
    ("pretrained", "resolution", "capability", "table"),
    [
        ("black-forest-labs/FLUX.1-dev", 512, (9, 0), "flux1_h100"),
        ("/models/FLUX.1-dev", 512, (10, 3), "flux1_b200"),
        ("stabilityai/stable-diffusion-3.5-large", 1024, (9, 0), "sd3_h100"),
        ("Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers", 1024, (10, 0), "sana_b200"),
        ("black-forest-labs/FLUX.1-dev", 1024, (9, 0), None),
        ("black-forest-labs/FLUX.1-schnell", 512, (9, 0), None),
        ("black-forest-labs/FLUX.1-dev", 512, (8, 9), None),
        ("black-forest-labs/FLUX.1-dev", 512, (0, 0), None),  # a CPU
    ],
)
def test_estimates_are_of_the_model_its_size_and_the_gpu(
    pretrained: str, resolution: int, capability: tuple[int, int], table: str | None
) -> None:
    assert table_of(pretrained, resolution, capability) == (table and TABLES[table])


def test_note_says_what_is_measured_and_what_is_simulated() -> None:
    note = "iterations are measured, seconds are simulated: "
    assert read_cost({"explore": 0.25, "train": 2}).note == f"{note}measured seconds with explore x 0.25, train x 2"
    estimate = "flux1 on a H100 with an FP8 shadow, estimates +-30 % (task.cost=flux1_h100)"
    assert read_cost("flux1_h100").note == f"{note}counts of each run's configuration on one GPU, {estimate}"


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ("flux1_a100", "task.cost=flux1_a100 is invalid: it must be the name of a table .flux1_h100, flux1_b200, "),
        ({"explor": 0.5}, "task.cost={explor:0.5} is invalid: .* stages requantize, explore, regenerate, train[.] Use"),
        ({"explore": "fast"}, "finite factors of at least 0 of the stages"),
        ({"explore": -1}, "finite factors of at least 0 of the stages"),
        ({"train": True}, "finite factors of at least 0 of the stages"),
        ({}, "task.cost={} is invalid: it must be the name of a table"),
        (3, "task.cost=3 is invalid: it must be the name of a table"),
    ],
)
def test_unknown_costs_are_errors_of_a_line(cost: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_cost(cost)
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value)
