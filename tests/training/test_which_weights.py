"""Weights used to sample, train and evaluate; "default", "old" and the average differ clearly in these runs."""

import copy
from typing import Any, NamedTuple, get_args

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from test_loop import train
from torch import Tensor, nn

from solrl_lightning import names
from solrl_lightning.data.prompt import identities
from solrl_lightning.objectives.base import Loss
from solrl_lightning.objectives.nft import NFT
from solrl_lightning.policies import lora
from solrl_lightning.quantization.linear import QuantizedLinear
from solrl_lightning.rewards.base import Reward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.records import TrainingBatch
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.seeds import evaluation_seeds
from solrl_lightning.training.module import SolRLModule

Tensors = dict[str, Tensor]
OPTIONS = (
    "optimizer.lr=0.02 model.full_steps=4 model.train_timestep_fraction=0.5 old_policy.decay_type=3 "
    "old_policy.start=-1 old_policy.slope=0.5 old_policy.maximum=0.5"  # old <- half old, half default
).split()


class Watch(Callback):
    """Records the velocities and the weights of the second iteration."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.seen = seen = []  # trained, old and reference velocity of every micro-batch

        class Recording(NFT):
            def __call__(self, velocity: Tensor, batch: TrainingBatch, **others: Tensor) -> Loss:
                seen.append((velocity.detach(), others["old"], others["reference"]))
                return super().__call__(velocity, batch, **others)

        pl_module.objective = Recording(**vars(pl_module.objective))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 0):
            self.old = copy.deepcopy(pl_module.policy_state("old"))
            self.replicas = copy.deepcopy(dict(pl_module.transformers.replicas))
            self.seen.clear()
            with torch.no_grad(), pl_module.transformers.velocity_models["reference"]() as reference:
                transformers = (pl_module.transformer, pl_module.transformers.replicas["merged"], reference)
                inputs = (batch.x_t, batch.sigma, batch.conditioning)
                self.velocities = [pl_module.model.velocity(transformer, *inputs) for transformer in transformers]


class Trained(NamedTuple):
    module: SolRLModule
    watch: Watch
    stage: Stage


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train two iterations with one evaluation, which writes into the merged replica."""
    watch = Watch()
    run = train(tmp_path_factory.mktemp("trained"), *OPTIONS, "evaluation.every=2", callbacks=(watch,), max_epochs=2)
    return Trained(run.module, watch, run.loop.stages[-1])


def merged(module: SolRLModule, state: Tensors) -> Tensors:
    weights = lora.merged_weights(module.transformers.trained.lora_layers, state)
    return {name.removesuffix(".weight"): weight for name, weight in weights}


