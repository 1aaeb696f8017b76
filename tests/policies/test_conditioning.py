"""Embeddings of different lengths in one batch."""

import torch

from solrl_lightning.policies.conditioning import stack_rows


def test_rows_are_stacked_and_padded_with_zeros_and_a_mask_where_lengths_differ() -> None:
    lengths = (2, 5, 1)
    rows = [{"embeds": torch.randn(n, 3).bfloat16(), "pooled": torch.randn(4)} for n in lengths]
    stacked = stack_rows(rows)
    assert set(stacked) == {"embeds", "embeds_mask", "pooled"}
    assert torch.equal(stacked["pooled"], torch.stack([row["pooled"] for row in rows]))
    assert stacked["embeds"].shape == (3, 5, 3) and stacked["embeds"].dtype == torch.bfloat16
    assert stacked["embeds_mask"].tolist() == [[token < n for token in range(5)] for n in lengths]
    for row, padded, mask in zip(rows, stacked["embeds"], stacked["embeds_mask"], strict=True):
        assert torch.equal(padded[mask], row["embeds"]) and not padded[~mask].any()
    assert set(stack_rows(rows[:1] * 2)) == {"embeds", "pooled"}
