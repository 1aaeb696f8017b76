"""Pipelines from folders and from the hub, and the messages for those that cannot be loaded."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel, SanaPipeline, StableDiffusion3Pipeline
from fake_hub import COMMIT, REPOSITORY, FakeHub, serving
from hydra.errors import InstantiationException
from nano import BUILDERS, NANO, PROMPTS, load_nano, model_class, model_options, prompts_of
from peft import LoraConfig
from pretrain import MAX_WORDS
from safetensors.torch import load_file, save_file
from take_away import POINTER
from torch import Tensor, nn

from solrl_lightning.build import build_policy, policy_on_meta
from solrl_lightning.errors import UserError
from solrl_lightning.policies.architectures import find_architecture
from solrl_lightning.policies.conditioning import Conditioning
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.policies.loading import load_pipeline
from solrl_lightning.sizing.footprint import encoder_bytes

INDEX, TRANSFORMER = "model_index.json", "transformer/diffusion_pytorch_model.safetensors"
T5 = "text_encoder_2/model.safetensors"
Damage = Callable[[Path], object]
AGAIN = "Download or save it again, whole"


@pytest.fixture
def copied(nano_folder: str, tmp_path: Path) -> Path:
    """A pipeline folder to damage."""
    return Path(shutil.copytree(nano_folder, tmp_path / "copied"))


def message_of(pretrained: str | Path, pipeline_class: type[DiffusionPipeline] = FluxPipeline) -> str:
    with pytest.raises(UserError) as error:
        load_pipeline(pipeline_class, str(pretrained))
    message = str(error.value)
    assert str(pretrained) in message and message.endswith(".") and ".." not in message.replace("../", "")
    return message


def overwrite(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def remove(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def change(file: str, **values: object) -> Damage:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))


def drop_a_weight(component: str) -> Damage:
    def damage(folder: Path) -> None:
        (file,) = (folder / component).glob("*.safetensors")
        tensors = load_file(file)
        tensors.popitem()
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def pickle_weights(folder: Path) -> None:
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()


def save_with_lora(folder: Path) -> None:
    transformer = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    transformer.add_adapter(LoraConfig(r=1, target_modules=["to_q"]))
    transformer.save_pretrained(folder / "transformer")


def cast_weights(file: str, dtype: torch.dtype) -> Damage:
    def cast(folder: Path) -> None:
        save_file({name: weight.to(dtype) for name, weight in load_file(folder / file).items()}, folder / file)

    return cast


def spoil_a_weight(file: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def spoil(folder: Path) -> None:
        name, weight = next((name, weight) for name, weight in load_file(folder / file).items() if weight.ndim == 2)
        save_file(load_file(folder / file) | {name: change(weight)}, folder / file, metadata={"format": "pt"})

    return spoil


DAMAGES: list[tuple[Damage, str]] = [
    (shutil.rmtree, "give a local folder that save_pretrained wrote"),
    (change(INDEX, _class_name="DDPMPipeline"), "needs a FluxPipeline; .* is a DDPMPipeline"),
    (change(INDEX, _class_name=None), "needs a FluxPipeline; .* is a None. Give another folder or hub id"),
    (change(INDEX, text_encoder_2=[None, None]), "text_encoder_2"),
    (overwrite(TRANSFORMER, b"these are no weights" * 100), f"{TRANSFORMER}: a file is missing or damaged"),
    (overwrite(TRANSFORMER, POINTER), f"{TRANSFORMER} is a pointer of git-lfs"),
    (remove(TRANSFORMER), AGAIN),
    (
        lambda folder: (folder / T5).write_bytes((folder / T5).read_bytes()[:2000]),
        f"{T5}: a file is missing or damaged",
    ),
    (pickle_weights, r"and are in diffusion_pytorch_model\.bin\. .* without safe_serialization=False"),
    (save_with_lora, r"lacks \d+ of them, .* after pipe\.unload_lora_weights"),
    (drop_a_weight("transformer"), "lacks 1 of them, .*weight"),
    (
        cast_weights(TRANSFORMER, torch.int8),
        "transformer is invalid: its weights are quantised .I8., and must be of 16",
    ),
    (spoil_a_weight(T5, lambda weight: weight.long()), "text_encoder_2 is invalid: its weights are quantised .I64."),
    (spoil_a_weight(T5, lambda weight: weight * torch.nan), "text_encoder_2 lacks 1 of them"),
    (change("transformer/config.json", in_channels=16), f"do not fit together .*{AGAIN}"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_folder_error_names_the_folder(copied: Path, damage: Damage, message: str) -> None:
    damage(copied)
    assert re.search(message, message_of(copied))


@pytest.mark.parametrize(
    ("part", "key", "layer"),
    [
        ("transformer", "num_single_layers", "single_transformer_blocks."),
        ("text_encoder", "num_hidden_layers", "layers."),
        ("vae", "layers_per_block", "resnets."),
    ],
)
def test_weights_that_a_configuration_has_no_layers_for_are_named(
    copied: Path, part: str, key: str, layer: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_nano("flux1", copied)
    assert "has no layers for" not in caplog.text
    config = json.loads((copied / part / "config.json").read_text())
    change(f"{part}/config.json", **{key: config[key] - 1})(copied)
    load_nano("flux1", copied)
    (line,) = (line for line in caplog.messages if "has no layers for" in line)
    assert line.startswith(f"{copied / part} has weights that its config.json has no layers for") and layer in line


@pytest.mark.parametrize("name", ["here", "./here", "../{cwd}/here"])
def test_relative_folder_without_an_index_is_no_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = message_of(name.format(cwd=tmp_path.name))
    assert "holds no model_index.json" in message and "network" not in message


def test_folder_below_the_home_folder_loads(nano_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(nano_folder).parent))
    assert isinstance(load_pipeline(FluxPipeline, f"~/{Path(nano_folder).name}"), FluxPipeline)


@pytest.mark.parametrize("component", ["vae", "tokenizer"])
def test_missing_component_folder_is_not_looked_for_on_the_hub(
    copied: Path, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[object] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **options: hosts.append(host))
    shutil.rmtree(copied / component)
    message = message_of(copied)
    assert f"has no {component}/ (" in message and "save the pipeline again, whole." in message
    assert hosts == []


@pytest.mark.parametrize(
    ("part", "key", "rule"),
    [
        ("text_encoder_2", "d_model", "the embeddings .prompt_embeds. of its text encoders are 4 wide"),
        ("text_encoder", "hidden_size", "the embeddings .pooled. of its text encoders are 4 wide"),
    ],
)
def test_text_encoders_of_another_model_are_an_error(copied: Path, part: str, key: str, rule: str) -> None:
    cls = type(FluxPipeline.from_pretrained(copied).components[part])
    config = json.loads((copied / part / "config.json").read_text()) | {key: 4}
    shutil.rmtree(copied / part)
    cls(cls.config_class(**config)).save_pretrained(copied / part)
    with pytest.raises(UserError, match=f"model.pretrained={copied} is invalid: {rule}"):
        load_nano("flux1", str(copied)).encode(prompts_of(PROMPTS))


NODE = {"_target_": "solrl_lightning.policies.flux1.Flux1"} | model_options("flux1") | NANO


class ReadsValues(Flux1):
    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        assert float(sigma.max()) <= 1
        return super().velocity(transformer, x, sigma, conditioning)


def test_class_of_ones_own_is_not_tried_without_numbers(nano_folder: str) -> None:
    node = NODE | {"_target_": f"{__name__}.ReadsValues", "pretrained": nano_folder}
    assert isinstance(build_policy(node, torch.device("cpu"), "bfloat16", "device", False), ReadsValues)
    with pytest.raises(Exception, match="meta") as error:  # in task=plan its author sees where
        policy_on_meta(node)
    assert not isinstance(error.value, UserError) and "velocity" in [entry.name for entry in error.traceback]


@pytest.mark.parametrize(
    ("architecture", "sizes", "key"),
    [
        ("z_image", {"resolution": 136}, "model.resolution=136 is invalid: .* end at 128. Set model.resolution=128."),
        (
            "z_image",
            {"max_sequence_length": 255},
            "max_sequence_length=255 is invalid: .* end at 224. Set",
        ),
        ("sd3", {"resolution": 104}, "with model.resolution=104 .*, or set smaller sizes."),
    ],
)
def test_sizes_beyond_the_positions_of_a_transformer_are_named(
    folder_of: Callable[[str], str], architecture: str, sizes: dict[str, int], key: str
) -> None:
    fits = {"resolution": 128, "max_sequence_length": 224} if architecture == "z_image" else {"resolution": 96}
    cls = {"z_image": "z_image.ZImage", "sd3": "sd3.SD3"}[architecture]
    node = {"_target_": f"solrl_lightning.policies.{cls}"} | model_options(architecture) | NANO | fits
    node |= {"pretrained": folder_of(architecture)}
    policy_on_meta(node)
    with pytest.raises(UserError, match=key):
        policy_on_meta(node | sizes)


def meta_error(folder: Path) -> str:
    """The error of a folder's config files in one line, which names the folder; empty if there is none."""
    try:
        policy_on_meta(NODE | {"pretrained": str(folder)})
    except (UserError, InstantiationException) as error:
        message = str(error.__cause__ if isinstance(error, InstantiationException) else error)
        assert re.fullmatch(f"model.pretrained={folder}( with model.resolution=.*)? is invalid: .*[.]", message)
        return message
    return ""


