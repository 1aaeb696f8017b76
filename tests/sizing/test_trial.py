"""Rows about a run: memory, files, rewards, and iterations in small."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reward_servers import free_port

from solrl_lightning.artifacts.tables import OK, WRONG
from solrl_lightning.data.prompts import read_prompt_sets
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.quantization import resolve
from solrl_lightning.rewards.geneval_metadata import broken_rule
from solrl_lightning.sizing import trial
from solrl_lightning.sizing.footprint import OPTIONS, Footprint, Latents
from solrl_lightning.sizing.plan import Plan, plan_run, without_files
from solrl_lightning.sizing.trial import footprint_here, judge_memory, run_files, smoke_config

Compose = Callable[..., Run]
CPU = torch.device("cpu")


def test_plan_that_does_not_fit_is_wrong_and_names_options_that_fit() -> None:
    parts = dict(shadow=40, others=0, text_encoders=30, sampling=0, decoding=0)
    footprint = Footprint(
        policy={"bfloat16": 100, "int8": 50, "nf4": 25},
        training={False: 5, "selective": 4, True: 1},
        latents=dict.fromkeys((None, "prefix"), Latents(0, 0, 0)),
        **parts,
    )
    options = dict(zip(OPTIONS, (None, "bfloat16", "device", False, 12, 1, 1), strict=True))
    named = {"policy": 100, "shadow_here": 40, "shadow_packed": 90, "training": 60, "text_encoders": 30}
    rows = {total: judge_memory(footprint, options, total, named) for total in (200, 199, 170, 20)}
    assert [row.status for row in rows.values()] == [OK, WRONG, WRONG, WRONG]
    assert "shadow_packed" not in rows[199].result
    assert rows[199].way_out == rows[170].way_out == "model.micro_batch=6"
    assert "smaller model" in rows[20].way_out
    assert rows[199].measured is not None
    assert (rows[199].measured["planned"], rows[199].measured["total"]) == (200, 199)


def test_random_weights_need_no_text_encoders_and_a_cpu_keeps_them(embedded_plan: Plan) -> None:
    encoders, others = embedded_plan.footprint.text_encoders, embedded_plan.footprint.others
    for weights, on_gpu, kept, moved in (
        ("pretrained", True, encoders, 0),
        ("pretrained", False, 0, encoders),
        ("random", True, 0, 0),
        ("random", False, 0, 0),
    ):
        footprint = footprint_here(embedded_plan, weights, on_gpu)
        assert encoders > 0 and (footprint.text_encoders, footprint.others - others) == (kept, moved)


def test_iterations_fill_one_batch_of_the_rollout_and_one_of_the_training(compose: Compose) -> None:
    sizes = {"tiny": (1, 96, 24, 1), "flux1": (1, 24, 4, 1)}  # 24 x 2 and 4 x 4 noise levels
    for model, expected in sizes.items():
        smoke = smoke_config(compose("task=doctor", f"model={model}", "model.weights=random"), 2)
        assert (smoke.prompts_per_iteration, smoke.family.pool, smoke.family.keep, smoke.task.repeats) == expected
        assert smoke.data.train == "shapes-train"


def test_iterations_use_a_prompt_that_the_reward_can_score(compose: Compose, tmp_path: Path) -> None:
    smoke = smoke_config(compose("task=doctor", "reward=[shapes,geneval]", f"run_dir={tmp_path}"), 2)
    prompts = read_prompt_sets(smoke.data.train, None)
    assert [broken_rule(prompt.metadata) for prompt in prompts.train] == [""]
    (row,) = trial.check_rewards(compose("task=doctor", "reward=ocr"), CPU)
    assert row.status == OK and "ocr 0" in row.result  # of noise
    file = tmp_path / "mine.csv"
    file.write_text("text,level\na dark street,0.2\n")
    smoke = smoke_config(compose("task=doctor", "reward=[shapes,geneval]", f"data.train={file}", "data.column=text"), 2)
    assert [prompt.text for prompt in read_prompt_sets(smoke.data.train, None, smoke.data.column).train] == [
        "a dark street"
    ]


def test_a_reward_server_that_is_away_is_an_error_at_once_with_its_key(compose: Compose) -> None:
    url = f"http://127.0.0.1:{free_port()}/score"
    with pytest.raises(UserError, match="reward.http.url"):
        list(trial.check_rewards(compose("task=doctor", "reward=http", f"reward.http.url={url}"), CPU))


def test_iterations_are_timed_by_stage(compose: Compose) -> None:
    cfg = compose("task=doctor", "experiment=smoke", "trainer=cpu", "model.full_steps=2", "model.preview_steps=1")
    run = plan_run(without_files(cfg), resolve("nvfp4", "emulated", CPU))
    (row,) = trial.check_iterations(cfg, run, CPU, count=1)
    assert row.status == OK and row.measured is not None
    (lap,) = row.measured["laps"]
    assert {"requantize", "explore", "regenerate", "train"} <= lap["stages"].keys()
    assert sum(lap["stages"].values()) <= lap["seconds"]
    assert row.measured["peak_memory"]["bytes"] > 0 and row.measured["planned"] > 0


def test_random_weights_and_the_embedded_model_need_no_files(compose: Compose) -> None:
    assert run_files(compose("task=doctor")) == {}
    assert run_files(compose("task=doctor", "model=flux1", "model.weights=random")) == {}
    flux = compose("task=doctor", "model=flux1", "reward=pickscore", "reward.pretrained=mine/own")
    assert run_files(flux) == {"model.pretrained": "black-forest-labs/FLUX.1-dev"} | flux.reward.files
    assert flux.reward.files["reward.pretrained"] == "mine/own"
    assert "reward.pickscore.processor" in flux.reward.files
    mine = compose("+reward.mine={_target_:mine.Reward,weight:1,head:{_target_:a.Head},pretrained:null,detector:a/b}")
    assert mine.reward.files == {"reward.mine.detector": "a/b"}  # of the names of files, what is a text
