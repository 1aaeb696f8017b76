"""The embedded model is the one that the recipe builds, and it has learned something but not everything."""

import pytest
from nano import load_policy

from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import Candidates
from solrl_lightning.rollout.seeds import evaluation_seeds
from solrl_lightning.rollout.stage import Batching, Prompts, Trajectory, run_stage
from solrl_lightning.shapes.captions import eval_captions
from solrl_lightning.shapes.pretrain import build_pipeline

HELD_OUT = eval_captions()[:8]


@pytest.fixture(scope="module")
def tiny() -> Flux1:
    return load_policy("tiny", decode_batch=16)


def scored(policy: Flux1, captions: list[str]) -> Candidates:
    """Two pictures of each held-out prompt, painted from ``captions``."""
    seeds = evaluation_seeds(0, HELD_OUT, 2)
    prompts = Prompts(HELD_OUT, policy.encode(captions))
    trajectory = Trajectory(policy.sigmas(6), "euler")
    rewards = WeightedRewards({"shapes": ShapesReward()}, {"shapes": 1.0})
    rest = (Batching(16, False), rewards, prompts, seeds, trajectory, lambda done, total: None)
    return run_stage(policy, policy.transformer, *rest)


def test_the_embedded_model_has_the_architecture_of_the_recipe(tiny: Flux1) -> None:
    built = build_pipeline(0)
    for component in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        expected, found = getattr(built, component).state_dict(), getattr(tiny.pipeline, component).state_dict()
        assert {name: value.shape for name, value in found.items()} == {
            name: value.shape for name, value in expected.items()
        }
    assert len(tiny.pipeline.tokenizer) == len(built.tokenizer)
    assert tiny.pipeline.tokenizer_2.get_vocab() == built.tokenizer_2.get_vocab()


def test_its_pictures_follow_their_captions_and_leave_room_to_improve(tiny: Flux1) -> None:
    right = scored(tiny, HELD_OUT).rewards.mean()
    wrong = scored(tiny, HELD_OUT[::-1]).rewards.mean()
    assert 0.2 < right < 0.75
    assert wrong < 0.5 * right
