"""What is told of the hub before anything is loaded, and how long that takes where it does not answer."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from omegaconf import DictConfig

from solrl_lightning import hub
from solrl_lightning.errors import UserError

Compose = Callable[..., DictConfig]
FLUX = ("model=flux1", "data=shapes")
NEEDS = "model.pretrained=black-forest-labs/FLUX.1-dev needs 34 GB of disk, a GPU of 48 GB or more, and a token"


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
    """A hub that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that answers, though not with a page."""

    class Refusing(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("silent")
def test_a_hub_that_says_nothing_is_told_in_time_with_what_a_model_needs(compose: Compose) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="is not on this machine, and the hub at .* does not answer: ") as refusal:
        hub.check_hub(compose(*FLUX))
    assert time.monotonic() - began < 5
    assert NEEDS in str(refusal.value) and "give model.pretrained=<local folder>" in str(refusal.value)
    with pytest.raises(UserError, match="^reward.pickscore.pretrained=yuvalkirstain/PickScore_v1 is not on this"):
        hub.check_hub(compose("reward=pickscore"))


@pytest.mark.usefixtures("silent")
def test_what_is_in_the_cache_of_a_silent_hub_is_used_without_asking_again(compose: Compose, cache: Path) -> None:
    (cache / "models--black-forest-labs--FLUX.1-dev").mkdir(parents=True)
    (told,) = hub.check_hub(compose(*FLUX))
    assert told.endswith(f"Its cache {cache} has to do.")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
    assert hub.check_hub(compose(*FLUX)) == []


@pytest.mark.usefixtures("answering")
def test_a_hub_that_answers_is_used_and_what_a_model_needs_is_told(compose: Compose, cache: Path) -> None:
    (told,) = hub.check_hub(compose(*FLUX))
    assert told.startswith(NEEDS) and "Its page: https://huggingface.co/black-forest-labs/FLUX.1-dev" in told
    assert not constants.HF_HUB_OFFLINE
    (cache / "models--black-forest-labs--FLUX.1-dev").mkdir(parents=True)
    assert hub.check_hub(compose(*FLUX)) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), False),
        (("model.preview_decoder=tiny",), False),
        (("model=flux1", "model.weights=random", "data=shapes"), False),
        (("model=flux1", "model.weights=random", "data=shapes", "model.preview_decoder=madebyollin/taef1"), True),
        (("data=pickapic",), True),
        (("data.eval=hf://owner/name/test",), True),
        (("task=evaluate", "data.train=hf://owner/name/train"), False),  # which it does not read
        (("reward=hpsv2",), True),
        (("reward=hpsv2", "reward.pretrained=.", "task=audit"), False),
        (("task=generate", "reward=hpsv2"), False),
        (("+reward.mine={_target_:a.B,weight:1.0,tokenizer:words}",), False),
    ],
)
def test_the_hub_is_asked_only_where_something_comes_from_it(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], wanted: bool
) -> None:
    asked = []
    monkeypatch.setattr(hub, "_silence", lambda *given: asked.append(given) or "")
    hub.check_hub(compose(*arguments))
    assert bool(asked) == wanted


def test_a_hub_that_refuses_connections_is_told_at_once(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(UserError, match="does not answer: .*Connection refused"):
            hub.check_hub(compose(*FLUX))
