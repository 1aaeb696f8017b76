"""Errors of the reward base class, metadata and weights of several rewards, and imports of the package."""

import importlib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import solrl_lightning.rewards
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import NonFiniteError, RewardError, RewardOutOfMemory, UserError
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards, gdpo, weighted_sum


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


THREE = grey(0.0, 0.5, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_are_float32_without_gradient(dtype: torch.dtype) -> None:
    scores = Brightness()(THREE.to(dtype), PROMPTS)
    assert scores.dtype == torch.float32 and not scores.requires_grad
    assert scores.tolist() == [0.0, 0.5, 1.0]
    Brightness().check_prompts(["", "anything"])


@pytest.mark.parametrize(
    "images", [torch.zeros(3, 8, 8, 3), torch.zeros(3, 3, 8, 8, dtype=torch.uint8)], ids=["channels last", "bytes"]
)
def test_images_of_another_shape_or_dtype_are_an_error(images: Tensor) -> None:
    message = f"the reward brightness .* got {images.dtype} {re.escape(str(list(images.shape)))}"
    with pytest.raises(ValueError, match=message):
        Brightness()(images, PROMPTS)


@pytest.mark.parametrize(
    ("level", "span"), [(1.25, "0.5 to 1.25"), (-0.5, "-0.5 to 0.5"), (float("inf"), "0.5 to inf")]
)
def test_error_about_an_image_outside_0_to_1_names_its_row_and_prompt(level: float, span: str) -> None:
    images = grey(0.0, 0.5, 0.5)
    images[2, 1, 3, 4] = level
    with pytest.raises(ValueError) as error:
        Brightness()(images, PROMPTS)
    assert all(words in str(error.value) for words in ("brightness", "image 2 of 3", "'a fish'", span))


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), float("-inf")])
def test_error_about_a_value_that_is_not_finite_names_its_row_and_prompt(spoiled: float) -> None:
    with pytest.raises(NonFiniteError, match=f"the reward brightness is {spoiled} .*'a dog'") as error:
        Brightness(spoiled)(THREE, PROMPTS)
    assert error.value.row == 1
    images = THREE.clone()
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="brightness.*'a dog'") as error:
        Brightness()(images, PROMPTS)
    assert error.value.row == 1


def test_import_of_the_package_imports_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("solrl_lightning.rewards.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes an import an error
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert importlib.reload(solrl_lightning.rewards)
    assert not [name for name in sys.modules if name.startswith("solrl_lightning.rewards.")]
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
    ("value", "message"),
    [
        (torch.zeros(()), "its score() must return real numbers, a tensor [2]; it returned torch.float32 []"),
        (torch.zeros(2, 3), "it returned torch.float32 [2, 3]"),
        ([0.5], "it returned torch.float32 [1]"),
        ([[1.0], [1.0, 2.0]], "it returned list"),
        (None, "it returned NoneType"),
        (torch.zeros(2) + 1j, "it returned torch.complex64 [2]"),
        (torch.zeros(2).to_sparse(), "it returned torch.float32 [2] of torch.sparse_coo on cpu"),
        (torch.zeros(2, device="meta"), "it returned torch.float32 [2] of torch.strided on meta"),
    ],
)
def test_error_about_returned_scores_names_what_is_expected(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"reward mine is invalid: .*{re.escape(message)}"):
        Returns(value)(torch.zeros(2, 3, 4, 4), ["a", "b"])
    with pytest.raises(UserError, match=f"reward mine is invalid: .*{re.escape(message)}"):
        Returns(value).try_out(torch.full((3, 4, 4), 0.5), "a", {})


@pytest.mark.parametrize(
    "value",
    [[1, 0], (1.0, 0.0), np.array([1, 0]), np.array([[1.0], [0.0]]), torch.tensor([[1], [0]]), torch.tensor([1, 0])]
    + [torch.tensor([True, False]), [torch.tensor(1.0), torch.tensor(0.0)]]
    + [np.array([0.0, 1.0])[::-1], np.array([1, 0], ">f4"), pd.Series([5, 1, 0])[1:]],
)
def test_scores_may_be_what_reward_models_return(value: Any) -> None:
    scores = Returns(value)(torch.zeros(2, 3, 4, 4), ["a", "b"])
    assert scores.dtype == torch.float32 and scores.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "value", [[None, 0.5], np.ma.array([0.7, 0.5], mask=[1, 0]), pd.Series([pd.NA, 0.5], dtype="Float64")]
)
def test_none_in_a_list_and_what_an_array_masks_is_a_missing_score(value: Any) -> None:
    scores = Returns(value).unchecked(torch.zeros(2, 3, 4, 4), ["a", "b"])
    assert scores.isnan().tolist() == [True, False] and scores[1] == 0.5


