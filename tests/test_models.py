"""Models in families, on small folders in the real layouts: it trains, is evaluated and saves its LoRA."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, SanaPipeline, WanPipeline
from nano import MAX_WORDS, PROMPTS, adapters, load_nano, prompts_of, random_state, save_nano
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from solrl_lightning.options.run import Run
from solrl_lightning.policies import lora
from solrl_lightning.quantization import QuantizationRule, resolve
from solrl_lightning.rewards.shapes import ShapesReward
from solrl_lightning.tasks.train import train
from solrl_lightning.training.transformers import replicate

# Videos continue from their latents. The others train in test_distilled.py, test_own_model.py and test_loop.py.
CASES = [("sana", "sol_rl"), ("wan", "prefix")]
VIDEO = "model.num_frames=5", "model.frames=2"
SMALL = (
    "experiment=smoke reward=shapes data=shapes trainer=cpu ~logger iterations=1 family.pool=6 family.keep=3 "
    f"model.resolution=32 model.max_sequence_length={MAX_WORDS} model.full_steps=3 model.preview_steps=2 "
    "model.prefix_steps=2 model.eval_steps=1 data.eval_prompts=2 data.eval_images=1 callbacks.sample_grid.every=0"
).split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: save_nano(tmp_path_factory.mktemp(name), name) for name in ("sana", "wan", "qwen_image")}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch.compile traces; they run eagerly, also recomputed in the backward pass."""
    traced: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: compile_with(*args, **(kw | {"backend": backend})))
    return traced


@pytest.mark.parametrize(("model", "family"), CASES)
def test_a_model_trains_in_a_family(
    compose: Callable[..., Run],
    folders: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    family: str,
) -> None:
    # Pictures of untrained models have no shapes: some models' rewards would all be 0.
    monkeypatch.setattr(ShapesReward, "score", lambda self, images, prompts: images.mean((1, 2, 3)))
    job = (f"model={model}", f"model.pretrained={folders[model]}", f"model.embeddings={tmp_path / 'embeddings'}")
    job += VIDEO if model == "wan" else ()
    reward = train(compose(*job, *SMALL, f"family={family}", "family.compile=false"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "completed" and reward == summary["final_reward"]
    assert [row["iteration"] for row in summary["evaluations"]] == list(range(summary["iterations"] + 1))
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()
    assert len(list((tmp_path / "embeddings").glob("*.safetensors"))) >= 2
    moved = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    assert max(value.abs().max() for name, value in moved.items() if "lora_B" in name) > 0
    pipeline = DiffusionPipeline.from_pretrained(folders[model])
    before = picture(pipeline)
    pipeline.load_lora_weights(tmp_path / "lora")
    assert (picture(pipeline) - before).abs().max() > 0


def picture(pipeline: Any) -> torch.Tensor:
    """Latents after two steps of plain diffusers."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = dict(height=32, width=32, num_inference_steps=2, output_type="latent", guidance_scale=1.0)
    if isinstance(pipeline, SanaPipeline):
        options["use_resolution_binning"] = False  # to one of the real model's sizes
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler()  # numpy warns about its own one
    elif isinstance(pipeline, WanPipeline):
        options["num_frames"] = 5
    return pipeline(prompt=PROMPTS[0], generator=generator, max_sequence_length=MAX_WORDS, **options)[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own access
def test_compiled_training_has_two_graphs_per_kind_of_block_and_the_eager_gradients(
    folders: dict[str, str], graphs: list[Any]
) -> None:
    """One graph with gradients for the trained adapter, one without for the old one, and none in later iterations.

    The backward pass runs in another thread, as on a GPU, where torch 2.15 has its default limit of graphs.
    """
    gradients: dict[bool, list[Tensor]] = {}
    autograd = ThreadPoolExecutor(1)
    for compiled in (False, True):
        model = load_nano("qwen_image", folders["qwen_image"], gradient_checkpointing="selective")
        options = dict(batch_size=3, compile_replicas=False, with_shadow=False)
        options |= dict(rule=QuantizationRule([], {}), backend=resolve("bf16", "auto", model.device))
        transformers = replicate(model, adapters(), compile_policy=compiled, **options)
        adapted = transformers.trained
        lora.load_state(adapted.lora_layers, "default", random_state(adapted.state("default"), seed=1))
        x, conditioning = model.noise(torch.tensor([1, 2, 3])), model.encode(prompts_of(PROMPTS))
        for step in range(2):
            sigma = torch.tensor([0.9, 0.5, 0.1 + 0.1 * step])
            with torch.no_grad(), adapted.old() as transformer:
                old = model.velocity(transformer, x, sigma, conditioning)
            velocity = model.velocity(model.transformer, x, sigma, conditioning)
            model.transformer.zero_grad()
            autograd.submit((velocity - old).square().mean().backward).result()
            adapted.update_old(0.5)
        gradients[compiled] = [p.grad for p in model.transformer.parameters() if p.grad is not None]
    assert len(graphs) == 2
    scale = max(value.abs().max().item() for value in gradients[False])
    for eager, fused in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(fused, eager, rtol=0.05, atol=0.02 * scale)
