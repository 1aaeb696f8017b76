"""Base class of the models: loading, prompt embeddings, decoding within memory, and saving the result.

A subclass implements how its pipeline embeds prompts, schedules the noise, predicts a velocity and decodes latents.
Pipelines and models come from diffusers; the rollout has its own denoising loop.

Shapes: P prompts, L tokens of text, B batch, T solver steps.
"""

import copy
import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from diffusers import AutoencoderTiny, DiffusionPipeline
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from solrl_lightning.artifacts.complete import reading
from solrl_lightning.artifacts.files import written_whole
from solrl_lightning.data.prompt import Prompt
from solrl_lightning.errors import UserError
from solrl_lightning.machine.memory import retry_with_empty_cache, visiting
from solrl_lightning.names import LORA_FILES
from solrl_lightning.policies import bf16
from solrl_lightning.policies.base_weights import store_weights
from solrl_lightning.policies.bf16_attention import use_fast_attention
from solrl_lightning.policies.checkpointing import checkpoint_blocks
from solrl_lightning.policies.conditioning import Conditioning, Row, stack_rows
from solrl_lightning.policies.config_files import TINY
from solrl_lightning.policies.embeddings import EmbeddingCache, encoder_fingerprint
from solrl_lightning.policies.guidance import guide
from solrl_lightning.policies.loading import errors_only, load_pipeline
from solrl_lightning.policies.schedulers import (
    Settings,
    check_scheduler,
    noise_levels,
    read_scheduler,
    resolution_shift,
)
from solrl_lightning.policies.tensor_digest import SAMPLES, digest
from solrl_lightning.seeds import noise

log = logging.getLogger(__name__)

_BEYOND = 2.0  # an autoencoder overshoots its range of [-1, 1] by less
EMBED_BATCH = 64  # prompts that the text encoders read at once