class Fails(Reward):
    """Looks up a word of the prompt that it does not know."""

    name = "fails"

    def score(self, images: Tensor, prompts: list[str]) -> Any:
        return [{"a": 1.0}[prompt] for prompt in prompts]  # here


class Changes(Reward):
    """Changes its images, prompts and metadata in place."""

    name = "changes"
    part_names = ("mean",)

    def score(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        metadata[0]["words"] = {1}
        metadata[0]["list"].append(1)
        prompts.clear()
        return images.mul_(0.5).mean((1, 2, 3))

    def check_prompts(self, prompts: list[str]) -> None:
        assert prompts.pop() == "b"

    def parts(self, images: Tensor, prompts: list[str]) -> Tensor:
        prompts.sort(reverse=True)
        return images.mul_(0.5).mean((1, 2, 3))[:, None]


def test_a_reward_may_change_what_it_is_called_with() -> None:
    images, metadata, prompts = torch.rand(2, 3, 4, 4), [{"list": [0]}, {"list": [0]}], ["a", "b"]
    expected = images.mean((1, 2, 3)) / 2
    for _ in range(2):
        assert torch.equal(Changes()(images, prompts, metadata), expected)
        assert torch.equal(Changes().described(images, prompts)[:, 0], expected)
    assert metadata == [{"list": [0]}] * 2 and prompts == ["a", "b"]
    both = WeightedRewards({"one": Changes(), "other": Changes()}, {"one": 1.0, "other": 1.0})
    both.check_prompts([*map(Prompt, prompts)])  # each gets both


class Large(Reward):
    """Has memory for no image."""

    name = "large"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_error_about_memory_names_the_reward() -> None:
    with pytest.raises(RewardOutOfMemory, match="no memory left for the reward large: CUDA out of memory"):
        Large()(torch.zeros(1, 3, 4, 4), ["a"])


class Ends(Reward):
    """Raises StopIteration."""

    name = "mine"

    def score(self, images: Tensor, prompts: list[str]) -> Any:
        return next(prompt for prompt in prompts if prompt == "c")


class Twice:
    """A decorator that is an object, without ``__wrapped__``."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else partial(self.method, instance)


class Decorated(Reward):
    name = "mine"

    @Twice
    def score(self, images: Tensor, prompts: list[str]) -> Any:
        raise ValueError("of a method")


def test_exception_of_a_decorated_method_names_the_line() -> None:
    with pytest.raises(RewardError, match=f"the reward mine raises ValueError in {re.escape(__file__)}, line .*of a m"):
        Decorated()(torch.zeros(2, 3, 4, 4), ["a", "b"])


def test_exception_of_a_reward_names_it_and_the_line() -> None:
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    message = f"the reward fails raises KeyError in {re.escape(__file__)}, line {line}: 'b'"
    with pytest.raises(RewardError, match=f"^{message}") as error:
        Fails()(torch.zeros(2, 3, 4, 4), ["a", "b"])
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(RewardError, match="the reward mine raises StopIteration in"):  # which ends loops of Lightning
        Ends()(torch.zeros(2, 3, 4, 4), ["a", "b"])
    with pytest.raises(UserError, match=f"must score a grey image; {message}. Correct"):
        Fails().try_out(torch.full((3, 4, 4), 0.5), "b", {})
    with pytest.raises(UserError, match="must score a grey image; the reward mine is nan for the prompt 'a'. Correct"):
        Returns([torch.nan] * 2).try_out(torch.full((3, 4, 4), 0.5), "a", {})


class Counts(Reward):
    """A reward whose only part is a number of the metadata."""

    name, part_names = "counts", ("count",)

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images.mean((1, 2, 3))

    def parts(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        return torch.tensor([[float(row["count"])] for row in metadata])


def test_parts_get_the_metadata() -> None:
    Counts().try_out(torch.full((3, 4, 4), 0.5), "a", {"count": 3})
    rewards = WeightedRewards({"counts": Counts()}, {"counts": 1.0})
    parts = rewards.parts(torch.zeros(2, 3, 4, 4), [Prompt("a", {"count": 3}), Prompt("b", {"count": 4})])
    assert parts.tolist() == [[3.0], [4.0]]


class Refusing(Reward):
    """Scores all images but the second, as a judge that refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def score(self, images: Tensor, prompts: list[str]) -> Any:
        self.calls.append(len(images))
        return [torch.nan if number == 1 else float(number) for number in range(len(images))]


@pytest.mark.parametrize("shape", [(3, 3, 4, 4), (3, 1, 3, 4, 4)], ids=["images", "videos"])
def test_images_beside_one_without_a_score_are_not_scored_again(shape: tuple[int, ...]) -> None:
    """A second answer of a server would be another, and take a request an image."""
    refusing = Refusing()
    rewards = WeightedRewards({"shapes": ShapesReward(), "refusing": refusing}, {"shapes": 1.0, "refusing": 1.0})
    prompts = [Prompt("a red circle above a blue square")] * 3
    scores, error = rewards.of_each(torch.rand(shape), prompts)
    assert refusing.calls == [3] and error is not None and error.row == 1
    assert scores[1].isnan().all() and scores[::2].isfinite().all() and scores[:, 1].nan_to_num().tolist() == [0, 0, 2]


@pytest.mark.parametrize("combine", [weighted_sum, gdpo])
def test_missing_score_of_a_reward_of_weight_0_is_missing_there_only(combine: Any) -> None:
    weights = {"shapes": 0.5, "refusing": 0.0}
    rewards = WeightedRewards({"shapes": ShapesReward(), "refusing": Refusing()}, weights, combine)
    prompts = [Prompt("a red circle above a blue square")] * 3
    scores, error = rewards.of_each(torch.rand(3, 3, 4, 4), prompts)
    assert error is not None and scores.isnan().nonzero().tolist() == [[1, 1]]
    torch.testing.assert_close(rewards.total(scores), 0.5 * scores[:, 0])
    alone = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 0.5}, combine)
    assert torch.equal(rewards.merits(scores[None]), alone.merits(scores[None, :, :1]))


