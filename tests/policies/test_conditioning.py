"""Embeddings of different lengths in one batch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from nano import NANO, policy_options
from torch import Tensor

from solrl_lightning.policies.conditioning import stack_rows
from solrl_lightning.policies.sd3 import SD3


def test_equal_shapes_are_stacked_without_a_mask() -> None:
    rows = [{"embeds": torch.randn(5, 3), "pooled": torch.randn(4)} for _ in range(2)]
    stacked = stack_rows(rows)
    assert set(stacked) == {"embeds", "pooled"}
    assert all(torch.equal(value, torch.stack([row[name] for row in rows])) for name, value in stacked.items())


def test_different_lengths_are_padded_with_zeros_and_masked() -> None:
    lengths = (2, 5, 1)
    rows = [{"embeds": torch.randn(n, 3).bfloat16(), "pooled": torch.randn(4)} for n in lengths]
    stacked = stack_rows(rows)
    assert set(stacked) == {"embeds", "embeds_mask", "pooled"}
    assert stacked["embeds"].shape == (3, 5, 3) and stacked["embeds"].dtype == torch.bfloat16
    assert stacked["embeds_mask"].tolist() == [[token < n for token in range(5)] for n in lengths]
    for row, padded, mask in zip(rows, stacked["embeds"], stacked["embeds_mask"], strict=True):
        assert torch.equal(padded[mask], row["embeds"]) and not padded[~mask].any()


class Unpadded(SD3):
    """Embeds as many tokens as a prompt has words."""

    def encode_uncached(self, prompts: list[str], device: torch.device) -> Mapping[str, Tensor | Sequence[Tensor]]:
        padded = super().encode_uncached(prompts, device)
        lengths = [len(prompt.split()) for prompt in prompts]
        embeds = [row[:length] for row, length in zip(padded["prompt_embeds"], lengths, strict=True)]
        return {**padded, "prompt_embeds": embeds}


def test_a_policy_may_embed_prompts_in_different_lengths(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    policy = Unpadded(**policy_options("sd3") | NANO | dict(pretrained=folder_of("sd3"), embeddings=str(tmp_path)))
    alone = policy.encode(["a red circle"])
    assert set(alone) == {"prompt_embeds", "pooled"} and alone["prompt_embeds"].shape[1] == 3
    both = policy.encode(["a red circle above a blue square", "a red circle"])  # the second one from its file
    assert both["prompt_embeds_mask"].sum(1).tolist() == [7, 3] and both["prompt_embeds"].dtype == torch.bfloat16
    assert torch.equal(both["prompt_embeds"][1, :3], alone["prompt_embeds"][0])
