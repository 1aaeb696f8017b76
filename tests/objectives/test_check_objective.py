"""Errors about what an objective declares and returns."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl_lightning.data.loaders import RolloutLoader
from solrl_lightning.errors import UserError
from solrl_lightning.objectives.base import Loss, Objective, check_loss, check_objective

VALUES = torch.ones(3, requires_grad=True)


class Declared(Objective):
    def __init__(self, **declared: Any) -> None:
        self.declared = declared

    @property
    def needs(self) -> Any:
        return self.declared.get("needs", {})

    def transitions(self, num_steps: int, iteration: int) -> range:
        return self.declared.get("transitions", range(0))

    def train_steps(self, seeds: Tensor, num_steps: int) -> Tensor:
        return self.declared.get("steps", super().train_steps(seeds, num_steps))

    def __call__(self, velocity: Tensor, batch: Any, **others: Tensor) -> Loss:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"needs": {"olld": 1}}, "every n-th micro-batch reads that velocity; got {'olld': 1}. See docs/ext"),
        ({"transitions": range(5)}, "transitions must be consecutive steps of range(0, 4); got range(0, 5)"),
        ({"steps": torch.tensor([[4]])}, "train_steps must return int64 [M, S] of numbers from 0 to 3; got torch.int"),
        ({"steps": torch.tensor([0])}, "train_steps must return int64 [M, S] of numbers from 0 to 3"),
        ({"steps": torch.tensor([[2]]), "transitions": range(1, 3)}, "of numbers from 0 to 1; got torch.int64 [[2]]"),
    ],
)
def test_invalid_declaration_is_an_error(declared: dict[str, Any], message: str) -> None:
    check_objective(Declared(needs={"old": 1, "reference": 2}, transitions=range(1, 4)), 4)
    with pytest.raises(UserError, match=f"objective=Declared is invalid: .*{re.escape(message)}"):
        check_objective(Declared(**declared), 4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (VALUES, "per_sample [3] with gradients for a micro-batch of 3 rows; got Tensor [3] with gradients"),
        (Loss(VALUES.detach(), {}), "got Tensor [3] without gradients"),
        (Loss([1.0] * 3, {}), "got list"),
        (Loss(VALUES, {"loss": VALUES.mean()}), "its metrics must have other names than loss and grad_norm; got loss"),
    ],
)
def test_invalid_loss_is_an_error(loss: Any, message: str) -> None:
    check_loss(Declared(), Loss(VALUES, {"m": VALUES.mean()}), 3)
    with pytest.raises(UserError, match=f"objective=Declared is invalid: .*{re.escape(message)}"):
        check_loss(Declared(), loss, 3)


def test_index_error_of_an_objective_ends_the_run() -> None:
    class Batches(list[int]):
        def __getitem__(self, number: Any) -> Any:
            raise IndexError("of the objective")

    loader = RolloutLoader[int](1)
    loader.fill(Batches([1]))
    with pytest.raises(IndexError, match="of the objective"):
        next(iter(loader))
