"""The cluster: connect to it, or start one on this machine, and place the explorers."""

import math
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from solrl_lightning import __version__
from solrl_lightning.errors import UserError
from solrl_lightning.explorers.actor import Explorer
from solrl_lightning.explorers.sampler import REQUESTS
from solrl_lightning.names import AUTO
from solrl_lightning.options.precision import Precision
from solrl_lightning.options.run import Run
from solrl_lightning.quantization.backends import recorded_precision

PLACING = 60.0
"""Seconds in which a cluster must have a place for an explorer."""
_LOCAL, _GPUS = "local", "CUDA_VISIBLE_DEVICES"
ENVIRONMENT = {  # of a cluster that begins here
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default 15, so that any other process is first
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it listens at 127.0.0.1; by default so on the systems of its name
}


@contextmanager
def explorers_of(cfg: Run, rank: int, ranks: int, device: torch.device) -> Iterator[list[Any]]:
    """Yield the explorers of a rank, one of which has its place in the cluster; they load their models.

    Each rank connects by itself and owns every ``ranks``-th explorer, because it explores its own prompts only: no rank
    waits for the answers of another one, and Ray ends its explorers with it.

    Raises:
        UserError: there is no such cluster, it has another version, or no room for an explorer.
    """
    options, address = cfg.explorers, cfg.explorers.address or os.environ.get("RAY_ADDRESS", _LOCAL)
    if ranks > 1 and address == _LOCAL:
        raise UserError(
            "explorers.address=null is invalid: each of several ranks would start a cluster of its own. Start one with "
            "'ray start --head', and set explorers.address=auto."
        )
    if options.count < ranks:
        raise UserError(f"explorers.count={options.count} is invalid: each of the {ranks} ranks needs at least one.")
    on_sigterm, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    local: dict[str, Any] = {}
    if address == _LOCAL:
        gpus, cpus = _other_gpus(device), math.ceil(options.count * options.resources.num_cpus)
        os.environ.update({**ENVIRONMENT, **environment, _GPUS: ",".join(gpus)})  # those that explorers get
        local = {"num_cpus": cpus, "num_gpus": len(gpus), "include_dashboard": False}
    try:
        host, colon, port = address.rpartition("://")[2].rpartition(":")
        if colon:  # Ray would try for a quarter of an hour
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, logging_level="warning", **local)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        fix = "Start a cluster with 'ray start --head', or leave it out."
        raise UserError(f"explorers.address={address} is invalid: {reason}. {fix}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set its own, which ends the run without a checkpoint
        for name in {_GPUS, *ENVIRONMENT} - environment.keys():
            os.environ.pop(name, None)
        os.environ.update(environment)
    # Ray ends this process without a word as soon as the Ray of this machine has ended, or a minute after the head.
    resume = f"Start it again, and resume with ckpt=last hydra.run.dir={cfg.run_dir}"
    says = f"error: Ray has ended here or at the head of the cluster, or this process was killed. {resume}"
    witness = subprocess.Popen(["sh", "-c", 'read -r _ || echo "$0" >&2', says], stdin=subprocess.PIPE)
    try:
        needs = options.resources.model_dump(exclude_none=True)
        needs.setdefault("num_gpus", min(1, int(ray.cluster_resources().get("GPU", 0))))
        always = {"max_restarts": -1, "max_concurrency": REQUESTS, "scheduling_strategy": "SPREAD"}
        actor, arguments = ray.remote(Explorer).options(**needs, **always), (_options(cfg), __version__, os.getcwd())
        explorers = [actor.remote(*arguments) for _ in range(rank, options.count, ranks)]
        if not ray.wait([explorer.__ray_ready__.remote() for explorer in explorers], timeout=PLACING)[0]:
            rooms = [f"{_text(node['Resources'])} on {node['NodeManagerAddress']}" for node in ray.nodes()]
            raise UserError(
                f"explorers.resources={needs} is invalid: the cluster has no room for an explorer. It has "
                f"{', '.join(rooms)}; {_text(ray.available_resources())} are free. Lower them, or add a machine."
            )
        for explorer in explorers:
            explorer.ready.remote()  # loads its model while the run loads its own
        yield explorers
    finally:
        ray.shutdown()
        witness.communicate(b"\n")


def _options(cfg: Run) -> Run:
    """Return those that an explorer builds its module from."""
    options, cfg = cfg.explorers, cfg.model_copy(deep=True)
    if options.precision is not None:
        cfg.precision = Precision(name=options.precision, backend=AUTO)
    elif cfg.ckpt is not None and cfg.precision.name == AUTO:
        cfg.precision = Precision(name=recorded_precision(cfg.ckpt), backend=cfg.precision.backend)
    cfg.ckpt = None
    cfg.model.rollout_batch = options.rollout_batch or cfg.model.rollout_batch
    cfg.family.compile = cfg.family.compile if options.compile is None else options.compile
    return cfg


def _other_gpus(device: torch.device) -> list[str]:
    """Return the GPUs of this machine without that of the run, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get(_GPUS)
    names = [*map(str, range(torch.cuda.device_count()))] if visible is None else [*filter(None, visible.split(","))]
    return [name for index, name in enumerate(names) if index != device.index]


def _text(resources: dict[str, float]) -> str:
    return " ".join(f"{name}={resources.get(name, 0):g}" for name in ("CPU", "GPU"))
