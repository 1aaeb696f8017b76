"""``model.gradient_checkpointing=auto``: the least recomputation with which training fits its device."""

import logging
from typing import Any

import torch

from solrl_lightning.machine.memory import total_memory
from solrl_lightning.options.run import Run
from solrl_lightning.policies.config_files import config_folder
from solrl_lightning.quantization import resolve_from
from solrl_lightning.sizing.footprint import RECOMPUTED, RESERVE
from solrl_lightning.sizing.plan import plan_run, without_files

log = logging.getLogger(__name__)

_ALLOCATOR = 2e9  # bytes of CUDA and of the allocator's cache


def settle_checkpointing(cfg: Run, device: torch.device, devices: int = 1) -> Run:
    """Return the options for training on one of ``devices`` with a choice for ``auto``, and log it.

    Call it when the rewards are on the device: they may take more than `RESERVE`.
    """
    blocks: Any = True
    if config_folder(cfg.model.pretrained) is None:
        log.info("%s=auto is true: there are no config files of %s to plan by", RECOMPUTED, cfg.model.pretrained)
    else:
        room = total_memory(device) - RESERVE * 1e9
        if device.type == "cuda":
            room = min(room, torch.cuda.mem_get_info(device)[0] - _ALLOCATOR)
        backend = resolve_from(cfg.ckpt, cfg.precision.name, cfg.precision.backend, device)
        run = plan_run(without_files(cfg), backend, devices=devices, room=room)
        blocks = run.here[RECOMPUTED]
        log.info("%s", run.footprint.explain(run.options, room))
    settled = cfg.model_copy(deep=True)
    settled.model.gradient_checkpointing = blocks
    policy: dict[str, Any] = settled.model.policy  # type: ignore[assignment]
    policy.update(dict.fromkeys(policy.keys() & {"gradient_checkpointing"}, blocks))
    return settled
