"""The configuration tree, which is also the manual; installed as ``solrl_lightning.conf``."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from solrl_lightning.cli.launch import launched

# ${reward_names:} is the chosen rewards joined by "+": Hydra's own ${hydra:runtime.choices.reward} has no lists.
OmegaConf.register_new_resolver(
    "reward_names",
    lambda *, _root_: "+".join(_names(_root_)),
    replace=True,
)
# ${trained_reward:} is the name of the reward that is trained on, in eval/<name>: WeightedRewards.name.
OmegaConf.register_new_resolver(
    "trained_reward",
    lambda *, _root_: _names(_root_)[0] if len(_names(_root_)) == 1 else "weighted_sum",
    replace=True,
)
# ${launched:<pattern>} is ${now:<pattern>}, but the same in every rank.
OmegaConf.register_new_resolver("launched", launched, replace=True, use_cache=True)
OmegaConf.register_new_resolver("folder_name", lambda folder: Path(folder).name, replace=True)


def _names(cfg: DictConfig) -> list[str]:
    return [str(name) for name in cfg.reward if name not in ("pretrained", "combine")]
