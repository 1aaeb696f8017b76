"""Mistakes that are found before libraries are loaded, processes are started or weights are read."""

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from solrl_lightning.cli.checks import check_kinds, check_needs, check_prompts, check_values
from solrl_lightning.cli.config import ConfigTree, check_names
from solrl_lightning.errors import UserError
from solrl_lightning.rewards.addresses import TOKEN

Command = Callable[..., Any]
Compose = Callable[..., DictConfig]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward=http"], "reward=http is invalid with task=serve"),
        (["task.host=0.0.0.0"], "task.host=0.0.0.0 is invalid without a token: other machines can reach it"),
        (["task.host=no.such.name.invalid"], "task.host=no.such.name.invalid is invalid: it must be .* resolves to"),
        (["task.host=192.0.2.1"], "task.host=192.0.2.1 is invalid: .* Cannot assign requested address. Use task.host="),
    ],
)
def test_server_that_cannot_start_is_an_error(compose: Compose, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_needs(compose("task=serve", *arguments))


def test_port_in_use_is_an_error(compose: Compose, taken: int) -> None:
    with pytest.raises(UserError, match=f"task.port={taken} is invalid: it cannot be listened on: Address already in"):
        check_needs(compose("task=serve", f"task.port={taken}"))


def test_missing_package_names_the_extra(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r'package uvicorn is not installed. Install it with pip install "solrl-'):
        check_needs(compose("task=serve"))


def test_token_that_no_header_can_hold_is_an_error(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "gr\u00fcn")
    for check, arguments in ((check_needs, ["task=serve"]), (check_values, ["reward=http"])):
        with pytest.raises(UserError, match=f"{TOKEN} is invalid: it must be printable ASCII"):
            check(compose(*arguments))


def test_address_of_a_reward_server_is_checked_under_its_key(compose: Compose) -> None:
    with pytest.raises(UserError, match="reward.http.url=ftp://scorer is invalid: it must begin with http:// or "):
        check_values(compose("reward=http", "reward.http.url=ftp://scorer"))
    judge = "+reward.judge={_target_:solrl_lightning.rewards.http.HTTPReward,url:scorer,weight:1.0}"
    with pytest.raises(UserError, match="reward.judge.url=scorer is invalid"):
        check_values(compose(judge))


def test_metadata_of_geneval_are_checked(compose: Compose, tmp_path: Path) -> None:
    rows = [{"prompt": "a dog", "include": [{"class": "dog", "count": 1}]}, {"prompt": "a cat"}]
    for name, row in zip(("good", "bad"), rows, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sources = [f"data.train={tmp_path}/good.jsonl", f"data.eval={tmp_path}/bad.jsonl", "prompts_per_iteration=1"]
    with pytest.raises(UserError, match="the metadata of the prompt 'a cat' are invalid: reward=geneval needs"):
        check_prompts(compose("reward=[shapes,geneval]", *sources))


@pytest.mark.parametrize(
    ("devices", "argument", "message"),
    [
        ("2", "data.eval_prompts=5", "data.eval_prompts=5 is invalid with trainer=fsdp: .* a multiple of 2"),
        ("[0,1]", "prompts_per_iteration=3", "prompts_per_iteration=3 is invalid with trainer=fsdp"),
        ("3", "prompts_per_iteration=6", "data.eval_prompts=64 is invalid .* a multiple of 3"),
    ],
)
def test_unequal_shares_of_ranks_are_an_error(compose: Compose, devices: str, argument: str, message: str) -> None:
    sharded = ["trainer=fsdp", "trainer.accelerator=cpu", f"trainer.devices={devices}"]
    with pytest.raises(UserError, match=message):
        check_prompts(compose(*sharded, argument))
    check_prompts(compose(*sharded, argument, "trainer.devices=1"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optimizer.lr=1e400", "optimizer.lr=inf is invalid: it must be a finite number above 0"),
        ("model.full_steps=0", "model.full_steps=0 is invalid: it must be a whole number from 1 to 1000. Leave it"),
        ("family.explore.steps=1001", "family.explore.steps=1001 is invalid: it must be a whole number from 1 to 1000"),
        ("family.pool=100001", "family.pool=100001 is invalid: it must be a whole number from 1 to 100000"),
        ("data.eval_images=1000000000", "data.eval_images=1000000000 is invalid: it must be a whole number from 1 to"),
        ("model.lora.alpha=1e300", "model.lora.alpha=1e+300 is invalid: it must be a number above 0 and at most 1000"),
        ("optimizer.eps=0", "optimizer.eps=0 is invalid: it must be a finite number of at least 1e-30, as float32"),
        ("optimizer.eps=1e-50", "optimizer.eps=1e-50 is invalid: it must be a finite number of at least 1e-30"),
        ("family.compile=1", "family.compile=1 is invalid: it must be one of true, false, auto"),
        ("compile_training=0.0", "compile_training=0.0 is invalid: it must be one of true, false, auto"),
        ("model.gradient_checkpointing=1", "model.gradient_checkpointing=1 is invalid: it must be one of true, false"),
        ("trainer.devices=0", "trainer.devices=0 is invalid: it must be auto, a number of devices, or a list of their"),
        ("trainer.devices=[0,0]", "trainer.devices=[0, 0] is invalid: it must be auto, a number of devices, or a list"),
        ("trainer.accelerator=tpus", "trainer.accelerator=tpus is invalid: it must be one of auto, cpu, gpu"),
        ("precision.backend=foo", "with precision=auto it must be one of auto, transformer_engine, torch, emulated"),
    ],
)
def test_wrong_value_is_told_under_the_key_that_was_given(compose: Compose, argument: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_values(compose(argument))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", 'A YAML file of your own is invalid: .*family/mine.yaml", line 2, column 2. Correct it.'),
        ("defaults: sol_rl\n", "Invalid defaults list in 'family/mine', defaults must be a list"),
        ("- 8\n", "family=\\[8\\] is invalid: its YAML file must hold keys"),
        ("pool: 8\n", "family.compile is missing: a run needs it. Begin the family's file with `defaults: "),
        ("defaults: [sol_rl, _self_]\nkep: 8\n", "family.kep=8 is invalid: nothing reads .* Did you mean keep"),
        ("defaults: [sol_rl, _self_]\nexplore: {step: 8}\n", "family.explore.step=8 is invalid: .* Did you mean steps"),
    ],
)
def test_file_of_own_that_no_run_can_use_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "mine.yaml").write_text(text)
    with ConfigTree(config_dir=str(tmp_path)) as tree, pytest.raises(UserError, match=message):
        check_kinds(tree, tree.compose(["family=mine"]))


