"""The cluster: connect to it, or start one on this machine, and start the explorers."""

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

from solrl_lightning import __version__
from solrl_lightning.errors import UserError
from solrl_lightning.explorers.actor import Explorer
from solrl_lightning.explorers.sampler import REQUESTS
from solrl_lightning.names import AUTO
from solrl_lightning.options.precision import Precision
from solrl_lightning.options.run import Run
from solrl_lightning.quantization.backends import recorded_precision
from solrl_lightning.rewards.addresses import TOKEN

_LOCAL, _GPUS = "local", "CUDA_VISIBLE_DEVICES"
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**29)}
"""Keeps memory that a thread has freed: to get it again costs an explorer on a CPU up to a tenth of its seconds."""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **MALLOC}
"""Of a cluster that begins here; by default any other process precedes its workers."""


@contextmanager
def explorers_of(cfg: Run, rank: int, ranks: int, device: torch.device) -> Iterator[list[Any]]:
    """Yield the explorers of a rank, which load their models; those that the cluster has no room for yet start later.

    Each rank connects by itself and owns every ``ranks``-th explorer and at least one, because it explores its own
    prompts only: no rank waits for the answers of another one, and Ray ends its explorers with it.

    Raises:
        UserError: there is no such cluster, or it has another version.
    """
    options, address = cfg.explorers, cfg.explorers.address or os.environ.get("RAY_ADDRESS", _LOCAL)
    on_sigterm, visible = signal.getsignal(signal.SIGTERM), os.environ.get(_GPUS)
    local: dict[str, Any] = {}
    if address == _LOCAL:
        if ranks > 1:
            rule = "each of several ranks would start a cluster of its own. Start one with 'ray start --head', and set"
            raise UserError(f"explorers.address=null is invalid: {rule} explorers.address=auto.")
        gpus, cpus = _other_gpus(device), math.ceil(options.count * options.resources.num_cpus)
        os.environ.update({**ENVIRONMENT, **os.environ, _GPUS: ",".join(gpus)})  # the GPUs that explorers get
        local = {"num_cpus": cpus, "num_gpus": len(gpus), "include_dashboard": False}
    try:
        host, colon, port = address.rpartition("://")[2].rpartition(":")
        if colon:  # Ray would try for a quarter of an hour
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, logging_level="warning", **local)
    except Exception as error:  # Ray raises this class itself, too
        reason = " ".join(str(error).split()).rstrip(".")
        join = "join this machine to one with 'ray start --address=<host>:6379' and the cluster's ~/.ray/auth_token"
        join += ", run export RAY_AUTH_MODE=token for a cluster with a token"
        fix = f"Start a cluster with 'ray start --head', {join}, or leave it out."
        if "AF_UNIX" in reason:  # a path in the folder of temporary files, which a job of SLURM may name
            fix = "Set a folder with a short name, as in RAY_TMPDIR=/tmp."
        raise UserError(f"explorers.address={address} is invalid: {reason}. {fix}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set its own, which ends the run without a checkpoint
        os.environ.pop(_GPUS, None)
        if visible is not None:
            os.environ[_GPUS] = visible
    # Ray ends this process without a word as soon as the Ray of this machine has ended, or a minute after the head.
    resume = f"Start it again, and resume with ckpt=last hydra.run.dir={cfg.run_dir}"
    says = f"error: Ray has ended here or at the head of the cluster, or this process was killed. {resume}"
    witness = subprocess.Popen(["sh", "-c", 'read -r _ || echo "$0" >&2', says], stdin=subprocess.PIPE)
    try:
        needs = options.resources.model_dump(exclude_none=True)
        needs.setdefault("num_gpus", min(1, int(ray.cluster_resources().get("GPU", 0))))
        always = {"max_restarts": -1, "max_concurrency": REQUESTS, "scheduling_strategy": "SPREAD"}
        arguments = _options(cfg), __version__, os.getcwd(), os.environ.get(TOKEN, "")
        actor = ray.remote(Explorer).options(**needs, **always)
        yield [actor.remote(*arguments) for _ in range(rank, max(options.count, ranks), ranks)]
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
    """Return the GPUs of this machine without the run's, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get(_GPUS)
    names = [*map(str, range(torch.cuda.device_count()))] if visible is None else [*filter(None, visible.split(","))]
    return [name for index, name in enumerate(names) if index != device.index]
