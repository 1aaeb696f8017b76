"""Embeddings of prompts, stacked for a batch.

Shapes: P prompts, L_i tokens of prompt i, L the most tokens of a prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Row = dict[str, Tensor]  # embeddings of one prompt, by name
Conditioning = dict[str, Tensor]  # embeddings of P prompts, each [P, ...]


def stack_rows(rows: Sequence[Row]) -> Conditioning:
    """Stack the embeddings of P prompts.

    Embeddings [L_i, ...] of different lengths are padded with zeros to [P, L, ...] and get a mask ``<name>_mask``, bool
    [P, L], which is False at padding. Embeddings of equal shape get no mask.
    """
    stacked: Conditioning = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        stacked[name] = pad_sequence(values, batch_first=True)
        lengths = torch.tensor([len(value) for value in values])
        if lengths.min() < lengths.max():
            stacked[f"{name}_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).to(values[0].device)
    return stacked
