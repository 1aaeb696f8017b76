"""Settings of a pipeline's scheduler: levels are those of diffusers' pipeline, or one line before weights are read."""

import json
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from nano import PROMPTS, load_nano, model_class
from torch import Tensor

from solrl_lightning.errors import UserError
from solrl_lightning.policies import loading

FolderOf = Callable[[str], str]
EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
FLOW_UNIPC = {"_class_name": UNIPC, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
ALL = ("flux1", "flux2", "qwen_image", "sd3", "wan", "z_image")
RESHAPED = tuple(name for name in ALL if name != "wan")  # whose pipelines give a dynamic shift its mu
HONOURED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"use_dynamic_shifting": False, "shift": 2.5, "shift_terminal": None}, ALL),
    *(({"use_dynamic_shifting": False, "shift": shift, "shift_terminal": None}, ALL) for shift in (1.18, 1.32)),
    ({"use_dynamic_shifting": True, "shift_terminal": None}, RESHAPED),
    ({"use_dynamic_shifting": True, "base_shift": 0.2, "max_shift": 2.0, "base_image_seq_len": 4}, RESHAPED),
    ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, RESHAPED),
    ({"use_dynamic_shifting": None, "invert_sigmas": None}, ALL),
    ({"use_dynamic_shifting": False, "shift_terminal": 0.05}, ALL),
    ({"use_dynamic_shifting": False, "use_karras_sigmas": True}, ALL),
    ({"use_dynamic_shifting": False, "use_exponential_sigmas": True}, ALL),
]
REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"stochastic_sampling": True}, ALL, "stochastic_sampling of its scheduler must be false for this model, and is t"),
    ({"invert_sigmas": True}, ALL, "invert_sigmas of its scheduler must be false"),
    ({"num_train_timesteps": 500}, ALL, "num_train_timesteps of its scheduler must be 1000 for this model, and is 500"),
    ({"_class_name": "FlowMatchHeunDiscreteScheduler"}, ALL, f"must be a {EULER}.* and is a FlowMatchHeun"),
    ({"_class_name": "DPMSolverMultistepScheduler"}, ALL, f"must be a {EULER}.* and is a DPMSolverMultistep"),
    ({"_class_name": UNIPC}, RESHAPED, f"must be a {EULER}, and is a {UNIPC}"),
    ({"use_dynamic_shifting": True}, ("wan",), "use_dynamic_shifting of its scheduler must be false"),
    *[
        (FLOW_UNIPC | {key: value}, ("wan",), key)
        for key, value in {
            "use_karras_sigmas": True, "use_exponential_sigmas": True, "use_beta_sigmas": True, "shift_terminal": 0.1,
            "use_dynamic_shifting": True, "prediction_type": "epsilon", "use_flow_sigmas": False,
        }.items()
    ],
    ({"shift": -1.0, "use_dynamic_shifting": False}, ALL, "noise levels of its scheduler must descend from 1 to 0"),
    ({"shift": 0.01, "use_dynamic_shifting": False}, ALL, "of 1000 steps, they begin with 1.0001"),
    ({"shift": 1e5, "use_dynamic_shifting": False}, ALL, "of 1000 steps, they begin with 1, 1"),
    ({"shift_terminal": 1.5}, ALL, "must descend from 1 to 0"),
    ({"use_karras_sigmas": True, "use_beta_sigmas": True}, ALL, "must descend from 1 to 0; Only one of"),
    ({"use_dynamic_shifting": True, "base_image_seq_len": 64, "max_image_seq_len": 64}, RESHAPED, "division by zero"),
]  # fmt: skip


class Reached(Exception):
    """The noise levels of a pipeline are set, and its transformer is not run."""


def levels_of_pipeline(pipeline: DiffusionPipeline, resolution: int, steps: int, **options: Any) -> Tensor:
    set_timesteps = pipeline.scheduler.set_timesteps

    def stop(*args: Any, **kwargs: Any) -> None:
        set_timesteps(*args, **kwargs)
        raise Reached

    pipeline.scheduler.set_timesteps = stop
    # retrieve_timesteps looks the parameters up
    stop.__signature__ = signature(set_timesteps)  # type: ignore[attr-defined]
    options |= dict(num_inference_steps=steps, height=resolution, width=resolution, output_type="latent")
    with pytest.raises(Reached):
        pipeline(prompt=PROMPTS[0], **options)
    del pipeline.scheduler.set_timesteps
    return pipeline.scheduler.sigmas.float()


def write_scheduler(folder: Path, values: dict[str, Any]) -> None:
    cls = values.get("_class_name", EULER)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", cls]}))
    file = folder / "scheduler" / "scheduler_config.json"
    before = json.loads(file.read_text())
    kept = before if before["_class_name"] == EULER and cls == EULER else {}
    file.write_text(json.dumps({**kept, "_class_name": cls, **values}))


