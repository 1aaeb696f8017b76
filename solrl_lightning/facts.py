"""What a configuration means: facts that building, tasks and the command line share. Imports no torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from solrl_lightning.errors import UserError
from solrl_lightning.options.trainer import SHARDED

if TYPE_CHECKING:
    from solrl_lightning.data.prompts import PromptSets


def is_sharded(cfg: DictConfig) -> bool:
    """Whether the ranks share the frozen weights, as with trainer=fsdp."""
    return OmegaConf.select(cfg, "trainer.strategy._target_") == SHARDED


def reward_members(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """The entries of ``cfg.reward``, one for each chosen reward."""
    members: Any = OmegaConf.to_container(cfg.reward, resolve=True)
    return {name: member for name, member in members.items() if name not in ("pretrained", "combine")}


def requested_prompts(cfg: Any) -> list[str]:
    """The prompts of task=generate, from the command line or from a file."""
    from solrl_lightning.data.prompts import read_prompts  # imports torch, which --help and mistakes do without

    return list(cfg.task.prompts) or read_prompts(cfg.task.prompt_file, cfg.data.column)


def requested_weights(cfg: DictConfig) -> dict[str, str]:
    """The name of each model in task=generate, and its name in ``SolRLModule.sample``."""
    return ({"base": "base"} if cfg.task.base else {}) | ({"trained": "ema"} if cfg.ckpt is not None else {})


def prompt_sets(cfg: Any) -> "PromptSets":
    """The prompts that the task reads (``task.reads``); the other sets are empty."""
    from solrl_lightning.data.prompts import read_prompt_sets  # imports torch

    train, held_out = (getattr(cfg.data, name) if name in cfg.task.reads else None for name in ("train", "eval"))
    return read_prompt_sets(train, held_out, cfg.data.column)


def check_shares(counts: Mapping[str, int], ranks: int) -> None:
    """UserError unless all ranks of trainer=fsdp get equally many of the prompts counted by ``counts``, by key."""
    for key, count in counts.items():
        if count % ranks:
            raise UserError(
                f"{key}={count} is invalid with trainer=fsdp: all ranks must have equally many prompts. Set it to a "
                f"multiple of {ranks}."
            )
