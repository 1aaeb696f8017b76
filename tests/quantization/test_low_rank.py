"""The branch beside quantised layers: its factors, the residual, the LoRA, and the shadow that it makes."""

from collections.abc import Iterator

import pytest
import torch
from exact_formats import EMULATED
from nano import PROMPTS, adapters, load_policy, random_state
from torch import Tensor, nn

from solrl_lightning.errors import UserError
from solrl_lightning.names import TRAINED
from solrl_lightning.policies.lora import adapter_state
from solrl_lightning.quantization import QuantizationRule, resolve
from solrl_lightning.quantization.linear import Conv1x1AsLinear
from solrl_lightning.quantization.low_rank import LowRankLinear, convert_with_low_rank, low_rank_factors
from solrl_lightning.quantization.rules import plan
from solrl_lightning.quantization.scaled_linear import NVFP4Linear
from solrl_lightning.rollout.records import EncodedPrompts
from solrl_lightning.training.transformers import Transformers, replicate

CPU = torch.device("cpu")


def weight(outputs: int = 48, inputs: int = 64) -> Tensor:
    """A matrix whose singular values fall from 8 to 0.1, as those of trained weights do."""
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(outputs, outputs, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(inputs, outputs, generator=generator))
    return left * torch.logspace(0.9, -1, outputs) @ right.T


def linear(bias: bool = True) -> nn.Linear:
    layer = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    layer.weight.copy_(weight())
    return layer


@pytest.mark.parametrize("rank", [1, 4, 24])
def test_factors_are_the_best_approximation(rank: int) -> None:
    state = torch.get_rng_state()
    up, down = low_rank_factors(weight(), rank)
    assert torch.equal(torch.get_rng_state(), state)
    assert (up.shape, down.shape) == ((48, rank), (rank, 64))
    best = torch.linalg.svdvals(weight().double())[rank:].square().sum().sqrt()  # Eckart and Young
    assert best <= torch.linalg.matrix_norm(weight().double() - up.double() @ down.double()) <= 1.01 * best
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1))  # the singular values are halved in exponents


@pytest.mark.parametrize("linear_cls", EMULATED)
def test_layer_is_the_quantised_residual_and_the_branch(linear_cls: type) -> None:
    layer, x = linear(), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    branch = LowRankLinear(layer, linear_cls, rank=4, lora_rank=2)
    up, down = low_rank_factors(layer.weight, 4)
    residual = nn.Linear(64, 48)
    residual.weight.data, residual.bias.data = layer.weight - up @ down, layer.bias
    torch.testing.assert_close(branch(x), linear_cls(residual)(x) + x @ (up @ down).T, rtol=1e-5, atol=1e-5)
    exact = layer(x)
    error, merged_error = (torch.linalg.norm(y - exact) for y in (branch(x), linear_cls(layer)(x)))
    assert error < 0.8 * merged_error


def test_lora_is_added_unrounded_and_quantises_nothing() -> None:
    branch, x = LowRankLinear(linear(), NVFP4Linear, rank=4, lora_rank=2), torch.randn(3, 64)
    before, buffers = branch(x), [buffer.clone() for buffer in branch.residual.buffers()]
    pointers = [parameter.data_ptr() for parameter in branch.parameters()]
    down, up = torch.randn(2, 64), torch.randn(48, 2)
    branch.set_lora(down, up)
    torch.testing.assert_close(branch(x) - before, x @ (up @ down).T, rtol=1e-4, atol=1e-4)
    branch.set_lora(torch.zeros(2, 64), torch.zeros(48, 2))
    assert torch.equal(branch(x), before)
    assert all(torch.equal(*pair) for pair in zip(branch.residual.buffers(), buffers, strict=True))
    assert [parameter.data_ptr() for parameter in branch.parameters()] == pointers


def test_convolution_has_a_branch() -> None:
    convolution = nn.Conv2d(64, 48, 1).requires_grad_(False)
    convolution.weight.copy_(weight()[:, :, None, None])
    model = nn.Sequential(convolution)
    plans = plan(model, QuantizationRule(["*"], {}), resolve("nvfp4", "emulated", CPU))
    x = torch.randn(2, 64, 3, 3)
    exact = model(x)
    convert_with_low_rank(model, plans, resolve("nvfp4", "emulated", CPU), 8, {"0"}, 2)
    layer = model[0]
    assert isinstance(layer, Conv1x1AsLinear)
    before = model(x)
    assert torch.linalg.norm(before - exact) < 0.1 * torch.linalg.norm(exact)
    down, up = torch.randn(2, 64, 1, 1), torch.randn(48, 2, 1, 1)
    layer.linear.set_lora(down, up)
    update = nn.functional.conv2d(nn.functional.conv2d(x, down), up)
    torch.testing.assert_close(model(x) - before, update, rtol=1e-4, atol=1e-4)


def test_rank_of_a_whole_layer_raises() -> None:
    model, backend = nn.Sequential(linear()), resolve("nvfp4", "emulated", CPU)
    plans = plan(model, QuantizationRule(["*"], {}), backend)
    with pytest.raises(UserError, match=r"low_rank=48 is invalid: it must be below 48, the width of 0\. Use .*=1, or"):
        convert_with_low_rank(model, plans, backend, 48, set(), 2)


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Transformers]]:
    """Those of equal policies, whose shadows have no branch and one of rank 4."""
    from nano import save_nano

    folder, rule = save_nano(tmp_path_factory.mktemp("nano")), QuantizationRule(["*_blocks.*"], {})
    backend = resolve("nvfp4", "emulated", CPU)
    yield [
        replicate(load_policy(folder), adapters(low_rank), 4, "policy", False, False, True, backend, rule)
        for low_rank in (0, 4)
    ]


def test_shadow_with_a_branch_follows_the_policy_and_is_nearer_to_it(transformers: list[Transformers]) -> None:
    errors = []
    for each in transformers:
        state = random_state(adapter_state(each.trained.lora_layers, TRAINED), 3)
        velocities = {}
        for name in ("merged", "shadow"):
            sampler = each.samplers[name]
            sampler.sync(state, 1)
            policy = sampler.policy
            _, conditioning = EncodedPrompts(PROMPTS, policy.encode(PROMPTS)).gather(torch.arange(3))
            x = policy.noise(torch.arange(3))
            with torch.no_grad():
                velocities[name] = policy.velocity(sampler.transformer, x, torch.full((3,), 0.6), conditioning).float()
        difference = velocities["shadow"] - velocities["merged"]
        errors.append(float(difference.norm() / velocities["merged"].norm()))
    assert errors[1] < 0.8 * errors[0] < 0.8
