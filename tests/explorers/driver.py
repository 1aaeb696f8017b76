"""Exploration by actors of Ray, on a cluster of two nodes here: the bits of one process, whoever is lost on the way.

test_ray.py runs these tests, in a process of their own.
"""

import functools
import json
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest
import ray
import ray_worker
import torch
from forks import Forks, two_ranks
from nano import save_nano
from PIL import Image
from ray._private import parameter
from ray.cluster_utils import Cluster

from solrl_lightning import __version__
from solrl_lightning.__main__ import main
from solrl_lightning.artifacts.files import iterations_done, read_checkpoint
from solrl_lightning.build import build_model, build_rewards
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import INPUT_IMAGE, Prompt, identities
from solrl_lightning.errors import ExplorersLost, UserError
from solrl_lightning.explorers import cluster as clusters
from solrl_lightning.explorers import sampler as samplers
from solrl_lightning.explorers.actor import Explorer
from solrl_lightning.explorers.cluster import explorers_of
from solrl_lightning.explorers.sampler import RaySampler
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.addresses import TOKEN, read_token
from solrl_lightning.rollout.explore import Explored, run_family
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.shapes.world import eval_captions
from solrl_lightning.training.module import SolRLModule

CPU = torch.device("cpu")
PROMPTS = [Prompt(text, {"level": level}) for text, level in zip(eval_captions()[:2], (0.1, 0.9), strict=True)]


NODE = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "worker_path": ray_worker.__file__,
}
"""Options of a node with fewer processes, whose workers are forks."""
CHECKS = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "2"}
"""Variables by which a lost node is noticed sooner."""
PREVIEW = ("model.preview_decoder=tiny", "model.explore_decoder=preview")


def options(folder: Path, family: str, *arguments: str) -> Run:
    small = "experiment=smoke trainer=cpu model.rollout_batch=3 family.pool=16 explorers=ray".split()
    level = "reward.shapes._target_=tests.explorers.level.Level"
    with ConfigTree() as tree:
        composed = tree.compose([f"family={family}", *small, level, *arguments])
        return Run.of(application_config(composed, folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, with room for three explorers and for one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (clusters.ENVIRONMENT | CHECKS).items():
            patch.setenv(name, value)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, **NODE})
        nodes.add_node(num_cpus=1, **NODE)
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def cfg(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    address = f"explorers.address={cluster.address}"
    return options(tmp_path_factory.mktemp("run"), "sol_rl", *PREVIEW, address, "explorers.count=4", "iterations=3")


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({"address": "127.0.0.1:1"}, 1, r"explorers.address=127.0.0.1:1 is invalid: .*Start a cluster with 'ray start"),
        ({"address": None}, 2, "explorers.address=null is invalid: each of several ranks would start a cluster"),
    ],
    ids=["unreachable", "ranks"],
)
def test_cluster_that_cannot_be_used_is_an_error(cfg: Run, change: Any, ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message), explorers_of(changed(cfg, **change), 0, ranks, CPU):
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