class PipelineAdapter(ABC):
    """A diffusers pipeline whose transformer is trained.

    Args:
        pretrained: hub id, local folder, or ``tiny`` for the embedded model.
        resolution: side of the square images in pixels.
        max_sequence_length: tokens of the prompt embedding.
        decode_batch: images per pass of the autoencoder; halved permanently after an out-of-memory error.
        dtypes: names of torch dtypes by component; ``default`` for all others.
        embeddings: folder of prompt embeddings, or None to keep none. With a folder, the text encoders are loaded only
            for a prompt that is not in it.
        gradient_checkpointing: True to recompute the activations of every block in the backward pass instead of
            keeping them, ``selective`` for every second block; ``auto``, which training replaces by what fits, is True.
        variant: suffix of weight files, for components that have such files: ``bf16`` for ``model.bf16.safetensors``.
        weights: ``pretrained``, or ``random`` in the same shapes, without text encoders, for plans and timings.
        preview_decoder: hub id or local folder of an ``AutoencoderTiny`` for the same latents, used by ``preview``;
            ``tiny`` for the embedded model's.
        guidance_scale: scale of classifier-free guidance in sampling and training; 1 disables it.
        fused_lora: ``<hub id or folder>/<file>`` of a LoRA that is added to the transformer's weights.
        scheduler: values to override in the pipeline's scheduler.
        base_weights: storage of the transformer's frozen weights; see the module ``base_weights``.
        encode_on: ``device``, or ``cpu`` to run the text encoders on the CPU.
        transformer_device: device of the transformer if not ``device``, for a run that shards it.
        device: device of transformer and autoencoder; text encoders stay on the CPU and move to it only while encoding.

    Raises:
        UserError: ``pretrained`` or ``preview_decoder`` cannot be loaded (see ``loading`` and ``preview``), the
            resolution is not a whole number of image tokens, or a setting of the scheduler is not honoured.
    """

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    encoders: ClassVar[tuple[str, ...]]  # text encoders and tokenizers
    optional: ClassVar[tuple[str, ...]] = ()  # of those, what a pipeline does without if its index has none
    schedulers: ClassVar[Settings] = {}  # that `sigmas` honours; empty: none is checked, nor is model.scheduler taken
    text_width: ClassVar[str] = "joint_attention_dim"  # in the transformer's config: numbers of a text token
    latents_per_token: ClassVar[int | None] = None  # side of an image token; None: the transformer's patch_size
    latent_shape: tuple[int, ...]  # of one image, as the transformer takes it

    def __init__(
        self,
        pretrained: str,
        resolution: int,
        max_sequence_length: int,
        decode_batch: int,
        dtypes: Mapping[str, str],
        embeddings: str | None = None,
        gradient_checkpointing: bool | str = False,
        variant: str | None = None,
        weights: Literal["pretrained", "random"] = "pretrained",
        preview_decoder: str | None = None,
        guidance_scale: float = 1.0,
        fused_lora: str | None = None,
        scheduler: Mapping[str, Any] | None = None,
        base_weights: str = "bfloat16",
        encode_on: str = "device",
        transformer_device: str | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.pretrained = str(TINY) if pretrained == "tiny" else pretrained
        self.resolution, self.max_sequence_length = resolution, max_sequence_length
        self.decode_batch, self.variant, self.device = decode_batch, variant, torch.device(device)
        self.dtypes = _dtypes(dtypes, self.pipeline_class)
        home = torch.device(transformer_device or self.device)
        self.encode_on, self._noted_long_prompt, self.guidance_scale = encode_on, False, guidance_scale
        self.cache: EmbeddingCache | None = None
        self.base_weights, self.base_digest, self._has_decoded = base_weights, "", False
        self.random, self._scheduler = weights == "random", scheduler
        if self.random:
            self.pipeline = self._random_pipeline(home)
        elif embeddings is None:
            self.pipeline = self._load({})
        else:
            self.pipeline = self._load(dict.fromkeys(self.encoders))
            source = Path(self.pipeline.config._name_or_path)
            identity = encoder_fingerprint(source, self._encoders_of(source), self.embedding_settings())
            self.cache = EmbeddingCache(Path(embeddings), identity)
        if scheduler is not None:
            self.pipeline.register_modules(
                scheduler=self.pipeline.scheduler.from_config(self.pipeline.scheduler.config, **scheduler)
            )
        if not self.random:
            for name in ("transformer", "vae"):
                self._note_weights(self.pipeline.components[name].state_dict())
        self.replace_weights()
        if fused_lora is not None and not self.random:
            from solrl_lightning.policies.lora_files import fuse_lora

            self._note_weights(fuse_lora(self.pipeline, fused_lora))
        self.transformer = self.pipeline.transformer.requires_grad_(False)
        checkpoint_blocks(self.transformer, gradient_checkpointing)
        if self.device.type == "cpu" and self.transformer.dtype == torch.bfloat16:
            if not bf16.has_fast_bf16_products():
                bf16.use_fp32_products(self.transformer)
            use_fast_attention(self.transformer)
        store_weights(self.transformer, base_weights, home)
        self.transformer.to(home)
        vae = self.pipeline.vae.requires_grad_(False)
        self.of_videos = any(parameter.ndim == 5 for parameter in vae.parameters())
        # PyTorch refuses channels_last for videos.
        vae.to(self.device, memory_format=torch.contiguous_format if self.of_videos else torch.channels_last)
        if resolution % self.pixels_per_token:
            multiple = max(resolution - resolution % self.pixels_per_token, self.pixels_per_token)
            raise UserError(
                f"model.resolution={resolution} is invalid: it must be a multiple of {self.pixels_per_token}, the "
                f"pixels of an image token of this model. Set model.resolution={multiple}."
            )
        side = resolution // self.pixels_per_latent
        self.latent_shape = (self.transformer.config.in_channels, side, side)
        self._preview_decoder_name = preview_decoder
        self.preview_decoder = None if preview_decoder is None else self._preview_decoder(preview_decoder)
        self.unconditional: Conditioning = {} if guidance_scale == 1 else self.encode_unconditional()

    # A subclass implements these

    @abstractmethod
    def encode_uncached(self, prompts: list[str], device: torch.device) -> Mapping[str, Tensor | Sequence[Tensor]]:
        """Return embeddings of P texts by the text encoders, which are on ``device``.

        By name, each [P, ...] or P tensors of different lengths.
        """

    @abstractmethod
    def sigmas(self, steps: int) -> Tensor:
        """Return float32 [T + 1] noise levels from 1 down to 0."""

    @abstractmethod
    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return float32 [B, *latent_shape] velocity (noise minus image) at latents ``x``, levels ``sigma`` [B] or [].

        Without guidance, which ``guided_velocity`` adds.
        """

    @property
    def call_options(self) -> dict[str, Any]:
        """Arguments with which diffusers' pipeline encodes and guides as this model does."""
        return {"guidance_scale": self.guidance_scale, "max_sequence_length": self.max_sequence_length}

    def sampling_settings(self, steps: int) -> dict[str, Any]:
        """Return, as JSON, what decides the images of ``steps`` steps beside prompts, noise, solver and weights."""
        return {
            "sigmas": [f"{sigma:.5f}" for sigma in self.sigmas(steps).tolist()],
            "latents": [self.pixels_per_latent, *self.latent_shape],
            "call": repr(sorted(self.call_options.items())),
            "dtypes": {name: str(dtype) for name, dtype in sorted(self.dtypes.items())},
            "base_weights": self.base_weights,
        }

    def scheduler_sigmas(self, steps: int, sigmas: Any = None, mu: float | None = None) -> Tensor:
        """Return the noise levels of the pipeline's scheduler, for ``sigmas`` of subclasses.

        Args:
            sigmas: the T levels that the scheduler shifts; None for its own.
            mu: exponent of a dynamic shift; None for the pipelines' function of the number of image tokens.
        """
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        if steps == 1 and scheduler.config.shift_terminal:  # the scheduler would divide by zero
            return torch.tensor([1.0, 0.0])
        if mu is None:
            mu = resolution_shift(scheduler.config, (self.resolution // self.pixels_per_token) ** 2)
        scheduler.set_timesteps(steps, sigmas=sigmas, mu=mu)
        return noise_levels(scheduler)

    euler_shift: float | None = None
    """Shift of the Euler levels from 1 to 0 that take the place of the pipeline's scheduler; None if it is taken."""

    # A subclass may override these. By default latents are the autoencoder's [C, H, W], scaled and shifted by numbers

    @property
    def pixels_per_token(self) -> int:
        """Side in pixels of the square that one image token covers."""
        return self.pixels_per_latent * (self.latents_per_token or self.transformer.config.patch_size)

    @property
    def pixels_per_latent(self) -> int:
        """Side in pixels of the square that one latent covers."""
        return self.pipeline.vae_scale_factor

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt's embedding, with padding."""
        return self.max_sequence_length

    def embedding_like(self) -> Conditioning:
        """Return tensors on ``meta`` of the names, shapes and dtypes of one prompt's embedding, for random weights."""
        width = self.transformer.config[self.text_width]
        return {"prompt_embeds": torch.empty(self.prompt_length, width, device="meta")}

    def replace_weights(self) -> None:  # noqa: B027  (only SANA replaces weights)
        """Put other weights in place of the pipeline's, before a LoRA is fused and the base is stored in fewer bits."""

    @property
    def unused_layers(self) -> Collection[str]:
        """Names of the transformer's layers that the velocity does not depend on, so their weights get no gradient."""
        return ()

    def noise(self, seeds: Tensor) -> Tensor:
        """Return float32 [B, *latent_shape] initial latents of the candidates, each a function of its seed alone."""
        return noise(seeds, self.latent_shape).to(self.device)

    def decode_latents(self, x: Tensor, vae: Any) -> Tensor:
        """Return [B, 3, H, W] images in [-1, 1] of latents ``x`` [B, *latent_shape], or videos [B, F, 3, H, W].

        Args:
            vae: the pipeline's autoencoder, or the preview decoder.
        """
        return vae.decode(self.unscale_latents(x, vae).to(vae.dtype)).sample

    def unscale_latents(self, x: Tensor, vae: Any) -> Tensor:
        """Return [B, C, H, W] input of ``vae`` for latents ``x`` [B, *latent_shape].

        Autoencoders for videos have statistics of their latents [B, C, F, H, W] in place of two numbers.
        """
        if self.of_videos:
            mean, std = (
                torch.tensor(vae.config[name], device=x.device).view(-1, 1, 1, 1)
                for name in ("latents_mean", "latents_std")
            )
            return x * std + mean
        return x / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)

    def guided_velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the ``velocity`` with classifier-free guidance; samplers and loss call this one."""
        return guide(self.velocity, self.unconditional, self.guidance_scale)(transformer, x, sigma, conditioning)

    @torch.no_grad()
    def try_out(self) -> None:
        """Take a step from noise and decode it, on the device ``meta``, where parts that do not fit raise an error."""
        x, sigma = self.noise(torch.zeros(1, dtype=torch.int64)), torch.ones(1, device=self.device)
        x += self.guided_velocity(self.transformer, x, sigma, self.encode([Prompt("")]))
        self.decode_latents(x, self.pipeline.vae)

    # Prompts

    def encode(self, prompts: list[Prompt]) -> Conditioning:
        """Return embeddings of P prompts by name, [P, ...] on the device; floating ones in the transformer's dtype."""
        rows = {p: self.cache.load(self.embedding_name(p)) if self.cache else None for p in dict.fromkeys(prompts)}
        new = [prompt for prompt, row in rows.items() if row is None]
        for prompt, row in zip(new, self._encode_rows(new), strict=True):
            rows[prompt] = row
            if self.cache:
                self.cache.save(self.embedding_name(prompt), row)
        row_of_each: list[Row] = [rows[prompt] for prompt in prompts]  # type: ignore[misc]  # all are filled in by now
        stacked = {name: value.to(self.device) for name, value in stack_rows(row_of_each).items()}
        for name, like in self.embedding_like().items():
            if name in stacked and like.is_floating_point() and stacked[name].shape[-1] != like.shape[-1]:
                raise UserError(
                    f"model.pretrained={self.pretrained} is invalid: the embeddings ({name}) of its text encoders are "
                    f"{stacked[name].shape[-1]} wide, and its transformer takes {like.shape[-1]}, so they are of two "
                    "models. Download or save the pipeline again, whole."
                )
        dtype = self.transformer.dtype
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in stacked.items()}

    def encode_unconditional(self) -> Conditioning:
        """Return the embedding of the empty prompt, [1, ...] each, for guidance."""
        return self.encode([Prompt("")])

    def embedding_name(self, prompt: Prompt) -> str:
        """Return the key of the prompt in the cache of embeddings, for these ``embedding_settings``."""
        return prompt.text

    def encode_prompts(self, prompts: list[Prompt], device: torch.device) -> Mapping[str, Tensor | Sequence[Tensor]]:
        """Embed prompts, as ``encode_uncached`` their texts; for models whose encoders read more than the text."""
        return self.encode_uncached([prompt.text for prompt in prompts], device)

    def embedding_settings(self) -> dict[str, object]:
        """Return the settings, besides the text encoders, that the embedding of every prompt depends on."""
        dtypes = {name: str(self.dtypes.get(name, self.dtypes["default"])) for name in self.encoders}
        return {"length": self.max_sequence_length, "variant": self.variant, "dtypes": dtypes}

    @torch.no_grad()
    def _encode_rows(self, prompts: list[Prompt]) -> list[Row]:
        if self.random:
            from solrl_lightning.policies.architectures import random_row

            return [random_row(prompt.identity, self.embedding_like(), self.device) for prompt in prompts]
        if not prompts:
            return []
        if self.pipeline.components[self.encoders[0]] is None:  # loaded without text encoders
            here = {name: module for name, module in self.pipeline.components.items() if name not in self.encoders}
            self.pipeline = self._load(here)
        encoders = [self.pipeline.components[name] for name in self.encoders]
        modules = [encoder for encoder in encoders if isinstance(encoder, nn.Module)]
        device = self.device if self.encode_on == "device" else torch.device("cpu")
        chunks = [prompts[first : first + EMBED_BATCH] for first in range(0, len(prompts), EMBED_BATCH)]
        # The pipelines print the text that a tokenizer drops, in full.
        named = f"model.pretrained={self.pretrained} is invalid"
        with reading(named, type(self).__module__), visiting(modules, device), errors_only():
            self._note_long_prompts([prompt.text for prompt in prompts])
            parts = [self.encode_prompts(chunk, device) for chunk in chunks]
        return [
            {name: value[row] for name, value in part.items()}
            for part, chunk in zip(parts, chunks, strict=True)
            for row in range(len(chunk))
        ]

    def _note_long_prompts(self, texts: list[str]) -> None:
        """Warn of the first prompt that a tokenizer does not read to its end."""
        for name in self.encoders:
            tokenizer = self.pipeline.components[name]
            if self._noted_long_prompt or not isinstance(tokenizer, PreTrainedTokenizerBase):
                continue
            limit = min(tokenizer.model_max_length, self.max_sequence_length)
            counts = [len(ids) for ids in tokenizer(texts, verbose=False).input_ids]
            if max(counts) > limit:
                self._noted_long_prompt = True
                text = texts[counts.index(max(counts))]
                message = "the prompt %r... has %d tokens, of which %s reads %d; prompts as long as this are cut off"
                log.warning(message, text[:40], max(counts), name, limit)

    # Images

    def decode(self, x: Tensor) -> Tensor:
        """Return float32 images [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W], of latents [B, *latent_shape]."""
        return self._images(x, self.pipeline.vae)

    def decode_in_bf16(self, x: Tensor) -> Tensor:
        """Decode as ``decode``, by a copy of the autoencoder in bfloat16, except on a CPU that is slower in it."""
        faster = self.device.type != "cpu" or bf16.has_fast_bf16_products()
        return self._images(x, self._bf16_vae if faster else self.pipeline.vae)

    @cached_property
    def _bf16_vae(self) -> Any:
        # Not autocast, which normalises the largest activations in float32.
        vae = self.pipeline.vae
        return vae if vae.dtype == torch.bfloat16 else copy.deepcopy(vae).to(torch.bfloat16)

    def preview(self, x: Tensor) -> Tensor:
        """Decode as ``decode``, by the preview decoder."""
        assert self.preview_decoder is not None  # Run.check_decoder
        return self._images(x, self.preview_decoder)

    @torch.no_grad()
    def _images(self, x: Tensor, vae: Any) -> Tensor:
        images: list[Tensor] = []
        done = 0
        while done < len(x):
            part = x[done : done + self.decode_batch]
            try:
                decoded = retry_with_empty_cache(partial(self.decode_latents, part, vae))
            except torch.OutOfMemoryError:
                if not self._save_memory(vae):
                    raise
            else:
                self._check_decoded(decoded, len(part))
                images.append(decoded.float())
                done += len(part)
        return (torch.cat(images) / 2 + 0.5).clamp(0, 1)

    def _check_decoded(self, images: Any, count: int) -> None:
        """Raise UserError unless ``images`` are what ``decode_latents`` must return; warn once of another range."""
        size = (count, 3, self.resolution, self.resolution)
        is_float = isinstance(images, Tensor) and images.is_floating_point()
        if not is_float or images.ndim not in (4, 5) or (len(images), *images.shape[-3:]) != size:
            what = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise UserError(
                f"model.pretrained={self.pretrained} is invalid for a {type(self).__name__}: its decode_latents must "
                f"return floats in [-1, 1], {list(size)} or videos [{count}, F, 3, ...]; it returned {what}. Correct "
                "vae/config.json or decode_latents."
            )
        if not self._has_decoded and (images.abs() > _BEYOND).float().mean() > 0.01:
            message = "the decoded images of %s span %.3g to %.3g and are clamped to [-1, 1]; see its decode_latents"
            log.warning(message, type(self).__name__, images.min(), images.max())
        self._has_decoded = True

    def _save_memory(self, vae: Any) -> bool:
        """Halve permanently the number of images decoded at once; return False if nothing is left to reduce.

        After one image, the pipeline's own autoencoder decodes overlapping tiles, which may show faint seams.
        """
        if self.decode_batch > 1:
            self.decode_batch //= 2
            log.warning("the autoencoder ran out of memory: model.decode_batch=%d from now on", self.decode_batch)
        elif vae is not self.preview_decoder and not vae.use_tiling:
            self._tile(vae)
            log.warning("the autoencoder ran out of memory on one image: it decodes tiles of it from now on")
        else:
            return False
        return True

    def _tile(self, vae: Any) -> None:
        """Enable tiles of half the side, in whole latents, that overlap by a quarter.

        The default of diffusers is as large as the image.
        """
        factor = self.pixels_per_latent
        side = max(self.resolution // 2 // factor, 1) * factor
        if hasattr(vae, "tile_sample_min_size"):  # AutoencoderKL and AutoencoderKLFlux2, which take no arguments
            vae.enable_tiling()
            vae.tile_sample_min_size, vae.tile_latent_min_size = side, side // factor
        else:
            stride = max(side * 3 // 4 // factor, 1) * factor
            vae.enable_tiling(side, side, stride, stride)

    # Files

    @property
    def files(self) -> dict[str, Path]:
        """Files and folders of the pipeline by name, if it was read from one, without the weights in `base_digest`."""
        folder = Path(str(self.pipeline.config.get("_name_or_path")))
        configs = {name: folder / name / "config.json" for name in ("transformer", "vae")}
        configs["scheduler"] = folder / "scheduler" / "scheduler_config.json"
        if self._preview_decoder_name is not None:
            configs["model.preview_decoder"] = Path(self._preview_decoder_name).expanduser()
        return {name: folder / name for name in self._encoders_of(folder)} | configs

    def _encoders_of(self, folder: Path) -> list[str]:
        """Return the encoders and tokenizers that the pipeline in ``folder`` has by its index."""
        index = self.pipeline_class.load_config(str(folder)) if self.optional and not self.random else {}
        return [name for name in self.encoders if any(index.get(name, [name]))]

    def _note_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Make ``tensors``, as read from files, part of ``base_digest``, which is equal for equal base weights."""
        self.base_digest = digest(tensors, self.base_digest, SAMPLES)

    def save_lora(self, folder: Path, state: dict[str, Tensor], config: LoraConfig) -> None:
        """Write a LoRA that plain diffusers loads with ``pipe.load_lora_weights(folder)``.

        The factor alpha / r is multiplied into B, and alpha in the metadata is r, so programs that do not read the
        metadata add the same update. It has no other settings than diffusers 0.34 to 0.38 read: an older peft refuses
        those that it does not know.
        """
        scale = config.lora_alpha / config.r
        folded = {name: value * scale if ".lora_B." in name else value for name, value in state.items()}
        modules = sorted(config.target_modules or ())  # peft keeps a set
        settings = {"r": config.r, "lora_alpha": config.r, "target_modules": modules}
        settings |= {"rank_pattern": {}, "alpha_pattern": {}}
        text = json.dumps({f"transformer.{key}": value for key, value in settings.items()}, indent=2)
        content = save(self.named_in_files(folded), {"format": "pt", LORA_ADAPTER_METADATA_KEY: text})
        with written_whole(folder) as part:  # in order, as a mount of an object store needs: `save_file` is not
            (part / LORA_FILES[0]).write_bytes(content)

    def named_in_files(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a LoRA under the names that they have in files."""
        return {f"transformer.{name}": value for name, value in state.items()}

    def save_transformer(self, folder: Path, transformer: Any) -> None:
        """Write a model of diffusers for its ``from_pretrained(folder)``."""
        with written_whole(folder) as part:
            transformer.save_pretrained(part)

    def _load(self, components: Mapping[str, Any]) -> DiffusionPipeline:
        def check(folder: Path) -> None:
            check_scheduler(self.pretrained, *read_scheduler(folder), self.schedulers, self._scheduler)

        files = self.pipeline_class, self.pretrained, self.dtypes, self.variant
        return load_pipeline(*files, components, check, self.optional)

    def _random_pipeline(self, device: torch.device) -> DiffusionPipeline:
        from solrl_lightning.policies.architectures import find_architecture, random_pipeline

        architecture = find_architecture(self.pretrained, self.pipeline_class)
        part = architecture.components["scheduler"]
        check_scheduler(self.pretrained, part.cls, part.config, self.schedulers, self._scheduler)
        return random_pipeline(architecture, device, self.dtypes)

    def _preview_decoder(self, pretrained: str) -> AutoencoderTiny:
        if self.of_videos:
            raise UserError(
                f"model.preview_decoder={pretrained} is invalid: an AutoencoderTiny of diffusers decodes pictures, and "
                "these are latents of a video. Set model.preview_decoder=null."
            )
        from solrl_lightning.policies.preview import EMBEDDED, load_preview_decoder, random_preview_decoder

        latents = (self.pipeline.vae.config.latent_channels, self.pipeline.vae_scale_factor)
        dtype = self.pipeline.vae.dtype
        if self.random:
            decoder = random_preview_decoder(self.device, dtype, *latents)
        else:
            source = str(TINY / EMBEDDED) if pretrained == "tiny" else pretrained
            decoder = load_preview_decoder(source, dtype, *latents, self.variant)
        return decoder.requires_grad_(False).to(self.device, memory_format=torch.channels_last)


def _dtypes(names: Mapping[str, str], pipeline_class: type[DiffusionPipeline]) -> dict[str, torch.dtype]:
    """Return the dtypes of components by their names; one without, or a name that is no component, is an error."""
    components = ["default", *list(inspect.signature(pipeline_class.__init__).parameters)[1:]]
    dtypes: dict[str, Any] = {}
    for name, value in {"default": "nothing", **names}.items():
        dtypes[name] = getattr(torch, value, None)
        rule = f"left out: the components of {pipeline_class.__name__} are {', '.join(components)}"
        if name in components:
            rule = f"bfloat16, float16 or float32; got {value}"
        if name not in components or dtypes[name] not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"model.dtypes.{name} must be {rule}")
    return dtypes
