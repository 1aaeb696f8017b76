"""Two processes on gloo, as torchrun starts them, compute the rollouts, advantages and gradient of one process."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import late_rank
import pytest
import ranks
import torch
from forks import Forks, two_ranks
from nano import PROMPTS, save_nano
from reward_servers import free_port
from safetensors.torch import load_file
from torch import Tensor

from solrl_lightning.names import LORA_FILES
from solrl_lightning.options.run import Run
from solrl_lightning.policies import pipeline
from solrl_lightning.training.schedules import old_policy_decay

Results = dict[str, dict[str, Any]]  # by the names of ranks.train_all


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return [*ranks.OPTIONS, f"model.pretrained={save_nano(folder / 'nano')}", f"data.train={folder}/prompts.txt"]


@pytest.mark.slow
def test_two_ranks_match_one_rank(
    compose: Callable[..., Run], forks: Forks, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "hydra.run.dir=two"]
    monkeypatch.setattr(pipeline, "EMBED_BATCH", 1)
    ended = forks.ranks(tmp_path, two_ranks(), "task._target_=ranks.save_all", *arguments, *two)
    assert [each.status for each in ended] == [0, 0], ended
    assert not any("sync_dist" in each.output for each in ended)
    alone: Results = ranks.train_all(compose("trainer=cpu", *arguments))
    of_ranks: list[Results] = [torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, share in {"whole": 1, "sharded": 2}.items():
        check(alone[name], [results[name] for results in of_ranks])
        assert all(results[name]["elements"] * share == alone[name]["elements"] for results in of_ranks)
    rewards = [results["whole"]["rewards"] for results in (*of_ranks, alone)]
    first, second, all_of_them = (values.std(correction=0) for values in rewards)
    assert min(abs(first / all_of_them - 1), abs(second / all_of_them - 1)) > 0.1  # so statistics of one rank differ


def check(alone: dict[str, Any], of_ranks: list[dict[str, Any]]) -> None:
    for rank, actual in enumerate(of_ranks):
        assert actual["prompts"] == alone["prompts"][rank::2]
        for name in ("seeds", "x0", "proxy_merits", "rewards", "advantages"):
            assert torch.equal(actual[name], alone[name][rank::2]), name
    first, second = of_ranks
    for name in ("gradient", "weights", "evaluations"):
        assert torch.equal(first[name], second[name]), name
    old = first["policies"][0]
    for iteration, model in enumerate(first["policies"][1:], 1):
        old = torch.lerp(model, old, old_policy_decay()(iteration))
    assert distance(first["old"], old) <= 1e-6
    # the order of float32 sums
    assert distance(first["gradient"], alone["gradient"]) <= 1e-5
    assert distance(first["weights"], alone["weights"]) <= 1e-4
    for of_rank in of_ranks:
        torch.testing.assert_close(of_rank["metrics"], alone["metrics"], rtol=1e-4, atol=1e-6)
    assert torch.equal(first["evaluations"][:1], alone["evaluations"][:1])
    assert distance(first["evaluations"], alone["evaluations"]) <= 1e-4


def distance(actual: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected))


JOB = (
    "experiment=smoke family=diffusionnft iterations=1 callbacks.sample_grid.every=0 family.pool=2 family.keep=2 "
    "model.full_steps=2 model.eval_steps=1 trainer=ddp trainer.accelerator=cpu"
).split()


@pytest.mark.slow
def test_frozen_weights_in_8_bits_train_with_ddp(forks: Forks, tmp_path: Path) -> None:
    """DDP broadcasts what it is not told to ignore, and torchao's tensors cannot be broadcast."""
    job = [*JOB, "data.eval_prompts=1", "~logger", "trainer.devices=1", "base_weights=int8", "hydra.run.dir=out"]
    ended = forks.run(tmp_path, *job)
    assert ended.status == 0, ended
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_sigterm_of_one_rank_ends_all(forks: Forks, tmp_path: Path) -> None:
    """With sharded weights, which the ranks gather together to export them."""
    job = [word for word in JOB if word != "trainer=ddp"]
    job += ["trainer=fsdp", "model.train=full", "model.dtypes.transformer=float32", "~callbacks.best"]
    job += ["data.eval_prompts=2", "~logger", "iterations=3", "trainer.devices=2", "hydra.run.dir=out"]
    ended = forks.ranks(tmp_path, two_ranks(), *job, "+callbacks.terminate._target_=ranks.TerminateRank1")
    assert [each.status for each in ended] == [143, 143], ended
    assert list((tmp_path / "out" / "transformer").glob("*.safetensors"))
    facts = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (facts["status"], facts["iterations"]) == ("interrupted", 1)