def test_cluster_without_room_is_an_error(cfg: Run, module: SolRLModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second of two ranks, which has an explorer even of one."""
    monkeypatch.setattr(samplers, "PATIENCE", 2.0)
    cfg = changed(cfg, resources={"num_cpus": 5}, count=1)
    with explorers_of(cfg, 1, 2, CPU) as explorers, pytest.raises(ExplorersLost, match="the cluster has no room"):
        RaySampler(cfg, explorers, module.model, functools.partial(pool_of, module))


def test_explorer_that_cannot_begin_gives_its_reason(
    cfg: Run, module: SolRLModule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clusters, "__version__", "0.0")
    with (
        explorers_of(cfg, 0, 1, CPU) as explorers,
        pytest.raises(ExplorersLost, match=r"UserError: .* and the run 0\.0\."),
    ):
        RaySampler(cfg, explorers, module.model, functools.partial(pool_of, module))
    assert all(f"explorer {number} cannot start: " in caplog.text for number in range(4)), "also if others answer"


@contextmanager
def exploring(cfg: Run, module: SolRLModule, explorers: list[Any]) -> Iterator[RaySampler]:
    sampler = RaySampler(cfg, explorers, module.model, functools.partial(pool_of, module))
    object.__setattr__(module.transformers, "explorers", sampler)
    yield sampler
    object.__setattr__(module.transformers, "explorers", None)


def explored(cfg: Run, module: SolRLModule, iteration: int = 0) -> Explored:
    prompts, seeds = pool_of(module, iteration)
    *stages, _ = cfg.family.stages(module.model.sigmas)
    return run_family(stages, prompts, seeds, module.run_stage)


def assert_equal(one: Explored, other: Explored) -> None:
    assert one.pool.scores.isnan().any() and one.pool.scores.isfinite().any()
    torch.testing.assert_close(one.pool.scores, other.pool.scores, rtol=0, atol=0, equal_nan=True)
    for name in ("seeds", "x0", "scores"):
        assert torch.equal(getattr(one.regenerated, name), getattr(other.regenerated, name)), name


@pytest.mark.parametrize("family", ["sol_rl", "race"])
def test_explorers_give_the_bits_of_one_process(
    cfg: Run, module: SolRLModule, actors: list[Any], tmp_path: Path, family: str
) -> None:
    cfg = options(tmp_path, family, *PREVIEW)
    module.requantize(0)
    expected = explored(cfg, module)
    for count in (1, 2, 4):
        with exploring(cfg, module, actors[:count]) as sampler:
            sampler._waiting = Counting()
            module.requantize(0)
            if count == 4:
                await_answering(sampler, 4)
                hold(actors[1])
                process = ray.get(actors[1].__ray_call__.remote(lambda self: os.getpid()))
                Timer(0.5, os.kill, (process, signal.SIGKILL)).start()  # in the middle of two chunks
            assert_equal(expected, explored(cfg, module))
            metrics = sampler.metrics()
            assert sum(sampler.costs.values()) >= expected.pool.seeds.numel()
            assert metrics["lag"] == 0 < metrics["explorer_seconds"] and metrics["explorers_lost"] == (count == 4)
            again = sampler._waiting.sent - sampler._waiting.extended
            assert again in ((1, samplers.REQUESTS) if count == 4 else (0,)), "each lost chunk once more"
    await_answering(sampler, 4)  # it starts again
    assert sampler.precision == "nvfp4 (emulated)"


def test_explorer_without_a_chunk_is_lost_by_the_next_iteration(
    cfg: Run, module: SolRLModule, actors: list[Any]
) -> None:
    with exploring(cfg, module, actors) as sampler:
        module.requantize(0)
        await_answering(sampler, 4)
        ray.kill(actors[0], no_restart=False)
        module.requantize(0)
        await_answering(sampler, 3)
        assert sampler.metrics()["explorers_lost"] == 1
        await_answering(sampler, 4)


class Counting(deque[Any]):
    """Counts chunks, and how often one was sent."""

    extended, sent = 0, 0

    def extend(self, tasks: Any) -> None:
        self.extended += len(tasks)
        super().extend(tasks)

    def popleft(self) -> Any:
        self.sent += 1
        return super().popleft()


@contextmanager
def other_weights(module: SolRLModule) -> Iterator[None]:
    """Another old policy."""
    old = module.policy_state("old")
    before = {name: value.clone() for name, value in old.items()}
    for value in old.values():
        value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)))
    yield
    for name, value in old.items():
        value.copy_(before[name])


def test_exploration_ahead_has_the_weights_with_which_it_began(
    cfg: Run, module: SolRLModule, actors: list[Any]
) -> None:
    module.requantize(0)
    early = explored(cfg, module, 1)
    with exploring(changed(cfg, max_lag=1), module, actors[:1]) as sampler:
        module.requantize(0)
        explored(cfg, module, 0)
        assert sampler.metrics()["lag"] == 0
        with other_weights(module):
            module.requantize(1)
            (sent,) = sampler._sent  # as if their explorer had been lost during training
            sampler._waiting.extend(filter(None, sent.values()))
            sent.clear()
            assert_equal(early, explored(cfg, module, 1))
            assert sampler.metrics()["lag"] == 1 and len(sampler._ahead) == 1
            module.requantize(2)
            late = explored(cfg, module, 2)
            assert not sampler._ahead, "there are three iterations"
    assert_equal(late, explored(cfg, module, 2))  # the other samplers have these weights still


def hold(explorer: Any) -> None:
    """Let the explorer finish no chunk any more."""
    ray.get(explorer.__ray_call__.remote(lambda self: self._turn.acquire()))


def await_answering(sampler: RaySampler, count: int) -> None:
    while sampler.metrics()["explorers"] != count:
        sampler._receive()


def test_candidates_of_a_lost_node_go_to_others_and_its_explorer_starts_on_a_new_one(
    cfg: Run, module: SolRLModule, actors: list[Any], cluster: Cluster
) -> None:
    module.requantize(0)
    expected = explored(cfg, module)
    (node,) = cluster.worker_nodes
    node_of = lambda self: ray.get_runtime_context().get_node_id()  # noqa: E731
    nodes = ray.get([explorer.__ray_call__.remote(node_of) for explorer in actors])
    with exploring(cfg, module, actors) as sampler:
        module.requantize(0)
        await_answering(sampler, 4)
        hold(actors[nodes.index(node.node_id)])
        Timer(0.5, cluster.remove_node, (node,), {"allow_graceful": False}).start()
        assert_equal(expected, explored(cfg, module))
        assert (sampler.metrics()["explorers_lost"], sampler.metrics()["explorers"]) == (1, 3)
        cluster.add_node(num_cpus=1, **NODE)
        await_answering(sampler, 4)
        assert_equal(expected, explored(cfg, module))


SMALL = (
    "experiment=smoke trainer=cpu iterations=2 seed=7 logger=none callbacks.sample_grid.every=0 data.eval_prompts=2 "
    "data.eval_images=1 model.eval_steps=1"
).split()


def there(cfg: Run) -> list[str]:
    return ["explorers=ray", f"explorers.address={cfg.explorers.address}", "explorers.resources.num_cpus=0"]


def test_each_rank_explores_with_its_own(cfg: Run, runs: Forks, tmp_path: Path) -> None:
    ranks = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    for folder, more in (("here", []), ("there", [*there(cfg), "explorers.count=2"])):
        ended = runs.ranks(tmp_path, two_ranks(), *SMALL, *ranks, *more, f"hydra.run.dir={folder}")
        assert [rank.status for rank in ended] == [0, 0], ended[0].output
    assert_same_weights(tmp_path)


def assert_same_weights(folder: Path) -> None:
    one, other = (read_checkpoint(folder / f"{run}/checkpoints/last.ckpt")["state_dict"] for run in ("here", "there"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_jobs_of_a_sweep_begin_a_cluster_each(cluster: Cluster, runs: Forks, tmp_path: Path) -> None:
    sweep = ["-m", *SMALL, "optimizer.lr=1e-4,2e-4", "explorers=ray", "hydra.sweep.dir=sweep"]
    (ended,) = runs.ranks(tmp_path, [forked_workers()], *sweep, target="explorers/driver:with_forked_workers")
    assert ended.status == 0, ended.output
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("sweep/*/summary.json")]
    assert [summary["status"] for summary in summaries] == ["completed", "completed"]


def forked_workers() -> dict[str, str]:
    """Return the environment of `with_forked_workers`."""
    return {ray_worker.ADDRESS: os.environ[ray_worker.ADDRESS]}


def with_forked_workers(arguments: list[str]) -> int:
    """Run the command line, whose clusters of its own are as those of these tests."""
    node = {name: value for name, value in NODE.items() if name != "include_dashboard"}  # which it sets itself
    parameter.RayParams = functools.partial(parameter.RayParams, **node)
    return main(arguments)


@pytest.mark.parametrize("architecture", ["qwen_image_edit", "wan"])
def test_input_images_and_videos_are_explored_as_here(
    cfg: Run, actors: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Without an actor of their own: an explorer's method, with arguments that went through the object store."""
    for number, colour in enumerate(("red", "blue")):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{number}.png")
    nano = f"model={architecture} model.pretrained={save_nano(tmp_path / 'nano', architecture)} model.embeddings=null"
    sizes = "model.resolution=32 model.max_sequence_length=16 model.full_steps=3 model.preview_steps=2 family.pool=4"
    wan = "model.num_frames=5 model.frames=2" if architecture == "wan" else ""
    cfg = options(tmp_path, "prefix", *f"{nano} {sizes} {wan} family.keep=2 model.prefix_steps=1".split())
    module = build_model(cfg, CPU, {"merged"}, build_rewards(cfg.reward, cfg.model.frames, CPU))
    image = architecture == "qwen_image_edit"
    prompts = [
        replace(
            prompt, metadata={**prompt.metadata, INPUT_IMAGE: str(tmp_path / f"{number}.png")}, image=f"{number}.png"
        )
        if image
        else prompt
        for number, prompt in enumerate(PROMPTS)
    ]
    module.requantize(0)
    encoded, seeds = module.encode(prompts), pool_seeds(1, 0, identities(prompts), 4)
    stage, _ = cfg.family.stages(module.model.sigmas)
    expected = module.run_stage(stage, encoded, seeds)
    monkeypatch.delenv(TOKEN, raising=False)
    explorer = Explorer(cfg, __version__, os.getcwd(), "abc")  # of the run's environment, not of `ray start`
    assert read_token() == "abc"
    weights = [ray.put(module.policy_state("old"))]
    arguments = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), seeds.flatten(), stage, None
    scores, state, _, costs = explorer.sample(weights, *ray.get(ray.put((encoded, *arguments))))
    assert set(costs) == {"shapes_images"} and costs["shapes_images"] >= 8
    torch.testing.assert_close(scores, expected.scores.flatten(0, 1), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state.x, expected.state.x.flatten(0, 1)) and torch.equal(state.x0, expected.x0.flatten(0, 1))