@pytest.fixture
def copied(folder_of: FolderOf, tmp_path: Path) -> Callable[[str], Path]:
    return lambda model: Path(shutil.copytree(folder_of(model), tmp_path / model))


@pytest.mark.parametrize("architecture", ALL)
def test_honoured_settings_give_the_levels_of_the_pipeline(architecture: str, copied: Callable[[str], Path]) -> None:
    folder = copied(architecture)
    write_scheduler(folder, {})
    model = load_nano(architecture, str(folder))
    pipeline = model.pipeline
    original = pipeline.scheduler
    options = model.call_options | ({"num_frames": 5} if architecture == "wan" else {})
    for values, models in HONOURED:
        if architecture not in models:
            continue
        pipeline.scheduler = original.from_config(original.config, **values)
        for steps in (1, 2, 7):
            ours = model.sigmas(steps)
            if steps == 1 and pipeline.scheduler.config.shift_terminal:
                assert ours.tolist() == [1, 0]  # where diffusers divides by zero
                continue
            theirs = levels_of_pipeline(pipeline, model.resolution, steps, **options)
            assert ours[0] == 1 and abs(theirs[0] - 1) < 1e-6, (values, steps)  # which a shift of 1.18 rounds
            assert torch.equal(ours[1:], theirs[1:]), (values, steps)
        assert np.all(np.diff(model.sigmas(7).numpy()) < 0), values


@pytest.mark.parametrize("model", ["sana", "wan"])
def test_any_flow_shift_begins_with_pure_noise(model: str, folder_of: FolderOf) -> None:
    """Otherwise flow_grpo's first step would have a noise of sqrt(1 / rounding), or the solver would refuse a level."""
    adapter = load_nano(model, folder_of(model))
    for hundredths in range(100, 500):
        scheduler = adapter.pipeline.scheduler
        adapter.pipeline.scheduler = scheduler.from_config(scheduler.config, flow_shift=hundredths / 100)
        levels = adapter.sigmas(4)
        assert levels[0] == 1 and bool((levels.diff() < 0).all()), hundredths


def test_a_scheduler_that_was_made_from_unipc_has_its_own_shift(copied: Callable[[str], Path]) -> None:
    folder = copied("wan")
    pipeline = load_nano("wan", str(folder)).pipeline
    config = {**pipeline.scheduler.config, "flow_shift": 3.0, "use_flow_sigmas": True}
    FlowMatchEulerDiscreteScheduler.from_config(config, shift=8.0).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text()) | {"scheduler": ["diffusers", EULER]}
    (folder / "model_index.json").write_text(json.dumps(index))
    assert json.loads((folder / "scheduler" / "scheduler_config.json").read_text())["flow_shift"] == 3.0
    model = load_nano("wan", str(folder))
    theirs = levels_of_pipeline(model.pipeline, model.resolution, 5, **model.call_options, num_frames=5)
    assert torch.equal(model.sigmas(5), theirs)


@pytest.mark.parametrize("model", ["sd3", "qwen_image", "wan"])  # of a fixed shift, of a dynamic one, and of UniPC
def test_other_settings_are_one_line_before_weights_are_read(
    model: str, copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(model)
    monkeypatch.setattr(loading, "load_module", lambda *args: pytest.fail("weights are read"))
    index, config = folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"
    before = index.read_text(), config.read_text()
    for values, models, message in REFUSED:
        if model in models:
            write_scheduler(folder, values)
            with pytest.raises(UserError, match=message) as error:
                load_nano(model, str(folder))
            assert "\n" not in str(error.value)
            index.write_text(before[0])
            config.write_text(before[1])


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("z_image", {"shiift": 4.0}, "model.scheduler.shiift=4.0 is invalid: .* Did you mean shift"),
        ("z_image", {"shift": -1.0}, r"model.scheduler=\{'shift': -1.0\} is invalid: .* descend"),
        (
            "flux1",
            {"use_dynamic_shifting": True, "shift": 3.0},
            "does not read shift with use_dynamic_shifting=true. Set",
        ),
        (
            "sd3",
            {"use_dynamic_shifting": False, "max_shift": 1.0},
            "read max_shift with use_dynamic_shifting=false. Set",
        ),
        ("flux1", {"stochastic_sampling": 1.0}, "model.scheduler.stochastic_sampling=1.0 is invalid"),
        ("sana", {"flow_shift": 3.0}, "this model does not read its scheduler"),
    ],
)
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_model_scheduler_is_checked(
    model: str,
    values: dict[str, float],
    message: str,
    weights: str,
    folder_of: FolderOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "load_module", lambda *args: pytest.fail("weights are read"))
    with pytest.raises(UserError, match=message):
        load_nano(model, folder_of(model), scheduler=values, weights=weights, device="meta")


def test_every_policy_names_its_schedulers() -> None:
    assert model_class("sana").schedulers == {} and set(model_class("wan").schedulers) == {EULER, UNIPC}