@pytest.mark.slow
def test_rank_that_lightning_has_started_ends_with_the_first_one(forks: Forks, tmp_path: Path) -> None:
    """Before they meet, when neither has a connection to the other."""
    job = [*JOB, "data.eval_prompts=2", "~logger", "trainer.devices=2", "hydra.run.dir=out"]
    job += ["+callbacks.late._target_=late_rank.LateRank1"]
    (ended,) = forks.ranks(tmp_path, [{"PYTHONPATH": str(Path(late_rank.__file__).parent)}], *job, kill_at="pid")
    assert ended.status == -signal.SIGKILL, ended
    stat, end = Path("/proc") / (tmp_path / "pid").read_text() / "stat", time.monotonic() + 20
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < end, "the second rank lives on"
        time.sleep(0.1)


@pytest.mark.slow
def test_torchrun_continues_after_a_rank_was_killed(forks: Forks, tmp_path: Path) -> None:
    node = {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "1", "PET_MASTER_PORT": str(free_port())}
    job = [
        *JOB,
        "data.eval_prompts=2",
        "~logger",
        "iterations=2",
        "trainer.devices=2",
        "ckpt=auto",
        "hydra.run.dir=out",
    ]
    (ended,) = forks.ranks(tmp_path, [node], *job, "+callbacks.kill._target_=ranks.KillRank1", target="forks:torchrun")
    assert ended.status == 0, ended
    facts = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (facts["status"], facts["iterations"]) == ("completed", 2)
    assert "iterations done: 1" in ended.output


@pytest.mark.slow
def test_two_torchrun_nodes_share_one_folder_and_equal_two_devices(forks: Forks, tmp_path: Path) -> None:
    torchrun = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    torchrun |= {"PET_MASTER_PORT": str(free_port())}
    nodes = [torchrun | {"PET_NODE_RANK": rank} for rank in "01"]
    job = [*JOB, "data.eval_prompts=2"]
    ended = forks.ranks(tmp_path, nodes, *job, "trainer.num_nodes=2", "trainer.devices=1", target="forks:torchrun")
    assert [each.status for each in ended] == [0, 0], ended
    (folder,) = tmp_path.glob("outputs/train/*")
    files = ".hydra checkpoints lora solrl_lightning.log summary.json report.html tensorboard"
    assert {file.name for file in folder.iterdir()} == set(files.split())
    sweep = ["-m", *job, "trainer.devices=2", "hydra.sweep.dir=one_node", "hydra.sweep.subdir=job"]
    one_node = forks.run(tmp_path, *sweep)  # Lightning starts rank 1, which is no job of a sweep
    assert one_node.status == 0 and "error: " not in one_node.output, one_node
    assert list(tmp_path.glob("outputs/train/*")) == [folder]  # the second process uses the first one's folder
    runs = (folder, tmp_path / "one_node" / "job")
    actual, expected = (json.loads((run / "summary.json").read_text()) for run in runs)
    assert actual["status"] == "completed"
    for row in (*actual["evaluations"], *expected["evaluations"]):
        row.pop("seconds")
    assert actual["evaluations"] == expected["evaluations"] and len(actual["evaluations"]) == 2
    actual, expected = (load_file(run / "lora" / LORA_FILES[0]) for run in runs)
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
