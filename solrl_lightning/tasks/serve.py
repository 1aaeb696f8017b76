"""task=serve: the chosen rewards as an HTTP server for ``reward=http``; docs/rewards/http.md has the format."""

import ipaddress
import socket
from pathlib import Path

from omegaconf import DictConfig

from solrl_lightning.build import build_rewards, device_of, prepare_device
from solrl_lightning.checks import reward_members
from solrl_lightning.errors import UserError
from solrl_lightning.rewards.http import TOKEN, read_token
from solrl_lightning.run_folder import remove_unused


def serve(cfg: DictConfig) -> None:
    """Load the rewards and answer requests until Ctrl-C or SIGTERM, which wait for the requests in work.

    Raises:
        UserError: fastapi or uvicorn is not installed, a reward is itself that of a server, the address cannot be
            listened on, or it is not this machine's own and there is no token.
    """
    try:
        from solrl_lightning.rewards.server import Server, create_app
    except ModuleNotFoundError as error:
        raise UserError(
            f"task=serve is invalid: the package {error.name} is not installed. Install it with "
            'pip install "solrl-lightning[serve]".'
        ) from error
    if "http" in reward_members(cfg):
        raise UserError(
            "reward=http is invalid with task=serve: a server of its own scores that reward. Choose another reward."
        )
    host, token = str(cfg.task.host), read_token()
    if not token and not is_loopback(host):
        raise UserError(
            f"task.host={host} is invalid without a token: other machines can reach it. Set one with "
            f"export {TOKEN}=<token>, here and where reward=http runs, or leave task.host out."
        )
    with bound(host, cfg.task.port) as listener:
        device = device_of(cfg)
        prepare_device(device)
        rewards = build_rewards(cfg, device)
        app = create_app(rewards, device, token, cfg.task.max_images, cfg.task.max_pixels)
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}/score"
        Server(app, f"{rewards.name} on {device}: {url} (Ctrl-C ends)").run_until_signal(listener)
    remove_unused(Path(cfg.run_dir))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it refuses connections until the server listens. UserError if it is in use."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"task.host={host} task.port={port} is invalid: it cannot be listened on: {error.strerror}. Set "
            "task.port=<another>."
        ) from error
    return listener