def test_part_and_reward_of_one_name_are_an_error() -> None:
    rewards = {"counts": Counts(), "counts_count": ShapesReward()}
    with pytest.raises(UserError, match="reward is invalid: two rewards, or parts .* have the name counts_count in c"):
        WeightedRewards(rewards, dict.fromkeys(rewards, 1.0))
    twice = Counts()
    twice.part_names = ("count", "count")
    with pytest.raises(UserError, match="reward is invalid: two rewards, or parts .* have the name counts_count in c"):
        WeightedRewards({"counts": twice}, {"counts": 1.0})


class Describes(Returns):
    """A reward with two parts, which are the given value."""

    part_names = ("one", "other")

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return torch.zeros(2)

    def parts(self, images: Tensor, prompts: list[str]) -> Any:
        return self.value() if callable(self.value) else self.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), r"its parts\(\) must return .* \[2, 2\]; it returned torch.float32 \[2, 3\]"),
        ([[1.0, 2.0], [1.0]], "it returned list"),
        (torch.zeros(2, 2) + 1j, "it returned torch.complex64"),
        (lambda: {}["box"], "reward mine raises KeyError in .*test_reward_base.py, line .*'box'"),
    ],
)
def test_parts_are_tried_before_the_model_is_loaded(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"reward mine is invalid: .*{message}"):
        Describes(value).try_out(torch.full((3, 4, 4), 0.5), "a", {})


@pytest.mark.parametrize("value", [[[1, 2]] * 2, np.array([[1, 2], [1, 2]]), torch.tensor([[1.0, torch.nan]] * 2)])
def test_parts_may_be_lists_or_undefined(value: Any) -> None:
    Describes(value).try_out(torch.full((3, 4, 4), 0.5), "a", {})
    rewards = WeightedRewards({"mine": Describes(value)}, {"mine": 1.0})
    parts = rewards.parts(torch.zeros(2, 3, 4, 4), [Prompt("a"), Prompt("b")])
    assert parts.dtype == torch.float32
    assert torch.equal(parts.nan_to_num(2.0), torch.tensor([[1.0, 2.0], [1.0, 2.0]]))