def holds(layer: nn.Module, weight: Tensor) -> bool:
    """Return whether the layer's codes, or rounded weights, equal those of a float32 weight bit for bit."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=getattr(layer, "bias", None) is not None)
    linear.weight = nn.Parameter(weight)
    expected = type(layer)(linear) if isinstance(layer, QuantizedLinear) else linear.bfloat16()
    actual, states = layer.state_dict(), expected.state_dict()  # the bias is not adapted
    return actual.keys() == states.keys() and all(actual[name].equal(states[name]) for name in states if name != "bias")


def test_samplers_are_those_that_the_options_name(trained: Trained) -> None:
    assert trained.module.transformers.samplers.keys() == set(get_args(names.Sampler))


@pytest.mark.parametrize("replica", ["shadow", "merged"])
def test_replicas_hold_current_old_policy(trained: Trained, replica: str) -> None:
    module, watch = trained.module, trained.watch
    transformer = watch.replicas[replica]
    layers = {name: transformer.get_submodule(name) for name in module.transformers.trained.lora_layers}
    assert any(isinstance(layer, QuantizedLinear) for layer in layers.values()) == (replica == "shadow")
    old, base = merged(module, watch.old), merged(module, module.policy_state("base"))
    assert all(holds(layer, old[name]) for name, layer in layers.items())
    assert not any(holds(layer, base[name]) for name, layer in layers.items())


def test_evaluation_scores_the_average(trained: Trained) -> None:
    module = trained.module
    prompts, steps = module.evaluation.prompts, module.evaluation.steps
    seeds = evaluation_seeds(module.evaluation.seed, identities(prompts), module.evaluation.images)

    def reward(weights: str) -> float:
        actual = module.score(prompts, seeds, weights=weights, steps=steps, progress=lambda done, total: None)
        return float(actual.rewards.double().mean())

    rewards = {weights: reward(weights) for weights in ("ema", "default", "old", "base")}
    assert module.evaluation.history[-1]["shapes"] == pytest.approx(rewards["ema"], abs=1e-9)
    assert len(set(rewards.values())) == 4


def test_merged_with_restores_old_policy(trained: Trained) -> None:
    module = trained.module
    states = {name: merged(module, module.policy_state(name)) for name in ("default", "old")}
    module.requantize(version=2)
    name = next(iter(module.transformers.trained.lora_layers))
    transformer = module.transformers.replicas["merged"]
    with module.merged_with("default") as sampler:
        assert sampler.version is None
        assert holds(transformer.get_submodule(name), states["default"][name])
        assert not holds(transformer.get_submodule(name), states["old"][name])
    assert all(holds(transformer.get_submodule(name), weight) for name, weight in states["old"].items())
    assert sampler.version == 2


def test_merged_with_restores_old_policy_if_it_fails_half_way(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = trained.module
    old, state = merged(module, module.policy_state("old")), dict(module.policy_state("default"))
    module.requantize(version=2)
    *_, last = module.transformers.trained.lora_layers
    del state[f"{last}.lora_B.weight"]
    monkeypatch.setattr(module, "ema_state", state)
    with pytest.raises(KeyError), module.merged_with("ema"):
        pass
    transformer = module.transformers.replicas["merged"]
    assert all(holds(transformer.get_submodule(name), weight) for name, weight in old.items())


def test_policy_samples_with_old_adapter_which_holds_weights_of_an_evaluation_until_the_next_old_policy(
    trained: Trained,
) -> None:
    module = trained.module
    sampler, old = module.transformers.samplers["policy"], module.policy_state("old")
    before = {name: value.clone() for name, value in old.items()}
    stage = Stage(sampler="merged", steps=2, solver="euler")
    prompts, seeds = module.encode(module.evaluation.prompts[:1]), torch.tensor([[3]])

    layer = next(iter(module.transformers.trained.lora_layers.values()))

    def sampled() -> Tensor:
        assert layer.active_adapters == ["default"]
        for chunk in sampler.sample(stage, prompts, seeds):
            assert layer.active_adapters == ["old"]
            x = chunk.state.x
        return x

    of_old = sampled()
    sampler.sync(module.policy_state("default"), None)
    of_default = sampled()
    with module.transformers.velocity_models["old"]() as transformer:
        assert transformer is module.transformer
        assert all(torch.equal(value, before[name]) for name, value in module.policy_state("old").items())
    sampler.sync(old, 2)
    assert not torch.equal(of_default, of_old) and torch.equal(sampled(), of_old)
    assert all(torch.equal(value, before[name]) for name, value in old.items())


def test_loss_reads_trained_old_and_base_velocities(trained: Trained) -> None:
    velocity, old, reference = trained.watch.seen[0]
    of_default, of_old, of_base = trained.watch.velocities
    assert torch.equal(velocity, of_default) and torch.equal(reference, of_base)
    for other in (of_default, of_base):
        assert torch.dist(old, of_old) < 0.2 * torch.dist(other, of_old)  # of_old is rounded to BF16


class Watched(Reward):
    name = "watched"

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images.mean((1, 2, 3))


def test_rollouts_are_scored_by_weighted_rewards_only(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    module = trained.module
    two = WeightedRewards({**module.rewards.rewards, "watched": Watched()}, {"shapes": 1.0, "watched": 0.0})
    monkeypatch.setattr(module, "rewards", two)
    texts, seeds = module.evaluation.prompts[:1], torch.tensor([[3]])
    assert module.run_stage(trained.stage, module.encode(texts), seeds).scores.shape == (1, 1, 1)
    evaluated = module.score(texts, seeds, weights="base", steps=1, progress=lambda done, total: None)
    assert evaluated.scores.shape == (1, 1, 2)
