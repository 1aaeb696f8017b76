"""task=serve until a signal, and its errors; tests/cli/test_checks.py has those before it starts."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from reward_servers import free_port
from torch import Tensor

from solrl_lightning.rewards.addresses import is_loopback
from solrl_lightning.rewards.http import HTTPReward
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.shapes.world import eval_captions

Command = Callable[..., Any]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal_and_leaves_no_file(command: Command, tmp_path: Path, end: signal.Signals) -> None:
    images, prompts = torch.randint(256, (3, 3, 32, 32)) / 255, eval_captions()[:3]
    reward = HTTPReward(f"http://127.0.0.1:{(port := free_port())}/score", retries=12, backoff=0.01)
    scores: list[Tensor] = []

    def ask() -> None:
        try:
            scores.append(reward(images, prompts))
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
    assert torch.equal(scores[0], ShapesReward()(images, prompts))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True)]
    + [("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("scorer", False), ("", False)],
)
def test_loopback_addresses(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
