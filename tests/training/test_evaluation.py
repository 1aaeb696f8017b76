"""What an evaluation says of itself before its results."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from solrl_lightning.build import build_model
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError
from solrl_lightning.metrics.images import STATISTICS
from solrl_lightning.options.model import Model
from solrl_lightning.options.run import Run
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.training import evaluation as module
from solrl_lightning.training.evaluation import Estimate, Evaluation, evaluation_errors, means_of


def test_an_estimate_is_logged_once_and_leaves_out_the_batch_that_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimate, clock = Estimate(), iter([0.0, 300.0, 305.0, 312.0, 320.0, 330.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.INFO):
        for done in (0, 24, 48, 72, 96, 480):
            estimate(lambda done, total: None, done, 480)
    assert caplog.messages == ["an evaluation takes about 2 minutes here"]  # 12 s for 48 of 480 images


def test_short_evaluations_one_after_the_other_are_not_one_long_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimate, clock = Estimate(), iter([0.0, 2.0, 60.0, 62.0])
    monkeypatch.setattr("solrl_lightning.training.evaluation.time.perf_counter", lambda: next(clock))
    with caplog.at_level("INFO"):
        for done in (32, 64, 32, 64):
            estimate(lambda done, total: None, done, 64)
    assert not caplog.messages


def test_evaluations_with_other_noise_measure_the_same_and_do_not_compare() -> None:
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    one, other, longer = (
        Evaluation([Prompt("a red circle", {"count": 1})], rewards, "euler", steps, 2, seed)
        for steps, seed in ((4, 7), (4, 8), (5, 7))
    )
    assert one.digest == other.digest != longer.digest
    assert len({each.digest_with_noise for each in (one, other, longer)}) == 3
    assert Evaluation([Prompt("a red circle", {"count": 2})], rewards, "euler", 4, 2, 7).digest != one.digest


SAMPLING = (
    "model.resolution=64 model.max_sequence_length=6 model.eval_steps=7 "
    "model.solver=dpm2 model.scheduler={shift:3.0} model.dtypes.transformer=float32 base_weights=int8"
).split()
IN_FILES = "pretrained variant transformer_weights fused_lora weights init_lora lora train".split()  # with digests
OF_OTHER_MODELS = "guidance guidance_scale num_frames frames flow_shift input_image policy".split()
SAME = (
    "needs decode_batch preview_decoder embeddings gradient_checkpointing iterations prompts_per_iteration "
    "evaluation_every probe_every data full_steps preview_steps prefix_steps rung_steps explore_decoder rollout_batch "
    "learning_rate train_timestep_fraction micro_batch max_grad_norm kl_weight ram_strength grpo_clip_range "
    "learning_rates quantization"
).split()


def test_evaluations_of_other_sampling_do_not_compare(compose: Callable[..., Run]) -> None:
    keys = {override.split("=")[0].split(".")[1] for override in SAMPLING if override.startswith("model.")}
    assert (
        keys | {*IN_FILES, *OF_OTHER_MODELS, *SAME} == Model.model_fields.keys()
    )  # a new option belongs to one of them
    same = ["model.decode_batch=1", "model.full_steps=4", "model.micro_batch=8", "model.kl_weight=0"]
    digests = {}
    for line in ["seed=1", *same, *SAMPLING]:
        evaluation = build_model(compose(line), torch.device("cpu")).evaluation
        digests[line] = evaluation.digest, *evaluation.digests.values()
    assert len({digests[line] for line in ["seed=1", *same]}) == 1
    assert len(set(digests.values())) == 1 + len(SAMPLING)


class Soft(Flux1):
    """A custom model, with an argument that decides its pictures."""

    def __init__(self, pretrained: str, resolution: int, *, blend: float, **others: Any) -> None:
        super().__init__(pretrained, resolution, **others)
        self.blend = blend

    def decode_latents(self, x: Tensor, vae: Any) -> Tensor:
        return super().decode_latents(x, vae) * self.blend


def test_evaluations_of_other_custom_models_do_not_compare(compose: Callable[..., Run]) -> None:
    custom = [f"model.policy._target_={__name__}.Soft", "+model.policy.blend=0.5", "model.preview_decoder=null"]
    settings = [
        build_model(compose(*changes), torch.device("cpu")).evaluation.digests["sampling"]
        for changes in ([], custom, [*custom, "model.policy.blend=0.8"], [*custom, "model.embeddings=cache"])
    ]
    assert len(set(settings)) == 3 and settings[1] == settings[3]
    assert compose(*custom, "model.guidance=2").model.custom["guidance"] == 2, "a key of the model, too"


@pytest.mark.parametrize(("images", "lacking"), [(2, set()), (1, {"diversity"})])
def test_one_image_of_a_prompt_has_no_diversity(images: int, lacking: set[str]) -> None:
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    measured = Evaluation([Prompt("a red circle")], rewards, "euler", 4, images, 7)
    measured.table = torch.zeros(1, len(measured.columns), dtype=torch.float64)
    logged, names = measured.record(0, {}), {*STATISTICS} - lacking
    assert measured.history[0]["statistics"].keys() == names
    assert {f"images/{name}" for name in names} == {name for name in logged if name.startswith("images/")}


def test_prompt_without_a_score_is_left_out_of_means_and_paired_differences() -> None:
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    measured = Evaluation([Prompt(name) for name in "abcd"], rewards, "euler", 4, 2, 7)
    nan = math.nan
    table = torch.zeros(4, len(measured.columns), dtype=torch.float64)
    table[:, 0] = torch.tensor([0.1, nan, 0.3, 0.8])
    measured.table = table
    assert measured.means()["shapes"] == pytest.approx(0.4)
    base = torch.tensor([[0.0], [0.5], [nan], [0.5]], dtype=torch.float64)
    errors = evaluation_errors(["shapes"], table[:, :1], base)
    assert errors["change_error"]["shapes"] == pytest.approx(0.1)  # of 0.1 and 0.3
    measured.history, measured.base = [{}], base
    assert measured.means()["shapes"] == pytest.approx((0.1 + 0.5 + 0.8) / 3)  # the base has .0, .5 and .5 of them
    assert measured.record(1, {})["eval/shapes"] == pytest.approx((0.1 + 0.5 + 0.8) / 3)
    changes, means = torch.tensor([0.1, 0.0, 0.3]), torch.tensor([0.1, 0.5, 0.8])  # errors are of the same prompts
    errors = measured.history[1]
    assert errors["change_error"]["shapes"] == pytest.approx(float(changes.std()) / 3**0.5)
    assert errors["standard_error"]["shapes"] == pytest.approx(float(means.std()) / 3**0.5)
    table[:, 0] = nan
    with pytest.raises(NonFiniteError, match="no held-out image has a finite shapes reward"):
        measured.means()
    with pytest.raises(NonFiniteError, match="no held-out image has a finite shapes and watched reward[.] Correct"):
        means_of(["shapes", "diversity", "watched"], torch.tensor([[nan, 1.0, nan]]))
