"""Random numbers as functions of identity (candidate, prompt, iteration), never of history.

The same candidate gets the same noise in any precision, batch, chunk, rank, process or resumed run.

1. A seed is a hash of (run seed, iteration, identity of the prompt, candidate number). It is a 32-bit number, because
   PyTorch's CPU generator uses only the low 32 bits of its seed: two seeds are equal exactly when their noises are.
2. Noise is drawn on the CPU whatever the device, one generator state per candidate.
3. The published code draws seeds from the global generator of each rank instead, so its noise depends on the number of
   ranks and repeats after a resume.

Shapes: P prompts, N pool, B batch, T solver steps.
"""

import hashlib
import random
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORD = np.dtype("<u4")


def pool_seeds(seed: int, iteration: int, prompts: Sequence[str], n: int) -> Tensor:
    """Return int64 [P, n] in [0, 2^32): the seeds of each prompt's candidates, distinct within a prompt.

    Candidate i does not depend on n, on other prompts or on their order.
    """
    return _seed_rows([f"pool/{seed}/{iteration}/{prompt}" for prompt in prompts], n)


def evaluation_seeds(seed: int, prompts: Sequence[str], n: int) -> Tensor:
    """Return int64 [P, n] as `pool_seeds`, but equal in all iterations and independent of every pool."""
    return _seed_rows([f"evaluation/{seed}/{prompt}" for prompt in prompts], n)


def noise(seeds: Tensor, shape: Sequence[int]) -> Tensor:
    """Return standard normal float32 [*seeds.shape, *shape] on the CPU, a function of each seed."""
    rows = torch.empty(seeds.numel(), *shape, dtype=torch.float32)
    generator = torch.Generator()
    for row, seed in zip(rows, seeds.flatten().tolist(), strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return rows.view(*seeds.shape, *shape)


def training_noise(seeds: Tensor, timesteps: Tensor, shape: Sequence[int]) -> Tensor:
    """Return float32 [B, *shape]: the noise that takes candidate seeds[b] to the noise level of timesteps[b].

    Independent of the candidate's sampling noise and of its other timesteps.
    """
    return noise(_derived_seeds(seeds.tolist(), timesteps.tolist(), b"training-noise"), shape)


def step_noise(seeds: Tensor, step: int, shape: Sequence[int]) -> Tensor:
    """Return float32 [B, *shape]: the noise that a stochastic solver adds to candidate seeds[b] in a step.

    Independent of the candidate's other noises.
    """
    return noise(_derived_seeds(seeds.tolist(), [step] * len(seeds), b"step-noise"), shape)


def train_timesteps(seeds: Tensor, num_steps: int, fraction: float) -> Tensor:
    """Return int64 [B, max(1, int(T * fraction))]: the solver steps that each candidate trains on.

    They are the head of a random permutation of range(T) per candidate.

    Raises:
        ValueError: fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"the fraction of timesteps must be in (0, 1]; got {fraction}")
    count = max(1, int(num_steps * fraction))
    orders = [permutation(f"timesteps/{seed}", num_steps)[:count] for seed in seeds.tolist()]
    return torch.tensor(np.array(orders, dtype=np.int64).reshape(len(orders), count))


def seed_global_generators(seed: int, iteration: int, rank: int) -> None:
    """Seed Python's, NumPy's and torch's own generators, of which the code of users may draw."""
    word = int(_words(f"global/{seed}/{iteration}/{rank}", 1)[0])
    random.seed(word)
    np.random.seed(word)
    torch.manual_seed(word)


def permutation(identity: str, n: int) -> np.ndarray:
    """Return int64 [n]: a permutation of range(n) that depends on `identity` only, not on library versions."""
    return np.argsort(_words(identity, n), kind="stable")


def _seed_rows(identities: Sequence[str], n: int) -> Tensor:
    """Return int64 [P, n]: a row of distinct words per identity."""
    rows = np.array([_distinct_words(identity, n) for identity in identities], dtype=np.int64)
    return torch.from_numpy(rows.reshape(len(identities), n))


def _distinct_words(identity: str, n: int) -> np.ndarray:
    """Return the first n distinct words of the identity's stream."""
    length = n
    while True:
        words = _words(identity, length)
        _, first_seen = np.unique(words, return_index=True)
        if len(first_seen) >= n:
            return words[np.sort(first_seen)[:n]]
        length *= 2


def _words(identity: str, n: int) -> np.ndarray:
    """Return uint32 [n]: the first words of the infinite stream of `identity`."""
    return np.frombuffer(hashlib.shake_128(identity.encode()).digest(n * _WORD.itemsize), dtype=_WORD)


def _derived_seeds(seeds: Sequence[int], numbers: Sequence[int], purpose: bytes) -> Tensor:
    """Return int64 [B]: one seed per pair (seed, number) and purpose."""
    digests = [
        hashlib.blake2b(struct.pack("<qq", *pair), digest_size=_WORD.itemsize, person=purpose).digest()
        for pair in zip(seeds, numbers, strict=True)
    ]
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype=_WORD).astype(np.int64))
