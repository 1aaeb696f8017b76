"""Prompt embeddings on disk: what is found again, what is not trusted, and when the text encoders are loaded."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nano import PROMPTS, load_nano, lora_config
from torch import Tensor, nn

from solrl_lightning.policies import adapters
from solrl_lightning.policies.embeddings import EmbeddingCache, encoder_fingerprint
from solrl_lightning.policies.pipeline import PipelineAdapter
from solrl_lightning.rollout.records import EncodedPrompts

ROW = {"embeds": torch.arange(6).view(2, 3).bfloat16(), "mask": torch.tensor([1, 0]), "half": torch.tensor(0.5)}


def equal(one: dict[str, Tensor] | None, other: dict[str, Tensor]) -> bool:
    return one is not None and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def encoder(policy: PipelineAdapter) -> nn.Module | None:
    return policy.pipeline.components["text_encoder"]


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    cache = EmbeddingCache(tmp_path / "new" / "embeddings", "a model")
    cache.save("a text", ROW)
    return cache


def test_what_was_saved_is_loaded_to_the_bit(cache: EmbeddingCache) -> None:
    found = cache.load("a text")
    assert found is not None and equal(found, ROW)
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in ROW.items()}


def test_another_text_or_another_model_is_not_found(cache: EmbeddingCache) -> None:
    assert cache.load("a text ") is None
    assert EmbeddingCache(cache.folder, "another model").load("a text") is None
    assert EmbeddingCache(cache.folder / "elsewhere", "a model").load("a text") is None
    assert EmbeddingCache(cache.folder, "a model").load("a text") is not None


@pytest.mark.parametrize("text", ["../../outside", "", "/etc/passwd", "ein Kreis \N{SNOWMAN}\n\x00", "long " * 1000])
def test_any_text_has_a_file_in_the_folder(cache: EmbeddingCache, text: str) -> None:
    cache.save(text, ROW)
    assert equal(cache.load(text), ROW)
    assert cache.path(text).parent == cache.folder and cache.path(text).stem.isalnum()
    assert {file.name for file in cache.folder.iterdir()} == {cache.path(text).name, cache.path("a text").name}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"no tensors at all" * 100,
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),  # one bit of the last tensor
    ],
    ids=["empty", "garbage", "cut off", "one bit"],
)
def test_a_damaged_file_is_not_trusted(
    cache: EmbeddingCache, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.path("a text")
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert cache.load("a text") is None
    assert len(caplog.records) == 1 and str(path) in caplog.text and "embedded again" in caplog.text
    cache.save("a text", ROW)
    assert equal(cache.load("a text"), ROW)


def test_a_file_of_another_tool_is_not_trusted(cache: EmbeddingCache) -> None:
    from safetensors.torch import save_file

    save_file(ROW, cache.path("a text"))
    assert cache.load("a text") is None


def test_a_file_appears_whole_or_not_at_all(cache: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.save("another text", ROW)
    with pytest.raises(KeyboardInterrupt):
        cache.save("a text", {"embeds": torch.zeros(1)})
    assert cache.load("another text") is None and equal(cache.load("a text"), ROW)


def test_an_identity_changes_with_the_encoders_their_place_and_their_settings(
    folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(folder_of("flux1"), tmp_path / "copied"))
    encoders = ("text_encoder", "tokenizer")
    settings: dict[str, object] = {"length": 10}
    seen = [
        encoder_fingerprint(copied, encoders, settings),
        encoder_fingerprint(Path(folder_of("flux1")), encoders, settings),
    ]
    assert encoder_fingerprint(copied, encoders, settings) == seen[0]
    seen.append(encoder_fingerprint(copied, encoders, {"length": 11}))
    os.utime(copied / "text_encoder" / "model.safetensors", (1, 1))
    seen.append(encoder_fingerprint(copied, encoders, settings))
    (copied / "tokenizer" / "tokenizer.json").write_text("{}")
    seen.append(encoder_fingerprint(copied, encoders, settings))
    assert len(set(seen)) == len(seen)
    (copied / "vae" / "config.json").write_text("{}")  # not read for an embedding
    assert encoder_fingerprint(copied, encoders, settings) == seen[-1]


def test_a_hub_snapshot_is_known_by_its_commit_even_before_its_encoders_are_there(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    before = encoder_fingerprint(snapshot, ("text_encoder",), {})
    (snapshot / "text_encoder").mkdir()
    (snapshot / "text_encoder" / "model.safetensors").write_bytes(b"weights")
    assert encoder_fingerprint(snapshot, ("text_encoder",), {}) == before
    assert encoder_fingerprint(snapshot.with_name("decade"), ("text_encoder",), {}) != before


def test_encoders_are_loaded_for_the_first_new_prompt_and_never_for_known_ones(
    architecture: str, folder: str, tmp_path: Path
) -> None:
    plain = load_nano(architecture, folder)
    assert encoder(plain) is not None  # without a cache they are needed anyhow
    expected = plain.encode(PROMPTS)
    first = load_nano(architecture, folder, embeddings=str(tmp_path))
    assert encoder(first) is None
    layers = adapters.add_adapters(first.transformer, lora_config(), seed=0)
    transformer, trained = first.transformer, [p for p in first.transformer.parameters() if p.requires_grad]
    assert equal(first.encode(PROMPTS), expected)
    assert encoder(first) is not None and len(list(tmp_path.iterdir())) == 3
    assert first.pipeline.transformer is transformer and trained and layers
    assert [p for p in transformer.parameters() if p.requires_grad] == trained

    second = load_nano(architecture, folder, embeddings=str(tmp_path))
    assert equal(second.encode(PROMPTS[::-1]), {name: value.flip(0) for name, value in expected.items()})
    assert encoder(second) is None
    mixed = second.encode(["a red square", PROMPTS[1]])
    assert encoder(second) is not None
    for name, value in mixed.items():
        assert torch.equal(value[1], expected[name][1]) and len(value) == 2
    assert not torch.equal(mixed["prompt_embeds"][0], expected["prompt_embeds"][0])

    longer = load_nano(architecture, folder, embeddings=str(tmp_path), max_sequence_length=12)
    longer.encode(PROMPTS)
    assert encoder(longer) is not None


def test_rows_of_a_chunk_keep_every_tensor_of_their_prompt(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    policy = load_nano("sana", folder_of("sana"), embeddings=str(tmp_path), max_sequence_length=40)
    texts = ["a red circle", "a red circle above a blue square"]
    for _ in range(2):  # fresh, then from the cache
        conditioning = policy.encode(texts)
        mask = conditioning["prompt_mask"]
        assert mask.dtype == torch.int64 and mask.sum(1).tolist() == [13, 33]  # a start token and the letters
        chosen, rows = EncodedPrompts(texts, conditioning).gather(torch.tensor([1, 0, 1]))
        assert chosen == [texts[1], texts[0], texts[1]] and torch.equal(rows["prompt_mask"], mask[[1, 0, 1]])


def test_encoders_visit_a_gpu_and_leave_it(architecture: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, events = load_nano(architecture, folder), []
    modules = [m for name, m in policy.pipeline.components.items() if name in policy.encoders and hasattr(m, "to")]
    embedded = policy.encode_uncached(PROMPTS, torch.device("cpu"))
    for module in modules:
        monkeypatch.setattr(module, "to", lambda device: events.append(str(device)))
    monkeypatch.setattr(policy, "device", torch.device("cuda"))
    monkeypatch.setattr(
        policy, "encode_uncached", lambda texts, device: events.append(f"embed on {device}") or embedded
    )
    assert len(policy._encode_rows(PROMPTS)) == 3
    assert events == ["cuda"] * len(modules) + ["embed on cuda"] + ["cpu"] * len(modules) and modules
