"""Errors of the reward base class, and imports of the package."""

import importlib
import re
import sys
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor

import solrl_lightning.rewards
from solrl_lightning.cli.config import ConfigTree
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.rewards.base import Metadata, Reward, unique_prompts
from solrl_lightning.rewards.weighted import WeightedRewards


class Brightness(Reward):
    """Scores by the mean of the pixels in the images' dtype; ``spoiled`` replaces the second score."""

    name = "brightness"

    def __init__(self, spoiled: float | None = None) -> None:
        self.spoiled = spoiled
        self.scale = torch.ones((), requires_grad=True)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        scores = images.mean((1, 2, 3)) * self.scale.to(images.dtype)
        if self.spoiled is not None:
            scores[1] = self.spoiled
        return scores


PROMPTS = ["a cat", "a dog", "a fish"]


def grey(*levels: float) -> Tensor:
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 8, 8).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_float32_without_gradient(dtype: torch.dtype) -> None:
    scores = Brightness()(grey(0.0, 0.5, 1.0).to(dtype), PROMPTS)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    assert scores.tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(3, 8, 8),
        torch.zeros(3, 8, 8, 3),
        torch.zeros(3, 4, 8, 8),
        torch.zeros(3, 3, 8, 8, dtype=torch.uint8),
    ],
    ids=["no batch", "channels last", "four channels", "bytes"],
)
def test_images_of_another_shape_or_dtype_are_an_error(images: Tensor) -> None:
    with pytest.raises(ValueError) as caught:
        Brightness()(images, PROMPTS)
    message = str(caught.value)
    assert "the reward brightness" in message and str(list(images.shape)) in message and str(images.dtype) in message


@pytest.mark.parametrize("prompts", [PROMPTS[:2], [*PROMPTS, "a bird"]])
def test_number_of_prompts_must_equal_the_number_of_images(prompts: list[str]) -> None:
    with pytest.raises(ValueError, match=f"reward brightness .* 3 images and {len(prompts)} prompts"):
        Brightness()(grey(0.0, 0.5, 1.0), prompts)


@pytest.mark.parametrize("level, span", [(1.25, "0.5 to 1.25"), (-0.5, "-0.5 to 0.5"), (float("inf"), "0.5 to inf")])
def test_error_about_an_image_outside_0_to_1_names_its_row_and_prompt(level: float, span: str) -> None:
    images = grey(0.0, 0.5, 0.5)
    images[2, 1, 3, 4] = level
    with pytest.raises(ValueError) as caught:
        Brightness()(images, PROMPTS)
    message = str(caught.value)
    assert "brightness" in message and "image 2 of 3" in message and "'a fish'" in message and span in message


def test_error_about_an_image_with_nan_names_its_row_and_prompt() -> None:
    images = grey(0.0, 0.5, 1.0)
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="brightness.*'a dog'") as caught:
        Brightness()(images, PROMPTS)
    assert caught.value.row == 1


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), float("-inf")])
def test_error_about_a_score_that_is_not_finite_names_its_row_and_prompt(spoiled: float) -> None:
    with pytest.raises(NonFiniteError, match=f"the reward brightness is {spoiled} .*'a dog'") as caught:
        Brightness(spoiled)(grey(0.0, 0.5, 1.0), PROMPTS)
    assert caught.value.row == 1


def test_images_may_have_the_values_0_and_1() -> None:
    assert Brightness()(grey(0.0, 1.0), PROMPTS[:2]).tolist() == [0.0, 1.0]


def test_check_prompts_allows_any_prompt_by_default() -> None:
    Brightness().check_prompts(["", "anything"])


def test_index_of_unique_prompts_restores_all_prompts() -> None:
    prompts = ["b", "a", "b", "c", "a", "b"]
    texts, place = unique_prompts(prompts)
    assert texts == ["b", "a", "c"]
    assert [texts[index] for index in place] == prompts


@pytest.mark.parametrize("name", ["pickscore", "clipscore", "hpsv2"])
def test_shipped_configuration_builds_its_reward_from_local_files(
    name: str, clip_folder: str, hps_file: str, open_clip_architecture: str, images: Tensor
) -> None:
    local = {"pretrained": clip_folder, "processor": clip_folder}
    if name == "hpsv2":
        local = {"pretrained": hps_file, "architecture": open_clip_architecture}
    with ConfigTree() as tree:
        group = tree.compose(
            [f"reward={name}", *(f"++reward.{name}.{key}={value}" for key, value in local.items())]
        ).reward
    arguments = dict(group[name])
    assert arguments.pop("weight") == 1
    reward = instantiate(arguments, device="cpu")
    assert reward.name == name and reward(images, ["a cat"] * 4).std() > 1e-3


