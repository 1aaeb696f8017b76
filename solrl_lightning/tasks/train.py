"""task=train: align the policy with the reward."""

import logging
from functools import partial
from pathlib import Path

import torch
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import DictConfig

from solrl_lightning.build import build_loop, build_module, build_trainer, levels_of
from solrl_lightning.callbacks.common import file_logger, find_callback
from solrl_lightning.callbacks.summary import RunSummary, base_and_final
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.errors import UserError
from solrl_lightning.files import read_checkpoint
from solrl_lightning.optimizer_state import check_fits
from solrl_lightning.run_folder import LOG, commit_overrides, is_resuming
from solrl_lightning.tasks.plan import planned_peak

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> float | None:
    """Train, or resume from ``cfg.ckpt``; return the final held-out reward, or None without an evaluation.

    Writes the files that the README lists into the run folder, also when interrupted.

    Raises:
        UserError: the checkpoint has another optimiser or other adapters, or Lightning rejects the configuration.
    """
    checkpoint = None if cfg.ckpt is None else read_checkpoint(cfg.ckpt)
    if checkpoint is not None:
        optimizer = instantiate(cfg.optimizer)([torch.zeros(1, requires_grad=True)])
        for state in checkpoint["optimizer_states"]:
            check_fits(optimizer, state)
    seed_everything(cfg.seed, verbose=False)
    trainer = build_trainer(cfg)
    folder = Path(cfg.run_dir)
    # The recorded command line changes once the checkpoint is loaded.
    if is_resuming(folder) and trainer.is_global_zero:
        commit = LambdaCallback(on_train_start=lambda *_: commit_overrides(folder))
        trainer.callbacks.append(commit)  # type: ignore[attr-defined]
    stages = [stage for level in levels_of(cfg) for stage in level]
    module = build_module(cfg, trainer.strategy.root_device, stages)
    if checkpoint is None and cfg.model.init_lora is not None:
        module.samplers.start_from(Path(cfg.model.init_lora).expanduser())
    if checkpoint is not None:
        module.on_load_checkpoint(checkpoint)  # an error about other adapters must precede the loggers' first write
    if module.samplers.layer_table:
        file_logger.info("%s", module.samplers.layer_table)
        log.info("%s; table in %s", module.samplers.layer_table.splitlines()[-1].strip(), folder / LOG)
    summary = find_callback(trainer, RunSummary)
    if summary is not None and module.policy.device.type == "cuda":
        summary.planned_memory = partial(planned_peak, cfg, module.policy, trainer.world_size)
    loop = build_loop(cfg, trainer, module.objective)
    held_out = RankPrompts(module.eval_prompts, trainer.global_rank, trainer.world_size)
    try:
        if cfg.ckpt is None:
            trainer.validate(module, held_out, verbose=False)
        trainer.fit(module, loop.loader, held_out, ckpt_path=cfg.ckpt, weights_only=True)
    except MisconfigurationException as error:  # for example, a callback of Lightning that needs a logger
        raise UserError(f"Lightning cannot run these callbacks, loggers and trainer together: {error}") from error
    return base_and_final(module.eval_history, module.rewards.name)[1]
