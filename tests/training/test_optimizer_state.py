"""Resuming an optimiser: state from the checkpoint, hyper-parameters from the configuration."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.training.optimizer_state import check_fits, keep_configured

START = torch.tensor([1.0, -2.0, 0.5])
GRADIENTS = [torch.tensor([0.3, -0.1, 0.7]), torch.tensor([-0.2, 0.4, 0.1]), torch.tensor([0.5, 0.2, -0.6])]
CONFIGURED: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, eps=1e-8)


def stepped(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().clone()


def built(start: Tensor, **options: Any) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], **options)
    keep_configured(optimizer, options)
    return parameter, optimizer


def adamw_step(x: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: int, options: Any) -> Tensor:
    """Return AdamW's update (Loshchilov and Hutter 2019) from the moments of ``step - 1`` earlier updates."""
    low, high = options["betas"]
    first = low * moments[0] + (1 - low) * gradient
    second = high * moments[1] + (1 - high) * gradient**2
    direction = (first / (1 - low**step)) / ((second / (1 - high**step)).sqrt() + options["eps"])
    return x - options["lr"] * (options["weight_decay"] * x + direction)


@pytest.mark.parametrize(
    "changed", [{"lr": 1e-3}, {"weight_decay": 0.5}, {"betas": (0.5, 0.9)}, {"eps": 0.3}, {"maximize": True}], ids=str
)
def test_changed_option_applies_to_restored_state(changed: dict[str, Any]) -> None:
    parameter, optimizer = built(START, **CONFIGURED)
    reached = stepped(parameter, optimizer, GRADIENTS[:2])
    state = copy.deepcopy(optimizer.state_dict())
    moments = (state["state"][0]["exp_avg"], state["state"][0]["exp_avg_sq"])
    options = CONFIGURED | changed
    parameter, optimizer = built(reached, **options)
    optimizer.load_state_dict(state)
    assert {key: optimizer.param_groups[0][key] for key in options} == options
    gradient = -GRADIENTS[2] if options.get("maximize") else GRADIENTS[2]
    expected = adamw_step(reached, gradient, moments, 3, options)
    torch.testing.assert_close(stepped(parameter, optimizer, GRADIENTS[2:]), expected)


class Running(torch.optim.SGD):
    """Keeps a running value among its options, as Prodigy does."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.defaults["distance"] = 1.0
        for group in self.param_groups:
            group["distance"] = 1.0


def test_running_values_among_the_options_are_restored() -> None:
    parameter = nn.Parameter(START.clone())
    first, resumed = (Running([parameter], lr=rate) for rate in (0.1, 0.2))
    for optimizer in (first, resumed):
        keep_configured(optimizer, ["lr"])
    first.param_groups[0]["distance"] = 5.0
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (resumed.param_groups[0]["distance"], resumed.param_groups[0]["lr"]) == (5.0, 0.2)


def test_state_of_another_optimizer_class_raises() -> None:
    _, optimizer = built(START, **CONFIGURED)
    state = optimizer.state_dict()
    check_fits(optimizer, state)
    with pytest.raises(UserError, match="optimizer._target_=RMSprop is invalid: .* holds the state of AdamW[.] Remove"):
        check_fits(torch.optim.RMSprop([nn.Parameter(START.clone())], lr=1e-2), state)
