"""Errors before libraries are loaded, processes are started or weights are read."""

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from solrl_lightning.cli.checks import check_needs, check_paths, check_prompts
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.addresses import HTTP, TOKEN

Compose = Callable[..., Run]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("reward.combine=gdpo", "reward.combine=gdpo is invalid with task=serve"),
        ("reward=http", "reward.http is invalid with task=serve"),
        (f"+reward.sharp={{_target_:{HTTP},url:'http://a',weight:1}}", "reward.sharp is invalid with task=serve"),
        ("task.host=0.0.0.0", "task.host=0.0.0.0 is invalid without a token: other machines can reach it"),
        ("task.host=no.such.name.invalid", "task.host=no.such.name.invalid .* Name or service not known"),
        ("task.host=192.0.2.1", "task.host=192.0.2.1 .* Cannot assign requested address. Set task.port="),
    ],
)
def test_server_that_cannot_start_is_an_error(compose: Compose, argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_needs(compose("task=serve", argument))


def test_explorers_need_ray(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs(compose("explorers=ray"))
    monkeypatch.setitem(sys.modules, "ray", None)
    check_needs(compose())
    with pytest.raises(UserError, match=r"explorers=ray is invalid: the package ray .* 'solrl-lightning\[ray\]',"):
        check_needs(compose("explorers=ray"))


def test_options_of_lightning_in_the_environment_are_an_error(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "1")
    with pytest.raises(UserError, match=r"PL_TRAINER_MAX_STEPS=1 in the environment .* unset PL_TRAINER_MAX_STEPS"):
        check_needs(compose())


def test_folder_without_a_lora_of_a_known_name_has_another_or_one_below(compose: Compose, tmp_path: Path) -> None:
    for name in ("run/lora/pytorch_lora_weights", "hub/turbo", "peft/b/adapter_model", "peft/a/adapter_model"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / f"{name}.safetensors").touch()
    fixes = {"run": f"{tmp_path}/run/lora", "none": "<LoRA>"}
    fixes["hub"] = f"{tmp_path}/hub/turbo.safetensors, if it is a LoRA"
    fixes["peft"] = f"{tmp_path}/peft/a, or model.init_lora={tmp_path}/peft/b"
    for folder, fix in ((tmp_path / name, fix) for name, fix in fixes.items()):
        with pytest.raises(UserError, match=rf"it must be a LoRA file, .*\. Set model.init_lora={fix}\.$"):
            check_paths(compose(f"model.init_lora={folder}"))


def test_lora_file_is_of_safetensors_and_whole(compose: Compose, tmp_path: Path) -> None:
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file({"a": torch.zeros(9)}, file)
    check_paths(compose(f"model.init_lora={tmp_path}"))
    file.write_bytes(file.read_bytes()[:-1])
    files = {file.name: "a file is missing or damaged", "lora.pt": "Save its tensors by safetensors.torch.save_file."}
    files["last.ckpt"] = f"Set ckpt={tmp_path}/last.ckpt, if it is the checkpoint of a run."
    for name, fix in files.items():
        if name != file.name:
            torch.save({}, tmp_path / name)
        with pytest.raises(UserError, match=f"^model.init_lora={tmp_path}/{name} is invalid: .*{fix}"):
            check_paths(compose(f"model.init_lora={tmp_path / name}"))


def test_port_in_use_is_an_error(compose: Compose) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"task.port={port} is invalid: it cannot be listened on: Address already"):
            check_needs(compose("task=serve", f"task.port={port}"))


@pytest.mark.parametrize(
    ("option", "package", "of"),
    [
        ("task=serve", "uvicorn", "'solrl-lightning[serve]'"),
        ("explorers=ray", "ray", "'solrl-lightning[ray]'"),
        ("logger=wandb", "wandb", "wandb"),
        ("logger=mlflow", "mlflow", "mlflow"),
        ("reward=ocr", "rapidocr", "'solrl-lightning[ocr]'"),
        ("reward=ocr", "onnxruntime", "'solrl-lightning[ocr]'"),
    ],
)
def test_missing_package_names_its_requirement(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, option: str, package: str, of: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    rule = f"{option} is invalid: the package {package} is not installed. Install it with pip install {of}, or leave"
    with pytest.raises(UserError, match=f"^{re.escape(rule)}"):
        check_needs(compose(option))


def test_token_that_no_header_can_hold_is_an_error(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "gr\u00fcn")
    for argument in ("task=serve", "reward=http"):
        with pytest.raises(UserError, match=f"{TOKEN} is invalid: it must be printable ASCII"):
            check_needs(compose(argument))


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
    sharded = ["trainer=fsdp", "trainer.accelerator=cpu", f"trainer.devices={devices}", "family=prefix"]
    sharded += ["callbacks.sample_grid.every=0"]
    with pytest.raises(UserError, match=message):
        check_prompts(compose(*sharded, argument))
    check_prompts(compose(*sharded, argument, "trainer.devices=1"))
