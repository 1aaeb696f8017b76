"""The check of the hub at start: its messages, and its duration when the hub does not answer."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants
from reward_servers import in_thread
from small_runs import Command, the_line

from solrl_lightning.cli import hub
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run

Compose = Callable[..., Run]
FLUX = ("model=flux1", "data=shapes")
NEEDS = "model.pretrained=black-forest-labs/FLUX.1-dev needs 34 GB of disk, a GPU of 80 GB (24 GB with the options of"


def check(cfg: Run) -> list[str]:
    return hub.check_hub(cfg)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.5")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide a hub that accepts connections and does not respond."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


class Forbidding(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.usefixtures("silent")
def test_silent_hub_error_names_model_requirements_in_time(compose: Compose) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="it is not on this machine, and the hub at .* does not answer: ") as error:
        check(compose(*FLUX))
    assert time.monotonic() - began < 30  # half a second on a quiet machine
    assert NEEDS in str(error.value) and "use model.pretrained=<local folder>" in str(error.value)
    with pytest.raises(UserError, match="^reward.pickscore.pretrained=yuvalkirstain/PickScore_v1 is invalid: "):
        check(compose("reward=pickscore"))


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("value", ["objective.beta=-1", "+reward.shapes.side=7", "+optimizer.fused=7"])
def test_wrong_value_of_a_class_comes_before_the_hub(command: Command, value: str) -> None:
    assert f"{value.lstrip('+')} is invalid" in the_line(command(*FLUX, "reward=shapes", value).err)


@pytest.mark.usefixtures("silent")
def test_cache_is_used_if_hub_is_silent(compose: Compose, cache: Path) -> None:
    (cache / "models--black-forest-labs--FLUX.1-dev").mkdir(parents=True)
    (note,) = check(compose(*FLUX))
    assert note.endswith(f"Using its cache {cache}.")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
    assert check(compose(*FLUX)) == []


def test_answering_hub_is_used_with_a_note_on_requirements(
    compose: Compose, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_thread(Forbidding) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        (note,) = check(compose(*FLUX))
        assert note.startswith(NEEDS) and "Its page: https://huggingface.co/black-forest-labs/FLUX.1-dev" in note
        assert not constants.HF_HUB_OFFLINE
        (cache / "models--black-forest-labs--FLUX.1-dev").mkdir(parents=True)
        assert check(compose(*FLUX)) == []


@pytest.mark.parametrize(
    ("arguments", "is_checked"),
    [
        ("", False),
        ("model=flux1 model.weights=random data=shapes", False),
        ("model=flux1 model.weights=random data=shapes model.preview_decoder=madebyollin/taef1", True),
        ("data=pickapic", True),
        ("task=evaluate data.train=hf://owner/name/train", False),  # evaluate does not read data.train
        ("reward=hpsv2", True),
        ("reward=hpsv2 reward.pretrained=. task=audit", False),
        ("task=generate task.prompts=[a] reward=hpsv2", False),
        ("task=serve reward=hpsv2", True),
        ("+reward.mine={_target_:a.B,weight:1.0,tokenizer:words}", False),
    ],
)
def test_hub_is_checked_only_if_needed(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, arguments: str, is_checked: bool
) -> None:
    calls = []
    monkeypatch.setattr(hub, "_silence", lambda *args: calls.append(args) or "")
    check(compose(*arguments.split()))
    assert bool(calls) == is_checked


def test_closed_port_is_reported_at_once(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(UserError, match="does not answer: .*Connection refused"):
            check(compose(*FLUX))
