"""From a configuration to objects: what a user's own classes and this machine's devices can get wrong."""

from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig

from solrl_lightning.build import build_rewards, instantiate_trainer
from solrl_lightning.errors import UserError

Compose = Callable[..., DictConfig]
OWN = "+reward.mine={_target_:%s,weight:1.0%s}"


@pytest.mark.parametrize(
    ("target", "more", "message"),
    [
        ("nowhere.Mine", "", "reward.mine: nowhere.Mine could not be made: .*PYTHONPATH"),
        ("solrl_lightning.rewards.shapes.ShapesReward", ",temperature:2", "unexpected keyword argument 'temperature'"),
    ],
)
def test_a_reward_that_cannot_be_made_is_told_by_its_name(
    compose: Compose, target: str, more: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_rewards(compose(OWN % (target, more)), torch.device("cpu"))


def test_a_gpu_that_is_not_there_is_told_in_a_sentence(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="trainer cannot run here: .* trainer=auto takes what there is"):
        instantiate_trainer(compose("trainer.accelerator=cuda"))


def test_weights_and_pretrained_reach_the_rewards(compose: Compose) -> None:
    rewards = build_rewards(compose("reward.shapes.weight=0.5"), torch.device("cpu"))
    assert rewards.weights == {"shapes": 0.5} and rewards.name == "shapes"
    scores = torch.tensor([[2.0], [4.0]])
    assert rewards.total(scores).tolist() == [1.0, 2.0]