@pytest.mark.parametrize(
    ("part", "values", "rule"),
    [
        ("vae", {"latent_channels": 4}, "channel"),
        ("vae", {"scaling_factor": None}, "TypeError"),
        ("transformer", {"axes_dims_rope": [4, 4, 4]}, "dimension of length 12"),
        ("transformer", {"out_channels": 64}, "dimension of length 64"),
        ("transformer", {"in_channels": "x"}, "TypeError"),
        ("scheduler", {"shift": None}, "noise levels"),
    ],
)
def test_parts_that_do_not_fit_are_an_error_before_weights_are_read(
    copied: Path, part: str, values: dict[str, object], rule: str
) -> None:
    (file,) = (copied / part).glob("*config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    assert re.search(rule, meta_error(copied))


def test_text_encoder_that_no_library_makes_is_an_error_in_a_plan(copied: Path) -> None:
    change("text_encoder_2/config.json", num_heads=None)(copied)
    with pytest.raises(UserError, match=f"{copied} is invalid: its text_encoder_2: .*num_heads.*{AGAIN}"):
        encoder_bytes(find_architecture(str(copied), FluxPipeline), {"default": torch.float32})


def test_a_text_in_place_of_any_value_is_an_error_or_has_no_effect_on_shapes(copied: Path) -> None:
    (copied / T5).unlink()  # text encoders are not looked at
    file, refused = copied / "transformer" / "config.json", set()
    config = json.loads(file.read_text())
    for key in config:
        file.write_text(json.dumps(config | {key: "x"}))
        if meta_error(copied):
            refused.add(key)
    assert {"in_channels", "num_layers", "axes_dims_rope", "joint_attention_dim"} <= refused


def test_every_architecture_loads_with_every_component_and_no_other(architecture: str, folder: str) -> None:
    pipeline = load_pipeline(model_class(architecture).pipeline_class, folder)
    index = json.loads((Path(folder) / INDEX).read_text())
    expected = {name for name, value in index.items() if isinstance(value, list) and value[0] is not None}
    assert {name for name, part in pipeline.components.items() if part is not None} == expected
    for other in BUILDERS.keys() - {architecture}:
        pipeline_class = model_class(other).pipeline_class
        message = message_of(folder, pipeline_class)
        assert f"needs a {pipeline_class.__name__}" in message and f"Use model={architecture} with it." in message


def test_sd3_does_without_t5(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    folder, small = folder_of("sd3"), str(tmp_path / "small")
    StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None).save_pretrained(small)
    options = [dict(folder=folder), dict(folder=small), dict(folder=small, embeddings=str(tmp_path / "embeddings"))]
    whole, without, cached = (load_nano("sd3", **each).encode(prompts_of("sd3"))["prompt_embeds"] for each in options)
    clip, t5 = slice(0, -MAX_WORDS), slice(-MAX_WORDS, None)
    assert torch.equal(whole[:, clip], without[:, clip]) and torch.equal(cached, without)
    assert whole[:, t5].any() and not without[:, t5].any() and without.shape == whole.shape
    edited = shutil.copytree(folder, tmp_path / "edited")  # whose index is edited by hand between two runs
    shared, index = dict(folder=str(edited), embeddings=str(tmp_path / "shared")), edited / INDEX
    before = load_nano("sd3", **shared)
    assert torch.equal(before.encode(prompts_of("sd3"))["prompt_embeds"], whole) and "tokenizer_3" in before.files
    nulls = dict.fromkeys(("text_encoder_3", "tokenizer_3"), [None, None])
    index.write_text(json.dumps(json.loads(index.read_text()) | nulls))
    after = load_nano("sd3", **shared)
    assert torch.equal(after.encode(prompts_of("sd3"))["prompt_embeds"], without) and "tokenizer_3" not in after.files


@pytest.mark.parametrize("value", ["scheduler", ["diffusers"], [None, None], None])
def test_an_index_names_every_component(architecture: str, folder: str, tmp_path: Path, value: object) -> None:
    index = json.loads((Path(folder) / INDEX).read_text())
    pipeline_class = model_class(architecture).pipeline_class
    for name in (name for name, component in index.items() if isinstance(component, list) and None not in component):
        (tmp_path / INDEX).write_text(json.dumps(index | {name: value}))
        message = message_of(tmp_path, pipeline_class)
        assert f"model_index.json must name the library and the class of {name}, and has" in message


def test_components_that_are_given_are_not_loaded(copied: Path) -> None:
    whole = load_pipeline(FluxPipeline, str(copied))
    for name in ("transformer", "vae", "scheduler"):
        shutil.rmtree(copied / name)
    rest = {name: whole.components[name] for name in ("transformer", "vae", "scheduler")}
    pipeline = load_pipeline(FluxPipeline, str(copied), components=rest)
    assert pipeline.transformer is whole.transformer and pipeline.text_encoder is not None
    shutil.rmtree(copied / "text_encoder_2")
    without = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    assert load_pipeline(FluxPipeline, str(copied), components=rest | without).text_encoder is None


def test_weights_of_the_variant_are_read_where_a_component_has_them(copied: Path) -> None:
    transformer = copied / TRANSFORMER
    shifted = {name: value + 1 for name, value in load_file(transformer).items()}
    save_file(shifted, transformer.with_suffix(".bf16.safetensors"), metadata={"format": "pt"})
    plain, variant = (load_pipeline(FluxPipeline, str(copied), variant=variant) for variant in (None, "bf16"))
    one, other = plain.transformer.state_dict(), variant.transformer.state_dict()
    assert all(torch.equal(value + 1, other[name]) for name, value in one.items())
    assert torch.equal(plain.vae.decoder.conv_in.weight, variant.vae.decoder.conv_in.weight)
    transformer.unlink()
    assert load_pipeline(FluxPipeline, str(copied), variant="bf16").transformer is not None


# The hub


@pytest.fixture
def hub(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with serving(FakeHub(copied), tmp_path / "hub", monkeypatch) as hub:
        yield hub


def test_hub_id_is_downloaded_once_and_loads_as_its_folder_does(
    hub: FakeHub, nano_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hub.folder / "flux1-dev.safetensors").write_bytes(b"the same weights in another layout")
    expected, pipeline = load_pipeline(FluxPipeline, nano_folder), load_pipeline(FluxPipeline, REPOSITORY)
    assert Path(pipeline.config._name_or_path).name == COMMIT
    assert all(torch.equal(v, pipeline.vae.state_dict()[name]) for name, v in expected.vae.state_dict().items())
    assert len(hub.served) == len(set(hub.served)) and "flux1-dev.safetensors" not in hub.served
    hub.served.clear()
    load_pipeline(FluxPipeline, REPOSITORY)
    assert hub.served == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_pipeline(FluxPipeline, REPOSITORY).transformer is not None


def test_text_encoders_are_downloaded_only_when_a_prompt_needs_them(hub: FakeHub, tmp_path: Path) -> None:
    first = load_nano("flux1", REPOSITORY, embeddings=str(tmp_path / "embeddings"))
    assert not any(name.startswith(("text_encoder", "tokenizer")) for name in hub.served)
    hub.served.clear()
    first.encode(prompts_of(PROMPTS))
    assert {name.partition("/")[0] for name in hub.served} == set(first.encoders)
    second = load_nano("flux1", REPOSITORY, embeddings=str(tmp_path / "embeddings"))
    second.encode(prompts_of(PROMPTS))
    assert second.pipeline.text_encoder is None


def test_repository_of_another_architecture_raises_before_its_weights_are_downloaded(hub: FakeHub) -> None:
    assert "Use model=flux1 with it." in message_of(REPOSITORY, SanaPipeline)
    assert hub.served == [INDEX]
    (hub.folder / INDEX).unlink()
    shutil.rmtree("hub")
    assert "is no diffusers pipeline: it holds no model_index.json" in message_of(REPOSITORY)


LICENCE = f"Check the name at https://huggingface.co/{REPOSITORY}, accept its licence there .*`hf auth login`"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "GatedRepo", LICENCE),
        (401, "RepoNotFound", "neither a folder here nor a model that you may read.*hf auth login"),
        (401, "Invalid credentials", "hf auth whoami"),
    ],
)
def test_refusals_of_the_hub_name_the_next_step(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int, code: str, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.refusal = (status, code)
    assert re.search(message, message_of(REPOSITORY))


def test_interrupted_download_resumes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("the connection was reset")

    with monkeypatch.context() as patched:
        patched.setattr(FluxPipeline, "download", broken)
        message = message_of(REPOSITORY)
    assert "the connection was reset" in message and "resumes where it stopped" in message
    assert load_pipeline(FluxPipeline, REPOSITORY).transformer is not None


def test_only_files_of_the_variant_are_downloaded(
    hub: FakeHub, folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    pipeline = load_pipeline(SanaPipeline, folder_of("sana"))
    hub.folder = tmp_path / "as published"
    pipeline.save_pretrained(hub.folder)
    pipeline.transformer.save_pretrained(hub.folder / "transformer", variant="bf16")
    pipeline.text_encoder.save_pretrained(hub.folder / "text_encoder", variant="bf16", max_shard_size="100KB")
    (hub.folder / "transformer" / "diffusion_pytorch_model.int4.safetensors").write_bytes(b"of another tool")
    loaded = load_pipeline(SanaPipeline, REPOSITORY, variant="bf16")
    weights = {name for name in hub.served if name.endswith(".safetensors")}
    shards = {name for name in weights if name.startswith("text_encoder/model.bf16-0000")}
    assert len(shards) > 1
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert weights - shards == {"transformer/diffusion_pytorch_model.bf16.safetensors", vae}
    for name, value in pipeline.text_encoder.state_dict().items():
        assert torch.equal(value, loaded.text_encoder.state_dict()[name])
