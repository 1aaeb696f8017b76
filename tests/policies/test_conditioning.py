"""Embeddings of different lengths in one batch."""

import torch

from solrl_lightning.policies.conditioning import stack_rows


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
