"""Addresses and the token of the servers of this package. Imports no torch: the configuration is checked with it."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from solrl_lightning.errors import UserError
from solrl_lightning.machine.packages import check_installed

HTTP = "solrl_lightning.rewards.http.HTTPReward"
VLM = "solrl_lightning.rewards.vlm.VLMReward"
TOKEN = "SOLRL_REWARD_TOKEN"  # environment variable
_URL = re.compile(r"https?://([^][/?#@:]+|\[[0-9a-f:.]+\])(:\d+)?([/?#]|$)", re.IGNORECASE)


def read_token() -> str:
    """Return the token in the environment, empty without one. Raises ``UserError`` if no HTTP header can hold it."""
    token = os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"{TOKEN} is invalid: it must be printable ASCII. Set it with export {TOKEN}=<token>.")
    return token


def check_url(key: str, url: object) -> None:
    """Raise ``UserError`` unless ``url``, the value of ``key``, is an address of http or https without a password."""
    if not _URL.match(str(url)):
        shown = "<hidden>" if "@" in str(url) else url
        raise UserError(
            f"{key}={shown} is invalid: it must begin with http:// or https://, a host and, if any, the number of its "
            "port, and have no user or password. Set "
            f"{key}=http://<host>:<port>/<path>, and the token with export {TOKEN}=<token>."
        )


def check_served(rewards: Mapping[str, Mapping[str, Any]], combine: str, host: str, port: int) -> None:
    """Raise ``UserError`` if task=serve cannot serve the rewards at its address, or must not without a token."""
    if posting := [name for name, member in rewards.items() if member["_target_"] == HTTP]:
        raise UserError(
            f"reward.{posting[0]} is invalid with task=serve: a server of its own scores that reward. Choose another "
            "reward."
        )
    if combine != "sum":
        raise UserError(
            f"reward.combine={combine} is invalid with task=serve: it compares the candidates of a prompt, and an "
            "answer has one number for an image. Leave it out here, and set it for the run, with a server a reward."
        )
    check_installed("task=serve", "fastapi", "uvicorn", of="solrl-lightning[serve]")
    token = read_token()
    bound(host, 0).close()  # on any port: a misspelt name needs no token
    if not token and not is_loopback(host):
        raise UserError(
            f"task.host={host} is invalid without a token: other machines can reach it. Set one with "
            f"export {TOKEN}=<token>, here and where the run is, or leave task.host out."
        )
    bound(host, port).close()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to the address; it refuses connections until the server listens.

    Raises:
        UserError: the name of the host does not resolve, or the address is in use or not of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"task.host={host} task.port={port} is invalid: it cannot be listened on: {error.strerror}. Set "
            "task.port=<another>, or task.host to an address of this machine: 0.0.0.0 for all of them."
        ) from error
    return listener
