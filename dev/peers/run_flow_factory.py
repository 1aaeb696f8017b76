"""Flow-Factory with marks: ``python run_flow_factory.py CONFIG.yaml``, with its sources on PYTHONPATH."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from flow_factory.rewards.abc import PointwiseRewardModel, RewardModelOutput
from flow_factory.trainers.nft import DiffusionNFTTrainer
from measure import mark, redness


class Redness(PointwiseRewardModel):
    use_tensor_inputs = True

    def __call__(self, prompt: list[str], image: Any = None, **_: Any) -> RewardModelOutput:
        return RewardModelOutput(rewards=redness(torch.stack(list(image))))


def marked(phase: str, method: Callable[..., Any], after: str | None = None) -> Callable[..., Any]:
    def call(self: DiffusionNFTTrainer, *args: Any) -> Any:
        mark(phase)
        result = method(self, *args)
        if after is not None:
            mark(after)
        return result

    return call


if __name__ == "__main__":
    sys.modules["run_flow_factory"] = sys.modules["__main__"]  # imported by name for its reward
    # sample, prepare_feedback (rewards, advantages), optimize; the old policy's average is in the rest
    DiffusionNFTTrainer.sample = marked("rollout", DiffusionNFTTrainer.sample)
    DiffusionNFTTrainer.optimize = marked("train", DiffusionNFTTrainer.optimize, after="rest")
    from flow_factory.train import main

    main()