def test_every_reward_is_tried_with_the_metadata_of_the_prompt() -> None:
    mine = Returns([1, 2])
    rewards = WeightedRewards({"counting": Counting(), "mine": mine}, {"counting": 1, "mine": 0})
    rewards.try_out(torch.full((3, 4, 4), 0.5), Prompt("a", {"count": 3}))
    mine.value = None
    with pytest.raises(UserError, match="reward mine is invalid"):
        rewards.try_out(torch.full((3, 4, 4), 0.5), Prompt("a", {"count": 3}))


class Counting(Reward):
    """Scores by the metadata's "count", which every prompt must have."""

    name = "counting"

    def check_prompts(self, prompts: list[str], metadata: list[Metadata]) -> None:
        for prompt, row in zip(prompts, metadata, strict=True):
            if "count" not in row:
                raise UserError(f"{prompt!r} has no count")

    def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
        return torch.tensor([float(row.get("count", -1)) for row in metadata]).to(self.device)


def test_metadata_reach_the_rewards_that_take_them() -> None:
    both = {"counting": Counting(device="cpu"), "brightness": Brightness()}
    rewards = WeightedRewards(both, {"counting": 1.0, "brightness": 0.0})
    # Prompts of equal text have their own metadata.
    prompts = [Prompt("a cat", {"count": 5}), Prompt("a cat", {"count": 3}), Prompt("a fish", {"count": 5})]
    rewards.check_prompts(prompts)
    prompts.append(Prompt("a cat"))
    images = grey(0.0, 0.5, 1.0, 0.25)
    assert rewards(images, prompts).T.tolist() == [[5, 3, 5, -1], [0.0, 0.5, 1.0, 0.25]]
    assert rewards.for_training(images, prompts).T.tolist() == [[5, 3, 5, -1]]
    with pytest.raises(UserError, match="'a cat' has no count"):
        rewards.check_prompts(prompts)


def test_rollouts_are_scored_by_the_rewards_of_positive_and_negative_weight() -> None:
    three = {"counting": Counting(), "brightness": Brightness(), "watched": Brightness()}
    rewards = WeightedRewards(three, {"watched": 0.0, "brightness": -0.5, "counting": 2.0})
    images, prompts = grey(0.5, 1.0), [Prompt("a cat", {"count": 3}), Prompt("a dog")]
    assert list(rewards.for_training.rewards) == ["counting", "brightness"]
    for each in (rewards, rewards.for_training):
        assert each.total(each(images, prompts)).tolist() == [2 * 3 - 0.5 * 0.5, 2 * -1 - 0.5 * 1.0]


@pytest.mark.parametrize(("weight", "name"), [(2.0, "brightness"), (-1.0, "weighted_sum")])
def test_less_of_a_reward_of_negative_weight_is_better(compose: Callable[..., Run], weight: float, name: str) -> None:
    rewards = WeightedRewards({"brightness": Brightness()}, {"brightness": weight})
    assert rewards.name == rewards.for_training.name == name
    options = compose("callbacks=early_stopping", f"reward.shapes.weight={weight}")
    (reward,) = {options.reward.name, options.callbacks["early_stopping"]["monitor"].removeprefix("eval/")}
    assert reward == name.replace("brightness", "shapes")


def test_metadata_of_a_reward_called_alone_are_a_list_or_nothing() -> None:
    reward = Counting()
    assert reward(grey(0.0, 0.5), PROMPTS[:2]).tolist() == [-1, -1]
    assert reward(grey(0.0, 0.5), PROMPTS[:2], [{"count": 2}, {}]).tolist() == [2, -1]
    with pytest.raises(ValueError, match="got torch.float32 .2, 3.*, 2 prompts and 1 metadata"):
        reward(grey(0.0, 0.5), PROMPTS[:2], [{"count": 2}])


def test_reward_that_changes_the_images_changes_those_of_no_other() -> None:
    class Darkening(Brightness):
        def score(self, images: Tensor, prompts: list[str]) -> Tensor:
            return super().score(images.mul_(0.5), prompts)

    both = WeightedRewards({"darkening": Darkening(), "brightness": Brightness()}, {"darkening": 1, "brightness": 1})
    images = THREE.clone()
    assert both(images, [*map(Prompt, PROMPTS)]).tolist() == [[0.0, 0.0], [0.25, 0.5], [0.5, 1.0]]
    assert torch.equal(images, THREE)
