"""Each file of every pipeline folder taken away: an error of one line that names it, or equal embeddings and levels."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nano import EDITORS, PROMPTS, load_nano, model_class, prompts_of
from take_away import take_each_file_away

from solrl_lightning.errors import UserError
from solrl_lightning.policies.loading import fetch, load_module, load_pipeline

FolderOf = Callable[[str], str]


# These have the encoders and tokenizers of all.
@pytest.mark.parametrize("architecture", ["sd3", "sana", "z_image", *EDITORS])
def test_a_file_that_is_missing_is_named_or_makes_no_difference(architecture: str, folder_of: FolderOf) -> None:
    folder = Path(folder_of(architecture))

    def embeddings_and_levels() -> list[torch.Tensor]:
        fetch(model_class(architecture).pipeline_class, str(folder))
        if architecture in EDITORS:  # whose prompts need images
            return []
        length = 40 if architecture == "z_image" else 10
        model = load_nano(architecture, str(folder), max_sequence_length=length)
        return [model.sigmas(4), *model.encode(prompts_of(PROMPTS)).values()]

    take_each_file_away(folder, embeddings_and_levels, leave=".safetensors")  # test_loading takes them


def test_weights_of_another_variant_are_one_line(folder_of: FolderOf, tmp_path: Path) -> None:
    pipeline = load_pipeline(model_class("flux1").pipeline_class, folder_of("flux1"))
    pipeline.transformer.save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(UserError, match=r"model.variant=null .* are in .*\.fp16\.safetensors\. Set model.variant="):
        load_module(type(pipeline.transformer), tmp_path, torch.float32)
    assert load_module(type(pipeline.transformer), tmp_path, torch.float32, "fp16") is not None
