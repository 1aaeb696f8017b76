"""The audit of proxies against BF16 at full steps."""

import json
import math
import re
import shlex
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from sigmas import uniform_sigmas
from torch import Tensor

from solrl_lightning.build import build_objective, with_option
from solrl_lightning.errors import NonFiniteError
from solrl_lightning.metrics.selection_gain import GAIN_ERROR, GAIN_EXPONENT, gap_of_prompts
from solrl_lightning.options.family import Exploration
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Audit
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rollout.stage import velocities_per_prompt
from solrl_lightning.tasks import audit as audit_module
from solrl_lightning.tasks.audit import _stages, audit, command_of, command_without_selection, load_pool
from solrl_lightning.tasks.audit_search import EarlyStop, cheapest
from solrl_lightning.tasks.audit_verdict import Gain, expected_gain, judge, recommend, with_verdict

Compose = Callable[..., Run]

SIZES = ("task.prompts=2", "task.pool=8", "task.keep=4", "model.full_steps=2", "task.search=false")
SMALL = ("task=audit", "experiment=smoke", "trainer=cpu", *SIZES)
PERFECT = {"top_overlap": 1, "bottom_overlap": 1, "top_mean_rank": 1.5, "bottom_mean_rank": 7.5}
PERFECT |= {"spearman": pytest.approx(1.0), "kendall": pytest.approx(1.0)}


def test_what_is_audited_has_the_lora_that_a_run_begins_with(compose: Compose, tmp_path: Path) -> None:
    small = (*SMALL, "task.proxies=[{sampler:merged,steps:2}]")
    base = load_pool(compose(*small), ())[0]
    state = {name: value + 0.1 for name, value in base.policy_state("default").items()}
    base.transformers.trained.save(base.model, tmp_path, state)
    module = load_pool(compose(*small, f"model.init_lora='{tmp_path}'"), ("merged",))[0]
    for name in ("default", "old"):
        assert all(torch.allclose(value, state[key]) for key, value in module.policy_state(name).items())


def test_pool_is_that_of_the_family_if_it_leaves_a_choice(compose: Compose) -> None:
    expected = {"seed=1": 96, "family.pool=48": 48, "family=diffusionnft": 96, "task.pool=40": 40}
    assert {each: compose("task=audit", each).task_as(Audit).pool for each in expected} == expected


def test_race_is_ranked_by_the_latest_rungs_and_timed_a_candidate(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit_module, "time", SimpleNamespace(perf_counter=count().__next__))  # a second per reading
    monkeypatch.setattr(audit_module, "seconds_without_selection", lambda cfg, device: (0.25, 0.75))
    race = "{sampler:merged,steps:3,rungs:[{step:1,keep:6},{step:2,keep:4}]}"
    prefix = "{sampler:merged,steps:3,stop_after:1}"
    result = audit(compose(*SMALL, "task.keep=4", f"task.proxies=[{race},{prefix}]"))
    raced, stopped = result["proxies"]
    assert (raced["name"], raced["evaluations"]) == ("bf16 1/2 of 3 steps (1.00/0.67)", 8 * 1 + 6 * 1)
    assert raced["reward"] == pytest.approx(stopped["reward"])  # of the first rung, in another order
    assert raced["spearman"] != stopped["spearman"]
    # Every stage takes a second, for the 8 candidates of both prompts.
    assert (raced["seconds"], raced["regenerate_seconds"]) == (2 / 16, 1 / 16)
    assert (stopped["seconds"], stopped["regenerate_seconds"]) == (1 / 16, 1 / 16)
    assert result["truth"]["seconds"] == 1 / 16
    without, costs = 0.25 + 0.75, [each["cost"] for each in (raced, stopped, result["truth"])]
    assert result["without_selection"]["iteration_seconds"] == without
    assert costs == pytest.approx([(8 * seconds + 0.75) / without for seconds in (3 / 16, 2 / 16, 1 / 16)])
    for row in (raced, stopped):
        assert row["gain"]["mean"] == pytest.approx(row["spread_ratio"] ** GAIN_EXPONENT)
        assert row["gain_per_cost"]["low"] == pytest.approx(row["gain"]["low"] / row["cost"])
    out = capfd.readouterr().out
    assert re.search(r"bf16 1/2 of 3 steps .* ± \d+ % +14[+]8 +1[.]5 .* +2[.]25 +0[.]\d\d \[0.*\]\n", out)
    assert re.search(r"\n  4 random +- +- +8 +0[.]25( +1[.]00){4}\n", out)


