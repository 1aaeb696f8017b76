"""Prompt embeddings on disk: which files are trusted, and when the text encoders are loaded."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nano import PROMPTS, load_nano, prompts_of
from safetensors.torch import save_file
from torch import Tensor

from solrl_lightning.build import build_model
from solrl_lightning.options.run import Run
from solrl_lightning.policies import embeddings
from solrl_lightning.policies.embeddings import EmbeddingCache, encoder_fingerprint
from solrl_lightning.policies.flux1 import Flux1

ROW = {"embeds": torch.arange(6).view(2, 3).bfloat16(), "mask": torch.tensor([1, 0]), "half": torch.tensor(0.5)}


def equal(one: dict[str, Tensor] | None, other: dict[str, Tensor]) -> bool:
    return one is not None and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def cache(tmp_path: Path) -> EmbeddingCache:
    cache = EmbeddingCache(tmp_path / "new" / "embeddings", "a model")
    cache.save("a text", ROW)
    return cache


def test_row_loads_to_the_bit_for_its_text_and_model_only(cache: EmbeddingCache) -> None:
    row = EmbeddingCache(cache.folder, "a model").load("a text")
    assert row is not None and equal(row, ROW)
    assert {name: value.dtype for name, value in row.items()} == {name: value.dtype for name, value in ROW.items()}
    assert cache.load("a text ") is None
    assert EmbeddingCache(cache.folder, "another model").load("a text") is None
    assert EmbeddingCache(cache.folder / "elsewhere", "a model").load("a text") is None


class Scaled(Flux1):
    """A custom model whose embeddings are others, of the same encoders."""

    def __init__(self, pretrained: str, resolution: int, *, factor: float, **others: Any) -> None:
        self.factor = factor
        super().__init__(pretrained, resolution, **others)

    def encode_uncached(self, prompts: list[str], device: torch.device) -> Any:
        return {name: self.factor * value for name, value in super().encode_uncached(prompts, device).items()}


def test_a_custom_model_has_embeddings_apart_by_its_arguments(compose: Callable[..., Run], tmp_path: Path) -> None:
    common = [f"model.embeddings={tmp_path / 'embeddings'}", "model.dtypes.transformer=float32"]
    custom = [*common, f"model.policy._target_={__name__}.Scaled"]

    def encoded(*arguments: str) -> dict[str, Tensor]:
        return build_model(compose(*arguments), torch.device("cpu")).model.encode(prompts_of(PROMPTS))

    plain = encoded(*common)
    for factor in (-1, 2, -1):
        changed = encoded(*custom, f"+model.policy.factor={factor}.0")
        assert equal(changed, {name: factor * value for name, value in plain.items()})
    assert equal(encoded(*common), plain)
    assert len([path for path in (tmp_path / "embeddings").iterdir() if path.is_dir()]) == 2


@pytest.mark.parametrize("text", ["../../outside", "", "ein Kreis \N{SNOWMAN}\n\x00", "long " * 1000])
def test_any_text_has_a_file_in_the_folder(cache: EmbeddingCache, text: str) -> None:
    cache.save(text, ROW)
    assert equal(cache.load(text), ROW)
    assert cache.path(text).parent == cache.folder and cache.path(text).stem.isalnum()
    assert {file.name for file in cache.folder.iterdir()} == {cache.path(text).name, cache.path("a text").name}


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-10]),
        lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
        lambda file: save_file(ROW, file),
    ],
    ids=["empty", "cut off", "one bit of the last tensor", "of another tool"],
)
def test_damaged_file_is_embedded_again(
    cache: EmbeddingCache, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = cache.path("a text")
    damage(path)
    with caplog.at_level(logging.WARNING):
        assert cache.load("a text") is None
    assert len(caplog.records) == 1 and str(path) in caplog.text and "embedded again" in caplog.text
    cache.save("a text", ROW)
    assert equal(cache.load("a text"), ROW)


def test_file_that_only_another_user_may_read_is_embedded_again(
    cache: EmbeddingCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path, framework: str) -> Any:
        raise FileNotFoundError(f"No such file or directory: {path}")  # what safetensors raises for it

    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "safe_open", refused)
        assert cache.load("a text") is None and "not readable; the prompt is embedded again" in caplog.text
    cache.save("a text", ROW)
    assert equal(cache.load("a text"), ROW)


def test_file_is_written_atomically(cache: EmbeddingCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    for text in ("another text", "a text"):
        with pytest.raises(KeyboardInterrupt):
            cache.save(text, {"embeds": torch.zeros(1)})
    assert cache.load("another text") is None and equal(cache.load("a text"), ROW)


def test_fingerprint_changes_with_encoders_folder_and_settings(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder_of("flux1"), tmp_path / "copied"))

    def identity(folder: str | Path = copied, length: int = 10) -> str:
        return encoder_fingerprint(Path(folder), ("text_encoder", "tokenizer"), {"length": length})

    identities = [identity(), identity(folder_of("flux1")), identity(length=11)]
    assert identity() == identities[0]
    os.utime(copied / "text_encoder" / "model.safetensors", (1, 1))
    identities.append(identity())
    (copied / "tokenizer" / "tokenizer.json").write_text("{}")
    identities.append(identity())
    assert len(set(identities)) == len(identities)
    (copied / "vae" / "config.json").write_text("{}")  # not read for an embedding
    assert identity() == identities[-1]


def test_fingerprint_of_a_hub_snapshot_is_its_commit(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    before = encoder_fingerprint(snapshot, ("text_encoder",), {})
    (snapshot / "text_encoder").mkdir()
    (snapshot / "text_encoder" / "model.safetensors").write_bytes(b"weights")  # downloaded later
    assert encoder_fingerprint(snapshot, ("text_encoder",), {}) == before
    assert encoder_fingerprint(snapshot.with_name("decade"), ("text_encoder",), {}) != before
    local = shutil.copytree(snapshot, tmp_path / "ft" / "snapshots" / "latest")  # no snapshot of the hub
    before = encoder_fingerprint(local, ("text_encoder",), {})
    (local / "text_encoder" / "model.safetensors").write_bytes(b"trained weights")
    assert encoder_fingerprint(local, ("text_encoder",), {}) != before


# With several encoders, one, and one whose padding is not stored.
@pytest.mark.parametrize("architecture", ["sd3", "sana", "wan"], indirect=True, scope="session")
def test_encoders_are_loaded_for_the_first_new_prompt_only(architecture: str, folder: str, tmp_path: Path) -> None:
    plain = load_nano(architecture, folder)
    assert plain.pipeline.text_encoder is not None  # without a cache they are needed anyhow
    expected = plain.encode(prompts_of(PROMPTS))
    first = load_nano(architecture, folder, embeddings=str(tmp_path))
    transformer, weight = first.transformer, next(first.transformer.parameters()).requires_grad_()
    assert first.pipeline.text_encoder is None
    assert equal(first.encode(prompts_of(PROMPTS)), expected)
    assert first.pipeline.text_encoder is not None and len(list(tmp_path.iterdir())) == 3
    assert first.pipeline.transformer is transformer and weight.requires_grad

    second = load_nano(architecture, folder, embeddings=str(tmp_path))
    assert equal(second.encode(prompts_of(PROMPTS[::-1])), {name: value.flip(0) for name, value in expected.items()})
    assert second.pipeline.text_encoder is None
    mixed = second.encode(prompts_of(["a red square", PROMPTS[1]]))
    assert second.pipeline.text_encoder is not None
    for name, value in mixed.items():
        assert torch.equal(value[1], expected[name][1]) and len(value) == 2
    assert not torch.equal(mixed["prompt_embeds"][0], expected["prompt_embeds"][0])

    longer = load_nano(architecture, folder, embeddings=str(tmp_path), max_sequence_length=12)
    assert longer.cache.load(PROMPTS[0]) is None


def test_one_line_names_the_first_prompt_that_is_cut_off(
    architecture: str, folder: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = load_nano(architecture, folder)
    model.encode(prompts_of(["a red"]))
    assert not caplog.messages
    capfd.readouterr()  # the bars of loading
    long = " ".join(["a red square"] * 300)
    model.encode(prompts_of([PROMPTS[0], long]))
    model.encode(prompts_of([f"{long} left"]))
    (message,) = caplog.messages
    assert message.startswith(f"the prompt {long[:40]!r}... has ") and "cut off" in message and len(message) < 200
    assert capfd.readouterr() == ("", "")


def test_encoders_move_to_a_gpu_for_embedding_only(
    architecture: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_nano(architecture, folder)
    modules = [m for name, m in model.pipeline.components.items() if name in model.encoders and hasattr(m, "to")]
    rows = model.encode_uncached(PROMPTS, torch.device("cpu"))

    def tensors() -> list[torch.Tensor]:
        return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

    def embed(texts: list[str], device: torch.device) -> Any:
        assert {tensor.device for tensor in tensors()} == {device}
        if len(texts) == 1:
            raise torch.OutOfMemoryError
        return rows

    before, places = tensors(), [tensor.data_ptr() for tensor in tensors()]
    monkeypatch.setattr(model, "device", torch.device("meta"))  # stands in for a GPU
    monkeypatch.setattr(model, "encode_uncached", embed)
    assert len(model._encode_rows(prompts_of(PROMPTS))) == 3 and modules
    with pytest.raises(torch.OutOfMemoryError):
        model._encode_rows(prompts_of(PROMPTS[:1]))
    assert all(now is then for now, then in zip(tensors(), before, strict=True))
    assert [tensor.data_ptr() for tensor in tensors()] == places  # they are not copied back