def test_key_of_a_model_that_nothing_reads_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nown: 3\nfull_steps: ${model.own}\n")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        check_kinds(tree, tree.compose(["model=mine", "experiment=smoke"]))  # which overrides full_steps
        with pytest.raises(UserError, match="model.ful_steps=8 is invalid: nothing reads .* Did you mean full_steps?"):
            check_kinds(tree, tree.compose(["model=mine", "+model.ful_steps=8"]))


def test_several_runs_are_a_glob() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="matches all runs, as in 'task.runs=outputs/train/"):
        check_kinds(tree, tree.compose(["task=compare", "task.runs=[a,b]"]))


def test_unknown_callback_is_answered_with_those_there_are() -> None:
    with (
        ConfigTree() as tree,
        pytest.raises(UserError, match="no key callbacks.nope.x. callbacks has timings, .* summ"),
    ):
        check_names(tree, ["callbacks.nope.x=1"])


def test_race_is_small_in_the_smoke_experiment_and_a_rung_of_own_is_kept(compose: Compose) -> None:
    check_values(compose("experiment=smoke", "family=race"))
    with pytest.raises(UserError, match="it must be a list of rungs"):
        check_values(compose("experiment=smoke", "family=race", "family.explore.rungs=[{step:3,keep:48}]"))


def test_help_names_the_options_for_small_gpus(command: Command) -> None:
    text = command("--help").out
    for knob in ("trainer ", "base_weights ", "encode_on "):
        assert f"\n    {knob}" in text or f"\n  {knob}" in text
