"""Exploration by actors of Ray, on a cluster of two nodes here: the bits of one process, whoever is lost on the way."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor

from solrl_lightning.build import build_model, build_rewards
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.errors import UserError
from solrl_lightning.explorers import cluster as clusters
from solrl_lightning.explorers.cluster import explorers_of
from solrl_lightning.explorers.sampler import RaySampler
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rollout.explore import Explored, run_family
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.shapes.world import eval_captions
from solrl_lightning.training.module import SolRLModule

CPU = torch.device("cpu")
PROMPTS = [Prompt(text, {"level": level}) for text, level in zip(eval_captions()[:2], (0.1, 0.9), strict=True)]


class Level(Reward):
    """How near the mean is to the prompt's "level"; NaN for some of the images."""

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        means = images.mean((1, 2, 3))
        scores = -(means - torch.tensor([row["level"] for row in metadata])).abs()
        return scores.where((1000 * means).int() % 10 != 0, torch.nan)


def options(folder: Path, family: str, *arguments: str) -> Run:
    small = "experiment=smoke trainer=cpu model.rollout_batch=3 family.pool=16 explorers=ray".split()
    level = "reward.shapes._target_=tests.explorers.test_ray.Level"
    with ConfigTree() as tree:
        composed = tree.compose([f"family={family}", *small, level, *arguments])
        return Run.of(application_config(composed, folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with room for two explorers each."""
    environment = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def cfg(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    address = f"explorers.address={cluster.address}"
    return options(tmp_path_factory.mktemp("run"), "sol_rl", address, "explorers.count=4", "iterations=3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": "127.0.0.1:1"}, r"explorers.address=127.0.0.1:1 is invalid: .*Start a cluster with 'ray start"),
        (
            {"resources": {"num_cpus": 3}},
            r"no room for an explorer. It has CPU=2 GPU=0 on .*, .*; CPU=4 GPU=0 are free",
        ),
        ({"address": None}, "explorers.address=null is invalid: each of several ranks would start a cluster"),
        ({"count": 1}, "explorers.count=1 is invalid: each of the 2 ranks needs at least one"),
    ],
    ids=["unreachable", "full", "ranks", "few"],
)
def test_cluster_that_cannot_be_used_is_an_error(cfg: Run, monkeypatch: Any, change: Any, message: str) -> None:
    monkeypatch.setattr(clusters, "PLACING", 2.0)
    several = {"count", "address"} & change.keys() and change.get("address") is None
    with pytest.raises(UserError, match=message), explorers_of(changed(cfg, **change), 0, 2 if several else 1, CPU):
        pass
    assert not ray.is_initialized()


def changed(cfg: Run, **change: Any) -> Run:
    return cfg.with_group("explorers", cfg.explorers.model_dump() | change)


def test_cluster_of_another_version_is_an_error(cfg: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.utils.compute_version_info", lambda: ("2.0.0", "3.9.1"))
    with pytest.raises(UserError, match=r"Version mismatch: .* Ray: 2\.\d+.* Ray: 2.0.0 Python: 3.9.1"):
        with explorers_of(cfg, 0, 1, CPU):
            pass


@pytest.fixture(scope="module")
def actors(cfg: Run) -> Iterator[list[Any]]:
    with explorers_of(cfg, 0, 1, CPU) as explorers:
        ray.get([explorer.ready.remote() for explorer in explorers])
        yield explorers


@pytest.fixture(scope="module")
def module(cfg: Run) -> SolRLModule:
    module = build_model(cfg, CPU, {"shadow"}, build_rewards(cfg.reward, cfg.model.frames, CPU))
    for sampler in module.transformers.samplers.values():
        sampler.batch_size.size = 3
    return module


def pool_of(module: SolRLModule, iteration: int) -> Any:
    return module.encode(PROMPTS), pool_seeds(1, iteration, identities(PROMPTS), 16)


@contextmanager
def exploring(cfg: Run, module: SolRLModule, explorers: list[Any]) -> Iterator[RaySampler]:
    sampler = RaySampler(cfg, explorers, module.policy, functools.partial(pool_of, module))
    object.__setattr__(module.transformers, "explorers", sampler)
    yield sampler
    object.__setattr__(module.transformers, "explorers", None)


def explored(cfg: Run, module: SolRLModule, iteration: int = 0) -> Explored:
    prompts, seeds = pool_of(module, iteration)

    def run(stage: Any, seeds: Tensor, state: Any) -> Any:
        return module.run_stage(stage, prompts, seeds, initial_state=state)

    *stages, _ = cfg.family.stages(module.policy.sigmas)
    return run_family(stages, seeds, PROMPTS, run)


def assert_equal(one: Explored, other: Explored) -> None:
    assert one.pool.scores.isnan().any() and one.pool.scores.isfinite().any()
    torch.testing.assert_close(one.pool.scores, other.pool.scores, rtol=0, atol=0, equal_nan=True)
    for name in ("seeds", "x0", "scores"):
        assert torch.equal(getattr(one.regenerated, name), getattr(other.regenerated, name)), name


@pytest.mark.parametrize("family", ["sol_rl", "race"])
def test_explorers_give_the_bits_of_one_process(
    cfg: Run, module: SolRLModule, actors: list[Any], tmp_path: Path, family: str
) -> None:
    cfg = options(tmp_path, family)
    module.sync_samplers(0)
    expected = explored(cfg, module)
    for count in (1, 2, 4):
        with exploring(cfg, module, actors[:count]) as sampler:
            module.sync_samplers(0)
            assert_equal(expected, explored(cfg, module))
            assert sampler.metrics()["lag"] == 0 < sampler.metrics()["explorer_seconds"]
    assert sampler.precision == "nvfp4 (emulated)"


def noise_like(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
