"""What a resumed run restores of its optimiser and schedule: their state, under the configured hyper-parameters."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from solrl_lightning.errors import UserError

_CLASS = "class"  # key in the optimiser's state_dict


def keep_configured(optimizer: Optimizer) -> Optimizer:
    """Makes ``optimizer.load_state_dict`` keep every option of the parameter groups as ``optimizer`` was built with.

    torch itself restores lr, betas, weight decay, ... together with the moments.
    """
    optimizer.register_state_dict_post_hook(_record_class)
    optimizer.register_load_state_dict_pre_hook(_with_own_options)
    return optimizer


class ConfiguredSchedule(LambdaLR):
    """A learning rate schedule whose base rate, after ``load_state_dict``, is the configured one."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of steps, and set the rates of the parameter groups."""
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})
        factors = [factor(self.last_epoch) for factor in self.lr_lambdas]
        self._last_lr = [base * factor for base, factor in zip(self.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def check_fits(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """UserError if ``state``, written by an optimiser of ``keep_configured``, is that of another class."""
    own = type(optimizer).__name__
    found = state.get(_CLASS, own)
    if found != own:
        raise UserError(
            f"optimizer._target_={own} is invalid: a continued run restores the state of its optimiser, and the "
            f"checkpoint holds that of {found}. Leave optimizer._target_ out, or train from the start with ckpt=null."
        )


def _record_class(optimizer: Optimizer, state: dict[str, Any]) -> None:
    state[_CLASS] = type(optimizer).__name__


def _with_own_options(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return state | {"param_groups": [group | optimizer.defaults for group in state["param_groups"]]}