def test_explorer_that_never_answers_ends_the_run(
    cfg: Run, module: SolRLModule, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one with these explorers, because one of them is blocked."""
    with exploring(cfg, module, actors[:1]):
        module.requantize(0)
        monkeypatch.setattr(samplers, "PATIENCE", 1.5)
        hold(actors[0])
        with pytest.raises(ExplorersLost, match="no explorer answers: "):
            explored(cfg, module)


def test_run_whose_cluster_is_gone_says_so_and_resumes(cfg: Run, runs: Forks, tmp_path: Path) -> None:
    """First with the cluster of one machine that lasts as long as the run."""
    last = tmp_path / "there/checkpoints/last.ckpt"

    def end_the_cluster(folder: str) -> None:
        while not last.exists():
            time.sleep(0.05)
        commands = {int(file.parent.name): file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")}
        (raylet,) = (pid for pid, line in commands.items() if b"raylet/raylet\0" in line and folder.encode() in line)
        os.kill(raylet, signal.SIGKILL)

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # of a short name, as sockets need
        Thread(target=end_the_cluster, args=[folder], daemon=True).start()
        arguments = [*SMALL, "explorers=ray", "explorers.count=2", "iterations=40", "hydra.run.dir=there"]
        target = "explorers/driver:with_errors_in_a_file"
        (ended,) = runs.ranks(tmp_path, [forked_workers() | {"RAY_TMPDIR": folder}], *arguments, target=target)
    line = "error: Ray has ended here or at the head of the cluster, or this process was killed. Start it again, and "
    end = time.monotonic() + 10
    while line not in (errors := (tmp_path / "errors").read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    assert ended.status == 1 and f"{line}resume with ckpt=last hydra.run.dir=" in errors, errors
    done = f"iterations={iterations_done(read_checkpoint(last)) + 1}"
    for arguments in (
        ["ckpt=last", "explorers=none", done, "hydra.run.dir=there"],
        [*SMALL, done, "hydra.run.dir=here"],
    ):
        ended = runs.run(tmp_path, *arguments)
        assert ended.status == 0, ended.output
    assert_same_weights(tmp_path)
    options_of_explorers = clusters._options(cfg.model_copy(update={"ckpt": str(last)}))
    assert (options_of_explorers.precision.name, options_of_explorers.ckpt) == ("nvfp4", None)
    summary = json.loads((tmp_path / "there" / "summary.json").read_text())
    assert (summary["status"], summary["precision_backend"]) == ("completed", "nvfp4 (emulated)")


def with_errors_in_a_file(arguments: list[str]) -> int:
    """Run the command line, whose witness may write after its end."""
    os.dup2(os.open("errors", os.O_CREAT | os.O_WRONLY), 2)
    return with_forked_workers(arguments)
