"""Chunks sampled by an explorer: the same numbers, with the weights that the run allows, whoever is lost on the way."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from nano import prompts_of
from torch import Tensor

from solrl_lightning.build import build_model, build_rewards, facts_of
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import ServerError, UserError
from solrl_lightning.explorers.sampler import Connection, Fleet, Lost, RemoteSampler
from solrl_lightning.explorers.server import Explorer, create_app
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.server import Server
from solrl_lightning.rollout.chunks import BatchSize
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.stage import EXPLORE, Stage
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.shapes.world import eval_captions
from solrl_lightning.training.module import SolRLModule

CPU = torch.device("cpu")
PROMPTS = eval_captions()[:2]
STAGE = Stage(name=EXPLORE, sampler="merged", steps=3, solver="dpm2", stop_after=2)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with ConfigTree() as tree:
        composed = tree.compose(["family=prefix", "trainer=cpu", "family.compile=false"])
        return Run.of(application_config(composed, tmp_path_factory.mktemp("run")))


def build(cfg: Run) -> SolRLModule:
    return build_model(cfg, CPU, {"merged"}, build_rewards(cfg, CPU))


@pytest.fixture(scope="module")
def module(cfg: Run) -> SolRLModule:
    return build(cfg)


@pytest.fixture(scope="module")
def explorer(cfg: Run) -> Explorer:
    return Explorer(build(cfg))


@contextmanager
def serving(explorer: Explorer, facts: dict[str, object], token: str = "") -> Iterator[str]:
    """The address of an explorer in a thread."""
    with explorer.module.scoring_worker() as submit, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = Server(create_app(explorer, submit, facts, token), "ready")
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url(explorer: Explorer, cfg: Run) -> Iterator[str]:
    with serving(explorer, facts_of(cfg, explorer.module, ["merged", "policy"])) as address:
        yield address


@pytest.fixture(scope="module")
def vanishing() -> Iterator[str]:
    """The address of a server that takes a request and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_each() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.recv(100)
                connection.close()

        Thread(target=close_each, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def sampler(module: SolRLModule, *urls: str, max_lag: int = 0, timeout: float = 30.0) -> RemoteSampler:
    """Of three candidates a chunk, synchronised with version 0 of the module's adapters."""
    fleet = Fleet([Connection(url, "", timeout) for url in urls], max_lag, timeout)
    remote = RemoteSampler(module.policy, BatchSize(3, pad_to_size=False), "merged", fleet, {})
    remote.sync(module.policy_state("old"), 0)
    return remote


def with_remote(module: SolRLModule, remote: RemoteSampler, stage: Stage = STAGE, iteration: int = 0) -> Candidates:
    module.transformers.explorers["merged"] = remote
    try:
        return explored(module, stage, iteration)
    finally:
        module.transformers.explorers.clear()


def explored(module: SolRLModule, stage: Stage = STAGE, iteration: int = 0) -> Candidates:
    module.transformers.samplers["merged"].batch_size.size = 3
    return module.run_stage(stage, module.encode(prompts_of(PROMPTS)), pool_seeds(1, iteration, PROMPTS, 4))


def noise_like(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.05 * torch.randn(value.shape, generator=generator) for name, value in state.items()}


def test_an_explorer_gives_the_numbers_of_this_process_also_where_a_stage_continues(
    module: SolRLModule, url: str
) -> None:
    remote, following, prompts = (
        sampler(module, url),
        STAGE.but(stop_after=None),
        module.encode(prompts_of(PROMPTS)),
    )
    here, there = explored(module), with_remote(module, remote)
    assert torch.equal(here.scores, there.scores) and here.seeds.shape == (2, 4)
    assert here.state is not None and there.state is not None
    for name in ("x", "x0"):
        assert torch.equal(getattr(here.state, name), getattr(there.state, name))
    last = module.run_stage(following, prompts, here.seeds, initial_state=here.state)
    module.transformers.explorers["merged"] = remote
    remote_last = module.run_stage(following, prompts, here.seeds, initial_state=there.state)
    module.transformers.explorers.clear()
    assert torch.equal(last.scores, remote_last.scores) and torch.equal(last.x0, remote_last.x0)


def test_chunks_of_a_lost_explorer_go_to_another_one(
    module: SolRLModule, url: str, vanishing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        candidates = with_remote(module, sampler(module, vanishing, url))
    assert torch.equal(candidates.scores, explored(module).scores)
    lost = [record.message for record in caplog.records if "is lost" in record.message]
    assert len(lost) == 1 and lost[0].startswith(f"the explorer {vanishing} is lost: ")


def test_weights_are_pushed_again_to_an_explorer_that_was_started_again(
    module: SolRLModule, explorer: Explorer, url: str
) -> None:
    remote = sampler(module, url)
    scores = with_remote(module, remote).scores
    explorer.__init__(explorer.module)  # type: ignore[misc]
    assert torch.equal(with_remote(module, remote).scores, scores)


def test_late_chunks_count_up_to_the_maximal_lag(module: SolRLModule, url: str) -> None:
    old = module.policy_state("old")
    prompts, seeds = module.encode(prompts_of(PROMPTS)), pool_seeds(1, 1, PROMPTS, 4)
    versions = []
    for state in (old, noise_like(old, seed=3)):
        fresh = sampler(module, url)
        fresh.sync(state, 7)
        versions.append(with_remote(module, fresh, iteration=1).scores)
    assert not torch.equal(*versions)
    for max_lag, lags in ((1, [1, 1, 1]), (0, [0, 0, 0])):
        remote = sampler(module, url, max_lag=max_lag)
        remote.explore_ahead(prompts, seeds, module.spec(STAGE))
        for task in next(iter(remote._ahead.values())):
            while task.answer is None:
                pass
        remote.sync(noise_like(old, seed=3), 1)
        assert torch.equal(with_remote(module, remote, iteration=1).scores, versions[1 - max_lag])
        assert remote.lags == lags


def test_without_any_explorer_the_run_ends(module: SolRLModule, vanishing: str) -> None:
    with pytest.raises(ServerError, match=r"no explorer of explorers.urls has answered for \d+ s: "):
        with_remote(module, sampler(module, vanishing, timeout=0.2))


def test_an_explorer_of_another_run_is_an_error(module: SolRLModule, explorer: Explorer, cfg: Run, url: str) -> None:
    facts = facts_of(cfg, module, ["merged"])
    connection = Connection(url, "", 5.0)
    connection.facts = facts
    connection.check()
    connection.facts = facts | {"reward": ["ocr"]}
    rule = f"explorers.urls={url} is invalid: reward is .'shapes'. there and .'ocr'. here. Start it with"
    with pytest.raises(UserError, match=rule):
        connection.check()
    connection.facts = facts | {"family.explore.sampler": ["shadow"]}
    with pytest.raises(UserError, match="family.explore.sampler is .* there and .'shadow'. here"):
        connection.check()


def test_only_the_token_opens_an_explorer(module: SolRLModule, explorer: Explorer) -> None:
    remote = sampler(module)
    task, *_ = remote._tasks(module.encode(prompts_of(PROMPTS)), pool_seeds(1, 0, PROMPTS, 1), module.spec(STAGE))
    request, weights = task.request(), remote.fleet._weights
    with serving(explorer, {}, token="secret") as address:
        for token in ("", "wrong"):
            connection = Connection(address, token, 5.0)
            with pytest.raises(UserError, match=f"explorers.urls={address} is invalid: the explorer has another token"):
                connection.check()
            with pytest.raises(Lost, match="has another token"):
                connection.sample(request, *weights)
        assert Connection(address, "secret", 5.0).sample(request, *weights)


def test_what_an_explorer_cannot_sample_ends_the_run(module: SolRLModule, url: str) -> None:
    remote = sampler(module, url)
    remote.sync({"wrong": torch.zeros(1)}, 1)
    with pytest.raises(ServerError, match="the adapters do not fit"):
        with_remote(module, remote)


def test_what_a_message_cannot_carry_ends_the_run(module: SolRLModule, url: str) -> None:
    remote = sampler(module, url)
    remote.sync(module.policy_state("old"), 1)
    prompts = module.encode([Prompt(PROMPTS[0], {"colour": {1}})])  # JSON has no sets
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        next(remote.sample(prompts, pool_seeds(1, 0, PROMPTS[:1], 4), module.spec(STAGE)))
