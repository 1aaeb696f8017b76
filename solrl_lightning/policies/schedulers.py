"""Schedulers of pipelines: the settings from which a model takes its noise levels, checked before it is loaded."""

import json
from collections.abc import Mapping
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from solrl_lightning.errors import UserError, did_you_mean, nearest, sentence
from solrl_lightning.options.rules import MAX_STEPS

# Class -> settings that must have this value, as samplers or levels ignore another one. The others are honoured, or
# belong to a solver, which `model.solver` replaces.
Settings = Mapping[str, Mapping[str, Any]]
_FIXED = {"num_train_timesteps": 1000, "stochastic_sampling": False, "invert_sigmas": False}
FLOW_MATCHING: Settings = {"FlowMatchEulerDiscreteScheduler": _FIXED}
_SPACINGS = {f"use_{spacing}_sigmas": False for spacing in ("karras", "exponential", "beta")}
_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "use_dynamic_shifting": False}
_REST = {"num_train_timesteps": 1000, "shift_terminal": None, "final_sigmas_type": "zero", "thresholding": False}
FLOW_MATCHING_OR_UNIPC: Settings = {
    "FlowMatchEulerDiscreteScheduler": _FIXED | {"use_dynamic_shifting": False},
    "UniPCMultistepScheduler": _FLOW | _SPACINGS | _REST,
}
_SHIFT = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
# What FlowMatchEulerDiscreteScheduler reads only with, and only without, use_dynamic_shifting.
_READ = {"shift": False, "time_shift_type": True, **dict.fromkeys(_SHIFT, True)}
_ROUNDING = 1e-5  # of a first level


def read_scheduler(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the class and settings of the scheduler in a pipeline folder."""
    cls = json.loads((folder / "model_index.json").read_text())["scheduler"][1]
    return cls, json.loads((folder / "scheduler" / "scheduler_config.json").read_text())


def check_scheduler(
    name: str, cls: str, config: Mapping[str, Any], settings: Settings, replaced: Mapping[str, Any] | None
) -> None:
    """Raise UserError unless the noise levels of a scheduler honour its settings, and descend from 1 to 0.

    Args:
        name: of the pipeline.
        settings: classes that the model takes; none for a model that makes its own levels.
        replaced: ``model.scheduler``.
    """
    key = f"model.scheduler={dict(replaced)}" if replaced else f"model.pretrained={name}"
    if not settings:
        if replaced:
            raise UserError(f"{key} is invalid: this model does not read its scheduler. Leave model.scheduler out.")
        return
    if cls not in settings:
        raise UserError(
            f"{key} is invalid: its scheduler must be a {' or '.join(settings)}, and is a {cls}. Take "
            "scheduler/scheduler_config.json and the class in model_index.json from the published model."
        )
    scheduler_class = getattr(diffusers, cls)
    defaults = {key: each.default for key, each in signature(scheduler_class.__init__).parameters.items()}
    for setting, value in (replaced or {}).items():
        if setting not in defaults:
            near = did_you_mean(nearest(setting, defaults))
            raise UserError(f"model.scheduler.{setting}={value} is invalid: a {cls} has no such setting.{near}")
    values = {**defaults, **config, **(replaced or {})}
    is_dynamic = bool(values.get("use_dynamic_shifting"))
    if unread := [setting for setting in replaced or {} if _READ.get(setting, is_dynamic) != is_dynamic]:
        rule = (
            f"this scheduler does not read {' and '.join(unread)} with use_dynamic_shifting={str(is_dynamic).lower()}"
        )
        fix = "base_shift and max_shift, or use_dynamic_shifting=false" if is_dynamic else "shift"
        raise UserError(f"{key} is invalid: {rule}. Set {fix}, in model.scheduler.")
    for setting, rule in settings[cls].items():
        value = values[setting]
        if value != rule and (rule is not False or value):  # null is false
            of, fix = key, "Correct it in scheduler/scheduler_config.json of the model's folder"
            if setting in (replaced or {}):
                of, fix = f"model.scheduler.{setting}={value}", "Leave it out"
            raise UserError(
                f"{of} is invalid: {setting} of its scheduler must be {json.dumps(rule)} for this model, and is "
                f"{json.dumps(value)}. {fix}."
            )
    problem = _problem_of_levels(scheduler_class, {**config, **(replaced or {})})
    if problem:
        raise UserError(
            f"{key} is invalid: the noise levels of its scheduler must descend from 1 to 0; {problem} Take the "
            "scheduler's settings of the published model."
        )


def resolution_shift(config: Any, tokens: int) -> float:
    """Return the pipelines' mu, linear in the number of image tokens."""
    return calculate_shift(tokens, *(config[name] for name in _SHIFT))


def noise_levels(scheduler: Any) -> Tensor:
    """Return the float32 [T + 1] levels of a scheduler whose timesteps are set. The first, all noise, is 1.

    A shift s makes it s / (1 + (s - 1)), which for a fifth of all s is another number than 1 in float32.
    """
    levels: Tensor = scheduler.sigmas.float().clone()
    if abs(float(levels[0]) - 1) < _ROUNDING:
        levels[0] = 1
    return levels


def _problem_of_levels(cls: Any, config: Mapping[str, Any]) -> str:
    """Return what is wrong with the levels at either end of the resolution shift; empty if nothing is."""
    try:
        scheduler = cls.from_config(dict(config))
        if not isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler) and "flow_shift" in scheduler.config:
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=scheduler.config.flow_shift)
        of_pipelines: tuple[dict[str, Any], ...] = (
            {"sigmas": np.linspace(1.0, 1 / MAX_STEPS, MAX_STEPS)},
            {"num_inference_steps": MAX_STEPS},
        )
        for name, steps in product(("base_image_seq_len", "max_image_seq_len"), of_pipelines):
            mu = resolution_shift(scheduler.config, scheduler.config[name])
            with np.errstate(all="ignore"):  # levels that are not finite are refused below
                scheduler.set_timesteps(**steps, mu=mu)
            levels = noise_levels(scheduler)
            if not bool((levels.diff() < 0).all()) or not 0.99 < float(levels[0]) <= 1:  # NaN is not below 0
                first = ", ".join(f"{float(level):.5g}" for level in levels[:3])
                return f"of {MAX_STEPS} steps, they begin with {first}."
    except (ValueError, TypeError, ArithmeticError, ImportError) as error:
        return sentence(error)
    return ""