def test_prompts_of_training_are_scored_before_the_pools(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt without a score ends the audit before an hour of scoring, not after it."""

    def no_score(cfg: Run, device: torch.device) -> None:
        raise NonFiniteError("no score", 0)

    monkeypatch.setattr(audit_module, "seconds_without_selection", no_score)
    monkeypatch.setattr(audit_module, "score_pool", lambda *args, **kw: pytest.fail("a pool was scored"))
    with pytest.raises(NonFiniteError):
        audit(compose(*SMALL, "task.proxies=[{sampler:merged,steps:2}]"))


class Equal(Reward):
    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return torch.zeros(len(prompts))


def test_equal_rewards_have_no_fidelity_no_early_stops_and_no_verdict(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit_module, "seconds_without_selection", lambda cfg, device: (0.25, 0.75))
    equal = (f"reward.shapes._target_={__name__}.Equal", "task.proxies=[{sampler:merged,steps:3}]")
    result = audit(compose(*SMALL, "model.full_steps=5", "task.search=true", *equal))
    out = capfd.readouterr().out
    assert re.search(r"\n  the truth itself +- +- +40 +", out) and "1.000" not in out
    assert result["search"] == [] and "family=prefix" not in out and "family=race" not in out
    assert "no verdict: all rewards of a prompt are equal" in out


def test_search_gives_the_numbers_of_the_proxies_that_it_names(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit_module, "seconds_without_selection", lambda cfg, device: (0.25, 0.75))
    stops = ["stop_below:0.8", "stop_after:3", "stop_below:0.4"]
    stops += ["rungs:[{below:0.8,keep:6},{below:0.6,keep:4}]", "rungs:[{below:0.6,keep:5},{step:4,keep:4}]"]
    proxies = ",".join(f"{{sampler:merged,steps:5,{stop}}}" for stop in stops)
    sizes = ("model.full_steps=5", "model.explore_decoder=full", "task.min_gap=0.05")
    result = audit(compose(*SMALL, *sizes, "task.search=true", f"task.proxies=[{proxies}]"))
    names = ["2 of 5 steps (0.80)", "3 of 5 steps (0.60)", "4 of 5 steps (0.40)"]
    names += ["2/3 of 5 steps (0.80/0.60)", "3/4 of 5 steps (0.60/0.40)"]
    rows = {(row["name"], row["keep"][0]): row for row in result["search"]}
    assert len(rows) == len(result["search"]) == 3 + 3 * 2  # 5 or 6 of 8 candidates pass the first rung
    for proxy, name, first in zip(result["proxies"], names, (4, 4, 4, 6, 5), strict=True):
        row = rows[name, first]
        assert proxy["name"] == f"bf16 {name}"
        assert row["evaluations"] == proxy["evaluations"] + proxy["regenerate_evaluations"]
        # Products of another number of rows may round otherwise, which can swap candidates of nearly equal rewards.
        assert row["gap_kept"] == pytest.approx(proxy["gap_kept"], abs=0.01)
    assert len({round(row["gap_kept"], 6) for row in rows.values()}) > 1
    costs = [row["evaluations"] for row in result["search"]]
    assert costs == sorted(costs)
    chosen = [row for row in result["search"] if row["command"] is not None]
    assert {row["family"] for row in chosen} == {"prefix", "race"}
    out = capfd.readouterr().out
    for row in chosen:
        enough = [
            other
            for other in result["search"]
            if other["gap_kept"] + other["gap_error"] >= 0.05 and other["family"] == row["family"]
        ]
        assert row == enough[0] and f"{row['name']}" in out and row["command"] in out
        run = compose(*shlex.split(row["command"])[3:])
        stages = run.family.stages(uniform_sigmas, build_objective(run.objective).solver)
        assert run.family.pool == 8 and sum(velocities_per_prompt(stages, 8)) == row["evaluations"]
        assert [stage.keep for stage in stages[:-1]] == row["keep"]


def test_without_enough_of_the_gap_the_search_names_the_early_stop_that_keeps_most() -> None:
    explorer = Exploration(sampler="merged", steps=5)
    rows = [(10, 0.5), (20, 0.8), (30, 0.7), (40, 0.9)]
    stops = [EarlyStop(explorer, "", [4], velocities, share, math.nan) for velocities, share in rows]
    assert [cheapest(stops, "prefix", least).velocities for least in (0.4, 0.6, 0.95)] == [10, 20, 40]  # type: ignore[union-attr]
    within = [stop._replace(gap_error=0.02) for stop in stops]
    assert [cheapest(within, "prefix", least).velocities for least in (0.51, 0.53, 0.82)] == [10, 20, 20]  # type: ignore[union-attr]
    assert cheapest(stops, "race", 0.5) is None


def test_reference_as_its_own_proxy_is_perfect_and_each_proxy_has_its_precision(
    compose: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    same = "{sampler:merged,steps:2},{sampler:shadow,precision:bf16,steps:2}"
    others = "{sampler:shadow,steps:2},{sampler:merged,steps:2,stop_after:1},{sampler:merged,steps:3,solver:dpm2}"
    listed = "{sampler:shadow,precision:nvfp4,steps:2}"  # what precision=auto is here
    result = audit(compose(*SMALL, f"task.proxies=[{same},{others},{listed}]"))
    names = ["bf16 2 steps", "nvfp4 2 steps", "bf16 1 of 2 steps (1.00)", "bf16 3 steps dpm2", "bf16 2 steps"]
    assert [proxy["name"] for proxy in result["proxies"]] == names  # in the order of their precisions
    itself, quantised, prefix, other, unquantised = result["proxies"]
    assert (result["prompts"], result["pool"], result["truth"]["steps"]) == (2, 8, 2)
    assert (quantised["precision"], itself["precision"], unquantised["precision"]) == ("nvfp4", "bf16", "bf16")
    for proxy in (itself, unquantised):
        assert {name: proxy[name] for name in PERFECT} == PERFECT
        assert proxy["reward"] == result["truth"]["reward"]
        assert proxy["gap"] == result["truth"]["gap"] > 0
        assert (proxy["spread_ratio"], proxy["gap_error"]) == (result["truth"]["spread_ratio"], 0)
    for proxy in (quantised, prefix, other):
        assert proxy["reward"] != result["truth"]["reward"]
        assert proxy["gap_kept"] == pytest.approx(proxy["gap"] / result["truth"]["gap"])
    assert len({proxy["gap"] for proxy in result["proxies"]}) > 1
    assert [proxy["evaluations"] for proxy in result["proxies"]] == [16, 16, 8, 24, 16]
    assert quantised["backend"].startswith("nvfp4")
    assert [proxy["regenerate_evaluations"] for proxy in result["proxies"]] == [8, 8, 4, 8, 8]
    assert all(proxy["seconds"] > 0 and proxy["regenerate_seconds"] > 0 for proxy in result["proxies"])
    assert json.loads((tmp_path / "audit.json").read_text()) == result
    out = capfd.readouterr().out
    assert "nvfp4 2 steps" in out and "bf16 1 of 2 steps (1.00)" in out
    assert all(result["without_selection"][f"{name}_seconds"] > 0 for name in ("sampling", "training"))  # measured
    assert result["recommended"]["command"] in out
    report = out[out.index("against BF16") :].splitlines()
    assert len(report) <= 25
    assert all(len(line) <= 110 for line in report if "audit.json" not in line and "python -m" not in line)
    with Image.open(tmp_path / "audit.png") as picture:
        assert min(picture.size) > 300


@pytest.mark.parametrize(
    ("proxy", "family"),
    [
        ("sampler:shadow,steps:6", "sol_rl"),
        ("sampler:shadow,steps:4,precision:fp8,decoder:preview", "sol_rl"),
        ("sampler:merged,steps:6,solver:dpm2", "sol_rl"),
        ("sampler:merged,steps:10,stop_after:3", "prefix"),
        ("sampler:shadow,steps:6,stop_after:3", "prefix"),
        ("sampler:merged,steps:10,stop_below:0.7", "prefix"),
        ("sampler:merged,steps:10,rungs:[{below:0.8,keep:48},{step:5,keep:24}]", "race"),
        ("sampler:merged,steps:10,rungs:[{step:3,keep:48},{step:5,keep:24}]", "race"),
        ("sampler:shadow,steps:6,rungs:[{step:2,keep:30},{step:6,keep:24}]", "race"),
        ("sampler:merged,steps:10", None),
        ("sampler:merged,steps:6,stop_after:3", None),
        ("sampler:merged,steps:10,rungs:[{step:3,keep:48},{step:10,keep:24}]", None),
    ],
)
def test_command_explores_and_regenerates_as_the_audit_did(compose: Compose, proxy: str, family: str | None) -> None:
    options = ("model.preview_decoder=tiny", "trainer.deterministic=true", "prompts_per_iteration=3")
    options += ("family.compile=false", "family.explore.steps=3")
    cfg = compose("task=audit", *options, f"task.proxies=[{{{proxy}}}]")
    explorer = cfg.task.proxies[0]
    stages = _stages("task.proxies.0", explorer, cfg, uniform_sigmas)
    written = command_of(explorer, explorer.precision or "nvfp4", cfg)
    if family is None or written is None:
        assert written is None and family is None
        return
    program, *arguments = shlex.split(written)[2:]
    run = compose(*arguments)
    assert program == "solrl_lightning" and f"family={family}" in arguments
    explored = [stage.but(name="explore") for stage in stages[:-1]]
    assert run.family.stages(uniform_sigmas, build_objective(run.objective).solver) == explored + stages[-1:]
    named = explorer.precision or "nvfp4" if stages[0].sampler == "shadow" else "auto"
    assert (run.family.pool, run.family.keep, run.precision.name) == (96, 24, named)
    assert (run.family.compile, run.trainer["deterministic"], run.prompts_per_iteration) == (False, True, 3)


def test_command_has_options_that_the_file_of_its_family_leaves_out(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_decoder(cfg: Run, group: str, option: str) -> Run:
        node = with_option(cfg, group, option).family.model_dump(exclude_unset=True)
        del node["explore"]["decoder"]
        return cfg.with_group(group, node)

    monkeypatch.setattr(audit_module, "with_option", without_decoder)
    cfg = compose("task=audit", "model.preview_decoder=tiny", "task.proxies=[{sampler:shadow,steps:6,decoder:preview}]")
    assert "family.explore.decoder=preview" in str(command_of(cfg.task.proxies[0], "nvfp4", cfg))


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ([], "family=diffusionnft"),
        (
            ["task.keep=12", "objective.beta=0.5"],
            "family=diffusionnft family.pool=12 family.keep=12 objective.beta=0.5",
        ),
        (["experiment=fast"], "family=diffusionnft family.pool=24 family.keep=24 experiment=fast"),
    ],
)
def test_command_without_selection_trains_on_all_that_it_samples(
    compose: Compose, options: list[str], arguments: str
) -> None:
    cfg = compose("task=audit", *options)
    program, *words = shlex.split(command_without_selection(cfg))[2:]
    assert (program, " ".join(words)) == ("solrl_lightning", arguments)
    family = compose(*words).family
    assert (family.pool, family.keep, family.explore) == (cfg.task.keep, cfg.task.keep, None)
    more = shlex.split(command_without_selection(compose("task=audit", *options, "iterations=10"), gain=1.31))[3:]
    assert more == [*words, "iterations=14"]


def verdict_row(
    name: str, ratio: float, seconds: float, evaluations: int, command: str | None = "run", error: float = 0.01
) -> dict[str, Any]:
    gain = Gain(ratio, error, ratio - 2 * error, ratio + 2 * error)
    costs = {"evaluations": evaluations, "regenerate_evaluations": 9}
    return with_verdict({"name": name, "command": command} | costs, 1.5, gain.times(seconds), seconds, 1)


def test_recommended_is_the_cheapest_of_those_with_the_largest_gain_at_equal_cost() -> None:
    rows = [
        verdict_row("cheap", 1.1, 0.5, 1),
        verdict_row("best", 1.2, 2.0, 10),
        verdict_row("within its error", 1.192, 1.0, 30),
        verdict_row("as fast with fewer passes", 1.191, 1.01, 20),
        verdict_row("no family", 2.0, 0.1, 1, None),
        verdict_row("no gain", math.nan, 0.1, 1),
    ]

    def name(*left_out: int) -> str:
        row = recommend([row for number, row in enumerate(rows) if number not in left_out])
        assert row is not None
        return str(row["name"])

    assert (name(), name(3), name(2, 3)) == ("as fast with fewer passes", "within its error", "best")
    assert recommend(rows[-2:]) is None
    assert recommend([verdict_row("one prompt", 1.2, 1, 1, error=math.nan)]) is not None


@pytest.mark.parametrize(
    ("ratio", "error", "pays", "words"),
    [
        (1.3, 0.1, True, "selection pays: with p an iteration learns 2.60 times as much (estimated) and takes 2.00"),
        (0.7, 0.1, False, "selection does not pay: "),
        (1.1, 0.1, False, "includes 1; a run of each tells; without it 2.20 times"),
        (0.9, 0.2, False, "task.prompts=48 narrows the interval; without it 1.80 times the iterations learn as much"),
        (1.3, math.nan, False, "not distinguishable: "),
    ],
)
def test_verdict_is_by_the_interval_of_gain_by_cost(ratio: float, error: float, pays: bool, words: str) -> None:
    row = verdict_row("p", ratio, 2, 1, error=error)
    result, sentence = judge(row, 12, equal=False)
    assert result == pays and words in sentence
    assert judge(row, 12, equal=True)[0] is judge(None, 12, equal=False)[0] is False


def test_expected_gain_is_a_power_of_the_spread_with_an_interval_over_prompts() -> None:
    truth = torch.randn(4000, 96, generator=torch.Generator().manual_seed(0))
    rho, gain = expected_gain(truth, truth, 24)
    assert rho == pytest.approx(1.72, rel=0.01) and gain.mean == pytest.approx(rho**GAIN_EXPONENT)
    # The error is that of the mean of independent groups of prompts.
    logs = [math.log(expected_gain(row, row, 24)[1].mean) for row in truth.split(20)]
    assert gain.error / gain.mean == pytest.approx(torch.tensor(logs).std().item() / math.sqrt(len(logs)), rel=0.15)
    reach = math.hypot(1.9606 * gain.error / gain.mean, 2 * GAIN_ERROR)
    assert math.log(gain.high / gain.mean) == pytest.approx(reach, rel=1e-3)
    single, unknown = expected_gain(truth[:1], truth[:1], 24)
    assert single > 1 and math.isnan(unknown.low) and unknown.mean > 1
    equal, nothing = expected_gain(torch.ones(3, 8), torch.ones(3, 8), 4)
    assert math.isnan(equal) and math.isnan(nothing.mean)


def test_gap_is_between_the_reference_rewards_of_the_proxys_best_and_worst() -> None:
    truth = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    assert gap_of_prompts(truth, truth, keep=4).tolist() == [4.5 - 0.5]
    assert gap_of_prompts(-truth, truth, keep=4).tolist() == [0.5 - 4.5]
    assert gap_of_prompts(torch.tensor([[5.0, 1.0, 2.0, 3.0, 4.0, 0.0]]), truth, keep=2).tolist() == [0.0 - 5.0]
