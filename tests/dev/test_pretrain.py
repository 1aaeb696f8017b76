"""Two steps of the pretraining recipe."""

from pathlib import Path

import pytest
import torch
from nano import load_model
from pretrain import Recipe, build_pipeline, pretrain_pipeline
from torch import Tensor

from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.shapes.world import all_scenes, eval_captions, train_captions

RECIPE = Recipe(
    seed=3,
    vae_steps=2,
    vae_batch=2,
    flow_steps=2,
    flow_cycle=4,
    flow_batch=2,
    doubt_steps=2,
    preview_steps=2,
    preview_batch=2,
)
COMPONENTS = ("vae", "transformer", "text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    pretrain_pipeline(folder, RECIPE, torch.device("cpu"))
    return folder


def weights(pipeline: object) -> dict[str, Tensor]:
    return {f"{c}.{name}": value for c in COMPONENTS for name, value in getattr(pipeline, c).state_dict().items()}


def loaded(folder: Path) -> Flux1:
    return load_model(str(folder))


def test_saved_folder_loads_as_a_policy_with_a_bfloat16_transformer(folder: Path) -> None:
    model = loaded(folder)
    saved = (folder / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size
    parameters = sum(parameter.numel() for parameter in model.transformer.parameters())
    assert 2 * parameters < saved < 2.2 * parameters  # two bytes a parameter, and a header
    assert model.latent_shape == (16, 32)
    assert model.decode(model.noise(torch.tensor([1]))).shape == (1, 3, 32, 32)


def test_model_is_a_function_of_the_seed_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    expected = weights(loaded(folder).pipeline)
    pretrain_pipeline(tmp_path / "again", RECIPE, torch.device("cpu"))
    again = weights(loaded(tmp_path / "again").pipeline)
    assert expected.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


def test_training_changes_every_component_and_sets_the_latents_scale(folder: Path) -> None:
    before, pipeline = weights(build_pipeline(RECIPE.seed)), loaded(folder).pipeline
    after = weights(pipeline)
    for component in COMPONENTS:
        moved = [
            not torch.equal(value.to(after[name].dtype), after[name])
            for name, value in before.items()
            if name.startswith(f"{component}.")
        ]
        assert any(moved), component
    assert pipeline.vae.config.scaling_factor > 0
    assert (pipeline.vae.config.scaling_factor, pipeline.vae.config.shift_factor) != (1.0, 0.0)


def test_every_word_of_the_grammar_is_one_token_of_both_tokenizers() -> None:
    pipeline = build_pipeline(0)
    longest = max((scene.caption() for scene in all_scenes()), key=lambda caption: len(caption.split()))
    for tokenizer, extra in ((pipeline.tokenizer, 2), (pipeline.tokenizer_2, 1)):  # start and end; end
        known = set()
        for caption in [*eval_captions(), *train_captions()]:
            ids = tokenizer(caption).input_ids
            assert len(ids) == len(caption.split()) + extra
            known.update(ids)
        assert len(known) == len({word for scene in all_scenes() for word in scene.caption().split()}) + extra
        assert tokenizer.unk_token_id not in known or tokenizer is pipeline.tokenizer
        assert len(tokenizer(longest).input_ids) <= tokenizer.model_max_length
