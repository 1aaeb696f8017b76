"""``trainer``: Lightning's Trainer. One epoch is one iteration."""

import re
from typing import Annotated, Any, NoReturn

from pydantic import PlainValidator
from typing_extensions import Required, TypedDict

from solrl_lightning.errors import UserError
from solrl_lightning.options.rules import NODE, Broken, Count, is_one, is_whole, must_be, one_of

_STRATEGIES = ("auto", "single_device", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
_ONE_STEP = "An iteration takes its optimiser steps on the gradients of all its micro-batches; leave it out"


def _are_devices(value: Any) -> bool:
    if isinstance(value, list):
        return all(is_whole(each, 0) for each in value) and 0 < len(value) == len(set(value))
    return is_whole(value) or value == -1 or re.fullmatch(r"auto|-1|[1-9]\d*|(\d+,)+\d*", str(value)) is not None


Devices = must_be("auto, a number of devices of at least 1, or a list of their indices such as [0,1]", _are_devices)
Dtype = must_be(
    "32-true, as every dtype is set in the code and Lightning casts nothing",
    is_one(None, 32, "32", "32-true"),
    "Leave it out.",
)


Strategy = must_be(
    f"one of {', '.join(_STRATEGIES)}, as every rank holds the whole policy",
    lambda value: value in _STRATEGIES or isinstance(value, dict),  # build.instantiate_trainer checks what it makes
    "Use trainer.strategy=ddp.",
)


def _made_of(group: str, fix: str) -> PlainValidator:
    """Return a check that refuses each value of an argument, because the program makes the argument of a ``group``."""

    def check(value: Any) -> NoReturn:
        raise Broken(f"the program makes it of the group {group}.", fix=fix)

    return PlainValidator(check)


_EVALUATE = "Set evaluation.every=<iterations> instead."
_NO_BAR = "Leave it out, or remove the bar with ~callbacks.progress."
_OF_CALLBACKS = "Add one with +callbacks.<name>._target_=<class>, or remove one with ~callbacks.<name>."


class Trainer(TypedDict, total=False):
    """Its other arguments do what Lightning documents."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    accelerator: Annotated[str, one_of("auto", "cpu", "gpu", "cuda", "mps", "tpu")]
    """Kind of device; auto: a GPU if there is one."""
    devices: Annotated[int | str | list[int], Devices]
    """Number of devices, which share the prompts."""
    num_nodes: Count
    """Number of machines."""
    precision: Annotated[int | str | None, Dtype]
    strategy: Annotated[Any, Strategy]
    """How the ranks work together."""
    accumulate_grad_batches: Annotated[int, must_be("1", is_one(1), f"{_ONE_STEP}, or set model.micro_batch=<rows>.")]
    check_val_every_n_epoch: Annotated[int | None, must_be("1", is_one(None, 1), _EVALUATE)]
    limit_train_batches: Annotated[float | None, must_be("1.0", is_one(None, 1.0), f"{_ONE_STEP}.")]
    overfit_batches: Annotated[float, must_be("0.0", is_one(0, 0.0), f"{_ONE_STEP}.")]
    fast_dev_run: Annotated[Any, must_be("false", is_one(False), f"{_ONE_STEP}, or use experiment=smoke.")]
    val_check_interval: Annotated[float | None, must_be("1.0", is_one(None, 1.0), _EVALUATE)]
    max_steps: Annotated[int, must_be("-1", is_one(-1), "Set iterations=<number> instead.")]
    max_time: Annotated[Any, must_be("null", is_one(None), "Set max_seconds=<seconds> instead.")]
    logger: Annotated[Any, _made_of("logger", "Choose one with logger=<option> instead, as logger=none.")]
    callbacks: Annotated[Any, _made_of("callbacks", _OF_CALLBACKS)]
    enable_checkpointing: Annotated[Any, _made_of("callbacks", "Leave it out: a run resumes by its checkpoint.")]
    enable_progress_bar: Annotated[Any, _made_of("callbacks", _NO_BAR)]


def named_devices(trainer: Trainer) -> list[int]:
    """Return the indices of the devices that ``trainer.devices`` names; empty where it is a number or auto."""
    devices: Any = trainer.get("devices")
    if isinstance(devices, str) and "," in devices:  # Lightning's form of a list
        return [int(index) for index in devices.split(",") if index]
    return list(devices) if isinstance(devices, list) else []


def check_shares(per_iteration: int, evaluated: int, ranks: int) -> None:
    """Raise UserError unless all ranks of trainer=fsdp explore, train on and evaluate equally many prompts."""
    for key, count in {"prompts_per_iteration": per_iteration, "data.eval_prompts": evaluated}.items():
        if count % ranks:
            raise UserError(
                f"{key}={count} is invalid with trainer=fsdp: all ranks must have equally many prompts. Set it to a "
                f"multiple of {ranks}."
            )
