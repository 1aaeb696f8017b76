"""The configuration tree, which is also the manual; installed as ``solrl_lightning.conf``."""

import math
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from solrl_lightning.cli.config import as_written, finding, own_sources
from solrl_lightning.cli.launch import launched
from solrl_lightning.names import trained_reward

# ${reward_names:} is the chosen rewards joined by "+": Hydra's own ${hydra:runtime.choices.reward} has no lists.
OmegaConf.register_new_resolver(
    "reward_names",
    lambda *, _root_: "+".join(_names(_root_)),
    replace=True,
)
# ${trained_reward:} is the name of the reward that is trained on, in eval/<name>: WeightedRewards.name.
OmegaConf.register_new_resolver(
    "trained_reward",
    lambda *, _root_: trained_reward({name: _root_.reward[name].weight for name in _names(_root_)}),
    replace=True,
)
# ${launched:<pattern>} is ${now:<pattern>}, but the same in every rank.
OmegaConf.register_new_resolver("launched", launched, replace=True, use_cache=True)
# ${between:<pool>,<keep>} is their geometric mean, of equal ratios to both.
OmegaConf.register_new_resolver("between", lambda *counts: _geometric_mean(*counts), replace=True)
# ${selecting:<pool>,<keep>} is a pool that leaves a choice.
OmegaConf.register_new_resolver("selecting", lambda pool, keep: 4 * keep if pool == keep else pool, replace=True)
# ${command:} is what this command has chosen, for another one: its overrides, and where they find options.
OmegaConf.register_new_resolver("command", lambda: _command(HydraConfig.get()), replace=True)
OmegaConf.register_new_resolver("folder_name", lambda folder: Path(folder).name, replace=True)


def _geometric_mean(pool: Any, keep: Any) -> Any:
    """Return a whole number; ``keep`` if one of them is none above 0, which the options report."""
    are_counts = all(type(count) is int and count > 0 for count in (pool, keep))
    return round(math.sqrt(pool * keep)) if are_counts else keep


def _command(hydra: Any) -> ListConfig:
    return ListConfig([*finding(own_sources(hydra)), *as_written(hydra.overrides.task)])


def _names(cfg: DictConfig) -> list[str]:
    return [str(name) for name in cfg.reward if name not in ("pretrained", "combine")]