def test_import_of_the_package_imports_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("solrl_lightning.rewards.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes an import an error
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert importlib.reload(solrl_lightning.rewards)
    assert not [name for name in sys.modules if name.startswith("solrl_lightning.rewards.")]


def test_unknown_reward_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="BLIPScore"):
        _ = solrl_lightning.rewards.BLIPScore


class Returns(Reward):
    """A reward that returns the given value."""

    name = "mine"

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def score(self, images: Tensor, prompts: list[str]) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(()), "[]"),
        (torch.zeros(2, 1), "[2, 1]"),
        (torch.zeros(3), "[3]"),
        ([0.5, 0.5], "list"),
    ],
)
def test_error_about_the_shape_of_scores_names_the_expected_shape(value: Any, found: str) -> None:
    message = f"reward mine is invalid: it must return one score per image, a tensor [2]; its score() returned {found}"
    with pytest.raises(UserError, match=re.escape(message)):
        Returns(value)(torch.zeros(2, 3, 4, 4), ["a", "b"])


class Counting(Reward):
    """Scores by the metadata's "count", which every prompt must have."""

    name = "counting"

    def check_prompts(self, prompts: list[str], metadata: list[Metadata]) -> None:
        for prompt, row in zip(prompts, metadata, strict=True):
            if "count" not in row:
                raise UserError(f"{prompt!r} has no count")

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        return torch.tensor([float(row.get("count", -1)) for row in metadata])


def test_metadata_reach_the_rewards_that_take_them() -> None:
    metadata = {"a cat": {"count": 3}, "a fish": {"count": 5}}
    both = {"counting": Counting(), "brightness": Brightness()}
    rewards = WeightedRewards(both, {"counting": 1.0, "brightness": 0.0}, metadata)
    images, prompts = grey(0.0, 0.5, 1.0, 0.25), ["a fish", "a cat", "a fish", "a dog"]
    assert rewards(images, prompts).T.tolist() == [[5, 3, 5, -1], [0.0, 0.5, 1.0, 0.25]]
    assert rewards.for_training(images, prompts).T.tolist() == [[5, 3, 5, -1]]
    rewards.check_prompts(["a cat", "a fish"])
    with pytest.raises(UserError, match="'a dog' has no count"):
        rewards.check_prompts(prompts)


def test_rollouts_are_scored_by_the_rewards_of_positive_and_negative_weight() -> None:
    three = {"counting": Counting(), "brightness": Brightness(), "watched": Brightness()}
    rewards = WeightedRewards(three, {"watched": 0.0, "brightness": -0.5, "counting": 2.0}, {"a cat": {"count": 3}})
    images, prompts = grey(0.5, 1.0), ["a cat", "a dog"]
    assert list(rewards.for_training.rewards) == ["counting", "brightness"]
    for each in (rewards, rewards.for_training):
        assert each.total(each(images, prompts)).tolist() == [2 * 3 - 0.5 * 0.5, 2 * -1 - 0.5 * 1.0]


def test_metadata_of_a_reward_called_alone_are_a_list_or_nothing() -> None:
    reward = Counting()
    assert reward(grey(0.0, 0.5), PROMPTS[:2]).tolist() == [-1, -1]
    assert reward(grey(0.0, 0.5), PROMPTS[:2], [{"count": 2}, {}]).tolist() == [2, -1]
    with pytest.raises(ValueError, match="metadata of the reward counting are invalid: .* got 1 for 2 prompts"):
        reward(grey(0.0, 0.5), PROMPTS[:2], [{"count": 2}])


def test_reward_without_its_own_init_takes_a_device() -> None:
    class Plain(Reward):
        name = "plain"

        def score(self, images: Tensor, prompts: list[str]) -> Tensor:
            return images.mean((1, 2, 3)).to(self.device)

    assert Plain(device="cpu")(torch.ones(1, 3, 2, 2), ["a"]).tolist() == [1.0]


def test_complex_scores_are_an_error() -> None:
    class Complex(Brightness):
        def score(self, images: Tensor, prompts: list[str]) -> Tensor:
            return super().score(images, prompts) + 1j

    with pytest.raises(
        UserError, match="reward brightness is invalid: it must return real numbers; .* torch.complex64"
    ):
        Complex()(grey(0.0, 0.5, 1.0), PROMPTS)


def test_a_reward_that_changes_the_images_changes_those_of_no_other() -> None:
    class Darkening(Brightness):
        def score(self, images: Tensor, prompts: list[str]) -> Tensor:
            return super().score(images.mul_(0.5), prompts)

    both = WeightedRewards({"darkening": Darkening(), "brightness": Brightness()}, {"darkening": 1, "brightness": 1})
    images = grey(0.0, 0.5, 1.0)
    assert both(images, PROMPTS).tolist() == [[0.0, 0.0], [0.25, 0.5], [0.5, 1.0]]
    assert torch.equal(images, grey(0.0, 0.5, 1.0))
