"""``trainer=fsdp`` on one rank, in this process; test_ddp has two ranks, whose shards are halves."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from solrl_lightning.training import sharding

SMALL = (
    "experiment=smoke trainer=fsdp trainer.accelerator=cpu trainer.devices=1 prompts_per_iteration=1 "
    "family=diffusionnft family.pool=2 family.keep=2 model.full_steps=2 model.eval_steps=1 data.eval_prompts=1 "
    "data.eval_images=1 callbacks.sample_grid.every=0 ~callbacks.best ~logger iterations=2"
).split()


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")  # FSDP2 and Lightning warn of what does not apply to one rank
def test_a_resumed_run_with_shards_equals_one_that_was_not_stopped(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = []

    def shard(module: Any, mesh: Any) -> None:
        shard_base(module, mesh)
        sharded.append(isinstance(module.transformer, FSDPModule))

    shard_base = sharding.shard_base
    monkeypatch.setattr(sharding, "shard_base", shard)
    resume = "ckpt=straight/checkpoints/iteration_000001.ckpt"
    for name, argument in {"straight": "callbacks.periodic.every=1", "resumed": resume}.items():
        done = command(*SMALL, argument, f"hydra.run.dir={name}")
        assert done.status == 0, done.err
    assert sharded == [True] * 2
    first, straight, resumed = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        for name in ("straight/checkpoints/iteration_000001", "straight/checkpoints/last", "resumed/checkpoints/last")
    )
    assert straight.keys() == resumed.keys() and all(".lora_" in name for name in straight)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not all(torch.equal(first[name], resumed[name]) for name in first)
