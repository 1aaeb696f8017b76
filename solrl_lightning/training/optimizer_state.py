"""Restore the state of optimiser and schedule from a checkpoint, with hyper-parameters from the configuration."""

from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from solrl_lightning.errors import UserError

_CLASS = "class"  # key in the optimiser's state_dict


def keep_configured(optimizer: Optimizer, configured: Collection[str]) -> None:
    """Make ``optimizer.load_state_dict`` keep the ``configured`` options (lr, betas, ...) of ``optimizer``.

    torch's ``load_state_dict`` restores the options together with the state. Other options are restored: some
    optimisers, as Prodigy, keep running values there.
    """

    def with_configured(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in optimizer.defaults.items() if name in configured}
        return state | {"param_groups": [optimizer.defaults | group | options for group in state["param_groups"]]}

    optimizer.register_state_dict_post_hook(_record_class)
    optimizer.register_load_state_dict_pre_hook(with_configured)


class ConfiguredSchedule(LambdaLR):
    """Learning rate schedule that keeps the configured base rate after ``load_state_dict``."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of steps, and set the rates of the parameter groups."""
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})
        factors = [factor(self.last_epoch) for factor in self.lr_lambdas]
        self._last_lr = [base * factor for base, factor in zip(self.base_lrs, factors, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def check_shapes(optimizer: Optimizer) -> None:
    """Raise ValueError if a moment that Adam and its relatives keep has another shape than its parameter."""
    for parameter, state in optimizer.state.items():
        for name in state.keys() & {"exp_avg", "exp_avg_sq"}:
            if state[name].shape != parameter.shape:
                raise ValueError(f"{name} is {list(state[name].shape)} for a parameter of {list(parameter.shape)}")


def check_fits(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise UserError if ``state``, of an optimiser of ``keep_configured``, was written by another class."""
    configured = type(optimizer).__name__
    recorded = state.get(_CLASS, configured)
    if recorded != configured:
        raise UserError(
            f"optimizer._target_={configured} is invalid: a resumed run restores the optimiser's state, and the "
            f"checkpoint holds the state of {recorded}. Remove optimizer._target_, or start a new run with ckpt=null."
        )


def _record_class(optimizer: Optimizer, state: dict[str, Any]) -> None:
    state[_CLASS] = type(optimizer).__name__
