"""task=serve until a signal, and what it refuses before a reward is loaded."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from reward_servers import free_port
from torch import Tensor

from solrl_lightning.checks import check_values
from solrl_lightning.errors import UserError
from solrl_lightning.rewards.http import TOKEN, HTTPReward
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.shapes.world import eval_captions
from solrl_lightning.tasks.serve import is_loopback

Command = Callable[..., Any]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_leaves_no_file(command: Command, tmp_path: Path, end: signal.Signals) -> None:
    images, prompts = torch.randint(256, (3, 3, 32, 32)) / 255, eval_captions()[:3]
    reward = HTTPReward(f"http://127.0.0.1:{(port := free_port())}/score", retries=12, backoff=0.01)
    found: list[Tensor] = []

    def ask() -> None:
        try:
            found.append(reward(images, prompts))
        finally:
            os.kill(os.getpid(), end)

    before = signal.getsignal(signal.SIGTERM)
    thread = Thread(target=ask)
    thread.start()
    try:
        ended = command("task=serve", "trainer=cpu", f"task.port={port}")
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert ended.status == 0 and "Traceback" not in ended.err
    assert f"shapes on cpu: {reward.url} (Ctrl-C ends)" in ended.out.splitlines()
    assert torch.equal(found[0], ShapesReward()(images, prompts))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_reward_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: Any) -> None:
        pytest.fail("a reward is loaded")

    monkeypatch.setattr("solrl_lightning.tasks.serve.build_rewards", loaded)
    monkeypatch.delenv(TOKEN, raising=False)


@pytest.mark.usefixtures("no_reward_is_loaded")
def test_reward_of_another_server_is_refused(command: Command) -> None:
    ended = command("task=serve", "reward=http")
    assert ended.status == 2 and "Choose another reward" in ended.err


@pytest.mark.usefixtures("no_reward_is_loaded")
def test_address_that_others_can_reach_requires_a_token(command: Command, tmp_path: Path) -> None:
    ended = command("task=serve", "task.host=0.0.0.0")
    assert ended.status == 2 and "task.host=0.0.0.0 is invalid without a token" in ended.err
    assert f"export {TOKEN}=<token>" in ended.err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True)]
    + [("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("scorer", False), ("", False)],
)
def test_loopback_addresses(host: str, own: bool) -> None:
    assert is_loopback(host) is own


@pytest.mark.usefixtures("no_reward_is_loaded")
def test_port_in_use_is_an_error(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = command("task=serve", f"task.port={port}")
    assert ended.status == 2
    assert f"task.host=127.0.0.1 task.port={port} is invalid: it cannot be listened on: Address already" in ended.err


@pytest.mark.usefixtures("no_reward_is_loaded")
def test_missing_package_names_the_extra(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "solrl_lightning.rewards.server", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    ended = command("task=serve")
    fix = 'Install it with pip install "solrl-lightning[serve]".'
    assert ended.status == 2 and f"the package fastapi is not installed. {fix}" in ended.err


@pytest.mark.parametrize("argument", ["task.port=70000", "task.max_images=0", "task.max_pixels=none"])
def test_limits_out_of_range_are_an_error(compose: Callable[..., DictConfig], argument: str) -> None:
    with pytest.raises(UserError, match=f"{argument} is invalid: it must be"):
        check_values(compose("task=serve", argument))
