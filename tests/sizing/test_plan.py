"""Compares the plan's bytes with closed forms, and runs the task on the embedded model."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from solrl_lightning.build import build_objective, trained_as
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Plan
from solrl_lightning.policies import lora
from solrl_lightning.policies.architectures import build_component, find_architecture
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.quantization import QuantizationRule, resolve
from solrl_lightning.quantization import plan as plan_layers
from solrl_lightning.quantization.backends import PACKED_BITS, Hardware
from solrl_lightning.rollout.stage import Stage, velocities_per_prompt
from solrl_lightning.sizing.footprint import (
    OPTIONS,
    RECOMPUTED,
    RESERVE,
    Footprint,
    Latents,
    fit,
    latent_bytes,
    overrides,
    replica_bytes,
)
from solrl_lightning.sizing.plan import Card, on_card, pool_latents, settle_checkpointing
from solrl_lightning.sizing.trace import FusedAttention, Passes, PeakBytes, count_tokens, trace
from solrl_lightning.tasks.plan import plan
from tests.nano import adapters
from tests.nano import lora_config as small_lora
from tests.sigmas import uniform_sigmas

Compose = Callable[..., Run]

IMAGE, TEXT = 16, 10  # tokens of the embedded model
CAPABILITIES = ("8.0", "9.0", "10.0")
ONE_CARD, THREE_CARDS = (
    f"task.cards=[{','.join(f'{{name:a,memory:85,capability:{capability}}}' for capability in capabilities)}]"
    for capabilities in (CAPABILITIES[:1], CAPABILITIES)
)


def embedded(**options: Any) -> Flux1:
    """The shapes of the embedded model."""
    dtypes = {"transformer": "bfloat16", "default": "float32"}
    sizes: dict[str, Any] = dict(max_sequence_length=TEXT, guidance=1.0, decode_batch=1, dtypes=dtypes)
    return Flux1("tiny", 32, **sizes, weights="random", device="meta", **options)


@pytest.fixture(scope="module")
def passes() -> Passes:
    return trace(embedded(), adapters())[0]


def test_tokens_are_counted_in_linear_layers_and_convolutions() -> None:
    linear, pointwise = nn.Linear(6, 8, device="meta"), nn.Conv2d(8, 3, 1, device="meta")
    layers = nn.ModuleDict({"linear": linear, "pointwise": pointwise, "unused": nn.Linear(1, 1)})
    tokens = count_tokens(lambda: pointwise(linear(torch.empty(2, 4, 5, 6, device="meta")).movedim(-1, 1)), layers)
    assert tokens == {"linear": 2 * 20, "pointwise": 2 * 20}


def test_tokens_are_those_of_image_and_text_and_checkpointing_saves_bytes(passes: Passes) -> None:
    tokens = passes.tokens
    assert tokens["transformer_blocks.0.attn.to_q"] == IMAGE and tokens["context_embedder"] == TEXT
    assert tokens["single_transformer_blocks.2.proj_out"] == IMAGE + TEXT
    assert tokens["transformer_blocks.0.norm1.linear"] == 1
    peak = passes.training_bytes
    assert passes.sampling_bytes < peak[True] < peak["selective"] < peak[False]


def test_activations_are_those_of_one_image_of_a_batch(passes: Passes) -> None:
    model, images = embedded(), 4
    conditioning = model.encode(images * [Prompt("a prompt")])
    x = model.noise(torch.zeros(images, dtype=torch.int64))
    with torch.no_grad(), FusedAttention(), PeakBytes(model.pipeline.vae) as decoding:
        model.decode_latents(x, model.pipeline.vae)
    assert passes.decoding_bytes == pytest.approx(decoding.peak / images, rel=0.05)
    with torch.device("meta"):
        lora.add_adapters(model.transformer, small_lora(), seed=0)
    model.transformer.train()
    with FusedAttention(), PeakBytes(model.transformer) as training:
        loss = model.velocity(model.transformer, x, torch.ones(images, device="meta"), conditioning).sum()
    with training:
        loss.backward()
    assert passes.training_bytes[False] == pytest.approx(training.peak / images, rel=0.05)


def test_peak_counts_each_live_storage_once_and_no_parameters() -> None:
    linear = nn.Linear(8, 8, bias=False, device="meta")
    x = torch.empty(5, 8, device="meta")
    size = 5 * 8 * 4
    with torch.no_grad(), PeakBytes(linear) as tracker:
        y = linear(x)
        y.view(8, 5).add_(1)
        linear.weight.t()
        assert tracker.peak == size
        y = y + 1
        assert tracker.peak == 2 * size
        del y
        linear(x)
    assert tracker.peak == 2 * size


FOOTPRINT = Footprint(
    policy={"bfloat16": 100, "int8": 50, "nf4": 25},
    training={False: 16, "selective": 9, True: 2},
    latents=dict.fromkeys((None, "prefix"), Latents(0, 0, 0)),
    **dict(shadow=20, others=10, text_encoders=30, sampling=1, decoding=4),
)
MOST = dict(zip(OPTIONS, (None, "bfloat16", "device", False, 8, 16, 4), strict=True))


def test_options_that_fit_change_no_more_than_is_needed() -> None:
    checkpointed = ["model.gradient_checkpointing=true"]
    small = [*checkpointed, "model.micro_batch=4", "model.rollout_batch=8", "model.decode_batch=1"]
    least = [*checkpointed, "model.micro_batch=2", "model.rollout_batch=1", "model.decode_batch=1"]
    expected = {
        130 + 8 * 16: [],
        130 + 4 * 16: ["model.micro_batch=4"],
        130 + 4 * 9: ["model.gradient_checkpointing=selective", "model.micro_batch=4"],
        130 + 30: [*checkpointed, "model.decode_batch=2"],  # the text encoders
        130 + 8 + 2 * 4: ["encode_on=cpu", *checkpointed, "model.rollout_batch=8", "model.decode_batch=2"],
        80 + 30: ["base_weights=int8", *checkpointed, "model.decode_batch=2"],
        80 + 8 + 4: ["base_weights=int8", "encode_on=cpu", *small],
        60 + 8 + 4: ["family=prefix", "base_weights=int8", "encode_on=cpu", *small],
        35 + 1 + 4: ["family=prefix", "base_weights=nf4", "encode_on=cpu", *least],
    }
    for room, arguments in expected.items():
        options = fit(FOOTPRINT, MOST, room)
        assert overrides(options, MOST) == arguments
        assert FOOTPRINT.peak(options) == room
        # auto is what was fitted, or less
        fitted = dict(options) | {RECOMPUTED: "auto"}
        settled = FOOTPRINT.settled(fitted, room)
        assert FOOTPRINT.peak(settled) <= room and settled[RECOMPUTED] in (options[RECOMPUTED], False)
    nearest = fit(FOOTPRINT, MOST, 39)
    assert FOOTPRINT.peak(nearest) == 40
    assert all(fit(FOOTPRINT._replace(shadow=0), MOST, room)["family"] is None for room in (1000, 10))


@pytest.mark.parametrize(
    ("room", "blocks"), [(258, False), (257, "selective"), (202, "selective"), (201, True), (0, True)]
)
def test_auto_recomputes_the_least_that_fits(room: int, blocks: bool | str) -> None:
    assert FOOTPRINT.settled(MOST | {RECOMPUTED: "auto"}, room) == MOST | {RECOMPUTED: blocks}
    assert FOOTPRINT.settled(MOST | {RECOMPUTED: True}, 10**6)[RECOMPUTED] is True


def test_auto_is_the_same_in_plan_and_run(compose: Compose, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    options = ("trainer=cpu", "model.gradient_checkpointing=auto", "model.micro_batch=4000")
    none, selective, every = (
        plan(compose("task=plan", ONE_CARD, *options, f"{RECOMPUTED}={blocks}"))["planned_peak"]
        for blocks in ("false", "selective", "true")
    )
    assert none > selective > every
    caplog.set_level("INFO")
    for free, blocks in ((none - 1, "selective"), (selective - 1, True)):
        for module in ("solrl_lightning.tasks.plan", "solrl_lightning.sizing.plan"):
            monkeypatch.setattr(f"{module}.total_memory", lambda device, free=free: free + 6 * 10**9)
        if blocks is not True:
            assert plan(compose("task=plan", ONE_CARD, *options))["gradient_checkpointing"] == blocks
        settled = settle_checkpointing(compose(*options), torch.device("cpu")).model
        assert settled.gradient_checkpointing == settled.policy["gradient_checkpointing"] == blocks  # type: ignore[typeddict-item]
        assert caplog.messages[-1].startswith(f"{RECOMPUTED}=auto is {str(blocks).lower()} here: peaks false ")
    task = compose("task=plan").task_as(Plan)
    assert task.reserve == RESERVE
    unknown = compose(*options, "model.pretrained=me/mine")
    assert settle_checkpointing(unknown, torch.device("cpu")).model.gradient_checkpointing is True


def test_a_card_has_units_of_10_to_the_9_bytes_less_the_reserve() -> None:
    whole = {key: value * 10**9 for key, value in FOOTPRINT._asdict().items() if isinstance(value, int)}
    parts = {key: {name: n * 10**9 for name, n in getattr(FOOTPRINT, key).items()} for key in ("policy", "training")}
    footprint = Footprint(**whole, **parts, latents=FOOTPRINT.latents)
    backend = resolve("fp8", "auto", torch.device("cpu"))
    model: Any = SimpleNamespace(footprint=footprint, options=MOST, shadows={backend: footprint.shadow})
    task = Plan.model_construct(reserve=6, overrides=["model=flux1", "task.reserve=6"])
    peak = 130 + 8 * 16
    row = on_card(model, Card(Hardware("a"), peak + 6), backend, task)
    assert (row["fits"], row["peak"], row["arguments"]) == (True, peak * 10**9, ["model=flux1", "precision=fp8"])
    row = on_card(model, Card(Hardware("a"), peak + 5), backend, task)
    assert row["arguments"] == ["model=flux1", "precision=fp8", "model.micro_batch=4"]


def test_latents_of_a_pool_by_hand() -> None:
    full = Stage(sampler="merged", steps=10, solver="dpm2")
    explore = Stage(sampler="shadow", steps=6, solver="dpm2").but(name="explore", keep=24)
    one = 4 * 2 * 16  # float32, of two prompts
    # One tensor a candidate at the end of a trajectory; while chunks are joined, the chunks and new x and x0.
    assert latent_bytes([full.but(keep=24)], 96, 24, 0, one) == (96 * one, 96 * 3 * one, 24 * one)
    # A pool that is regenerated from noise has no latents.
    for stop in (None, 4):
        two = latent_bytes([explore.but(stop_after=stop), full], 96, 24, 0, one)
        assert two == (24 * one, 24 * 3 * one, 24 * one)
    # x and x0 of an early stop are two tensors.
    prefix = latent_bytes([explore.but(stop_after=4), explore.but(name="regenerate")], 96, 24, 0, one)
    assert prefix == (96 * 2 * one, 96 * 4 * one, 24 * one)
    rungs = [explore.but(stop_after=3, keep=64), explore.but(stop_after=5), full]
    assert latent_bytes(rungs, 96, 24, 0, one) == (96 * 2 * one, 96 * 4 * one, 24 * one)
    rungs = [explore.but(stop_after=3, keep=64), explore.but(stop_after=5), explore]
    assert latent_bytes(rungs, 96, 24, 0, one).sampling == (64 * 2 + 64 * 2) * one
    # 3 transitions have a path of 4 points beside x and x0, twice while they are joined.
    assert latent_bytes([full], 24, 24, 3, one) == (24 * 6 * one, 24 * 12 * one, 24 * 5 * one)


def test_latents_are_counted_with_their_stage() -> None:
    latents = {None: Latents(sampling=6, joining=7, kept=3), "prefix": Latents(60, 70, 30)}
    footprint = FOOTPRINT._replace(latents=latents)
    options = MOST | {"encode_on": "cpu", "model.gradient_checkpointing": True}
    assert footprint.peak(options) == 130 + 3 + 16 + 4 * 4 + 6  # sampling
    assert footprint.peak(options | {"model.rollout_batch": 1, "model.decode_batch": 1}) == 130 + 3 + 8 * 2  # training
    joined = options | {"model.rollout_batch": 1, "model.decode_batch": 1, "model.micro_batch": 1}
    assert footprint._replace(latents={None: Latents(0, 9, 3)}).peak(joined) == 130 + 3 + 9
    assert footprint.peak(options | {"family": "prefix"}) == 110 + 30 + 16 + 4 * 4 + 60


def test_run_counts_the_latents_of_its_share_of_the_prompts(compose: Compose) -> None:
    cfg = compose("prompts_per_iteration=9", "family.pool=8", "family.keep=4")
    one = 4 * 16 * 32
    for devices, prompts in ((1, 9), (4, 3)):
        latents = pool_latents(cfg, (16, 32), uniform_sigmas, devices)
        assert latents == (4 * prompts * one, 4 * 3 * prompts * one, 4 * prompts * one)
    few = ("prompts_per_iteration=1", "family.pool=4", "family.keep=4")
    windowed = compose("objective=flow_grpo", "family=diffusionnft", *few)
    points = len(build_objective(windowed.objective).transitions(windowed.model.full_steps, 0)) + 1
    assert points > 2 and pool_latents(windowed, (16, 32), uniform_sigmas).kept == 4 * (1 + points) * one


def test_shadow_on_a_card_has_the_bits_of_its_capability(compose: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    def cards(option: str) -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = plan(compose("task=plan", "trainer=cpu", THREE_CARDS, option))["cards"]
        assert tuple(card["capability"] for card in cards) == CAPABILITIES
        return cards

    of_precision = {name: cards(f"precision={name}") for name in ("auto", "nvfp4", "bf16")}
    shadows = {name: [(c["precision"], c["bits_a_weight"]) for c in each] for name, each in of_precision.items()}
    assert shadows == {
        "auto": [("int8", 8), ("fp8", 8), ("nvfp4", 4.5)],
        "nvfp4": [("nvfp4", 16), ("nvfp4", 16), ("nvfp4", 4.5)],
        "bf16": [("bf16", 16)] * 3,
    }
    first_runs = [["family=prefix"], ["family=prefix"], ["family=sol_rl", "precision=nvfp4"]]
    assert [card["first_run"] for card in of_precision["auto"]] == first_runs
    quantised = 17 * 128 * 128 + 5 * 128 * 512
    _, emulated, packed = (card["peak_of_this_run"] for card in of_precision["nvfp4"])
    assert emulated - packed == quantised * (16 - 4.5) / 8
    for name in ("nvfp4", "auto"):
        for card in of_precision[name][:2]:
            assert f"precision={card['precision']}" in card["arguments"]

    capsys.readouterr()
    for card in cards("family=prefix"):  # a family without a shadow
        assert card["precision"] is None and not any("precision" in argument for argument in card["arguments"])
    assert "precision" not in capsys.readouterr().out


def test_replica_owns_quantised_and_adapted_layers_only() -> None:
    weights = {name: torch.empty(16, 32, dtype=torch.bfloat16, device="meta") for name in "abcd"}
    assert replica_bytes(weights, replaced=["a", "b"]) == 2 * 16 * 32 * 2
    assert replica_bytes(weights, ["a", "b"], quantized=["b", "c"], bits=4.5) == 16 * 32 * 2 + 2 * 16 * 32 * 4.5 / 8


def test_weights_of_flux1_under_sol_rl_take_at_most_half_more_than_one_copy(compose: Compose) -> None:
    cfg = compose("model=flux1", "family=sol_rl", "precision=nvfp4")
    architecture = find_architecture(cfg.model.pretrained, Flux1.pipeline_class)
    transformer = build_component(architecture.components["transformer"], "meta", torch.bfloat16)
    copy = sum(parameter.nbytes for parameter in transformer.parameters())
    rule = QuantizationRule(list(cfg.model.quantization.include), dict(cfg.model.quantization.exclude))
    layers = plan_layers(transformer, rule, resolve("nvfp4", "emulated", torch.device("cpu")))
    weights = {layer.name: transformer.get_submodule(layer.name).weight for layer in layers}
    quantized = [layer.name for layer in layers if layer.quantized]
    with torch.device("meta"):
        adapted = trained_as(cfg.model, 0, False)(transformer).lora_layers
    replicas = replica_bytes(weights, adapted) + replica_bytes(weights, adapted, quantized, PACKED_BITS["nvfp4"])
    assert copy == 2 * 11_901_408_320
    assert 1.2 < (copy + replicas) / copy <= 1.5


def test_evaluations_per_prompt(compose: Compose) -> None:
    baselines = {"diffusionnft": [240], "naive_scaling": [960], "compile": [960], "naive_quant": [960]}
    for name, counts in (baselines | {"sol_rl": [384, 240], "prefix": [384, 144], "race": [288, 96, 120]}).items():
        cfg = compose(f"family={name}")
        stages = cfg.family.stages(uniform_sigmas, build_objective(cfg.objective).solver)
        assert velocities_per_prompt(stages, cfg.family.pool) == counts


def test_task_needs_no_prompts_or_reward_and_writes_its_plan(command: Callable[..., Any], tmp_path: Path) -> None:
    cards = "[{name:a,memory:24,capability:9.0},{name:b,memory:0.01,capability:12}]"
    sizes = ("task.devices=4", f"task.cards={cards}", "task.reserve=0")
    absent = ("data.train=nowhere.txt", "data.eval=nowhere.txt", "reward=pickscore", "hydra.run.dir=out")
    finished = command("task=plan", "trainer=cpu", "model.micro_batch=3", *sizes, *absent)
    assert finished.status == 0, finished.err
    result = json.loads((tmp_path / "out" / "plan.json").read_text())
    layers = result["layers"]
    assert (layers["quantised_layers"], layers["kept_layers"]) == (22, 18)
    assert f"22 of 40 linear layers quantised ({100 * layers['share_of_linear_parameters']:.1f} %" in finished.out
    sizes_of = result["bytes"]
    assert sizes_of["policy"] == 2 * result["parameters"]
    assert sizes_of["trained"] == sizes_of["gradients_and_moments"] > 0
    packed = (sizes_of["policy"] + sizes_of["merged"] + sizes_of["shadow_packed"]) / sizes_of["policy"]
    assert math.isclose(result["weights_to_one_copy"]["packed"], packed)
    assert sizes_of["training"] == result["training_bytes"]["false"] > result["training_bytes"]["true"]
    always = ("policy", "merged", "shadow_here", "trained", "gradients_and_moments", "autoencoder", "kept_latents")
    largest = max(sizes_of["text_encoders"], sizes_of["training"], sizes_of["rollout"] + sizes_of["pool_latents"])
    assert 3 * result["checkpoint_bytes"] == 5 * sizes_of["gradients_and_moments"]  # weights, old, average, 2 moments
    assert command("task=plan", "trainer=cpu", "~callbacks.ema", *absent[:-1], "hydra.run.dir=other").status == 0
    without = json.loads((tmp_path / "other" / "plan.json").read_text())
    assert 3 * without["checkpoint_bytes"] == 4 * without["bytes"]["gradients_and_moments"]
    assert result["planned_peak"] == sum(sizes_of[name] for name in always) + largest
    assert [(card["card"], card["fits"]) for card in result["cards"]] == [("a", True), ("b", False)]
    assert result["cards"][1]["first_run"] == ["family=prefix"]  # has FP4 units and no room
    assert result["cards"][0]["arguments"] == ["trainer=cpu", "model.micro_batch=3", *absent[:-1], "precision=fp8"]
    words = "a (9.0)", "b (12.0)", "nothing fits, nearest: python -m", "4 for CLIP ViT-H in float32", "published: 3x"
    assert all(each in finished.out for each in words)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_ranks_of_fsdp_share_the_weights_and_gather_blocks(compose: Compose, train: str) -> None:
    run = ("task=plan", ONE_CARD, f"model.train={train}", "family=prefix", "callbacks.sample_grid.every=0")
    alone, whole, half = (
        plan(compose(*run, *words))["bytes"]
        for words in (("trainer=cpu",), ("trainer=fsdp",), ("trainer=fsdp", "task.devices=2"))
    )
    assert (alone["gathered"], whole["merged"]) == (0, 0) and alone["merged"] > 0
    trained = ("trained", "gradients_and_moments")
    assert all(alone[name] == whole[name] for name in ("policy", *trained))
    shared = ("policy", *trained) if train == "full" else ("policy",)
    assert {name: half[name] for name in shared} == {name: whole[name] / 2 for name in shared}
    assert all(half[name] == whole[name] for name in {"gathered", *trained}.difference(shared))
    transformer = embedded().transformer
    double, single = (
        sum(w.numel() for w in block.parameters())
        for block in (transformer.transformer_blocks[0], transformer.single_transformer_blocks[0])
    )
    assert double > single
    blocks = len(transformer.transformer_blocks) * double + len(transformer.single_transformer_blocks) * single
    weights = 2 * (sum(w.numel() for w in transformer.parameters()) - blocks + 2 * double)
    assert whole["gathered"] == (weights if train == "lora" else 2 * weights + 4 * double)


def test_invalid_options_are_an_error(compose: Compose) -> None:
    mistakes = {
        "task.cards=[{name:T4,memory:5,capability:7.5}]": "it must be less than the memory of a card, and T4 has 5 GB. "
        "Set task.reserve=1.25, or",
        "task.cards=[{name:T4,memory:15,capability:old}]": "task.cards.0.capability=old is invalid: it must be",
        "task.devices=9": "task.devices=9 is invalid: .* between 1 and prompts_per_iteration=4",
    }
    for argument, message in mistakes.items():
        with pytest.raises(UserError, match=message):
            plan(compose("task=plan", argument))
