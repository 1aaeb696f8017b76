"""``model``: a text-to-image model with its sampling and training parameters."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict
from typing_extensions import Required, TypedDict

from solrl_lightning.names import Decoder, SolverName, Training, is_packaged
from solrl_lightning.options.rules import (
    MAX_STEPS,
    NODE,
    Broken,
    Count,
    CountOrAuto,
    CountOrZero,
    Group,
    Images,
    NotNegative,
    Positive,
    Share,
    Steps,
    is_whole,
    must_be,
    number,
    one_of,
)

Guidance = Annotated[float, number("a finite number of at least 1; 1 is without guidance", lambda value: value >= 1)]
Frames = Annotated[int, must_be("1 more than a multiple of 4", lambda value: is_whole(value) and value % 4 == 1)]
Setting = Annotated[
    float | None,
    must_be("a number, true, false or null", lambda value: value is None or isinstance(value, int | float)),
]
Scored = Annotated[
    int | str,
    must_be(
        "first, middle, all, or a whole number of at least 1", lambda v: v in ("first", "middle", "all") or is_whole(v)
    ),
]
LoraFile = Annotated[
    str, must_be("<hub id or folder>/<file>.safetensors", lambda v: isinstance(v, str) and v.endswith(".safetensors"))
]
Shift = Annotated[float, number("a number from 0.001 to 1000", lambda value: 0.001 <= value <= 1000)]
Alpha = Annotated[float, number("a number above 0 and at most 1000000", lambda value: 0 < value <= 1_000_000)]
RungSteps = Annotated[
    list[int],
    must_be(
        f"two numbers of solver steps from 1 to {MAX_STEPS}",
        lambda value: isinstance(value, list) and len(value) == 2 and all(is_whole(n, 1, MAX_STEPS) for n in value),
        fix="Other rungs are family.explore.rungs.",
    ),
]
Checkpointing = Annotated[bool | Literal["selective", "auto"], one_of(True, False, "selective", "auto")]


_SAME_PICTURES = (
    *("pretrained", "transformer_weights", "fused_lora"),  # whose content has digests
    *("preview_decoder", "embeddings", "decode_batch", "gradient_checkpointing"),
)


class Policy(TypedDict, total=False):
    """Arguments of the adapter of the architecture; an argument with the name of a key of ``model`` has its value."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A subclass of ``PipelineAdapter``."""
    pretrained: str
    transformer_weights: str | None
    fused_lora: str | None
    scheduler: dict[str, Setting] | None
    preview_decoder: str | None
    embeddings: str | None


class Lora(Group):
    rank: Count
    """Rank of the update."""
    alpha: Alpha
    """The update of a weight is alpha / rank * B A."""
    target_modules: list[str]
    """Name suffixes of the adapted linear layers."""


class LearningRates(Group):
    lora: Positive
    """Of a low-rank update."""
    full: Positive
    """Of all weights."""


class Quantization(Group):
    include: list[str]
    """Patterns of the names of linear layers that the shadow quantises."""
    exclude: dict[str, str]
    """Patterns of those that it does not, each with the reason."""


class ModelData(Group):
    """The prompts of data=default."""

    train: str
    """Training prompts."""
    eval: str
    """Held-out prompts."""
    column: str
    """Column of the prompts in a table."""
    images: Images = 2
    """Images per held-out prompt."""


class Model(Group):
    """A custom model may have more keys, for its ``policy``."""

    guesses = True
    model_config = ConfigDict(extra="allow")

    pretrained: str
    """Hub id or local folder of a pipeline of diffusers."""
    needs: str | None = None
    """Disk and GPU that it takes, printed before the download."""
    variant: str | None
    """Variant of the weight files."""
    transformer_weights: str | None = None
    """Other initial weights of the transformer."""
    fused_lora: LoraFile | None = None
    """LoRA that is added to the base weights, <hub id or folder>/<file>."""
    scheduler: dict[str, Setting] | None = None
    """Values to override in the pipeline's scheduler."""
    weights: Literal["pretrained", "random"]
    """Random ones have the same shapes, for plans and timings."""
    resolution: Count
    """Width and height in pixels."""
    num_frames: Frames | None = None
    """Frames of a video."""
    frames: Scored | None = None
    """Frames of a video that the rewards score, whose mean is the video's: first, middle, all, or so many at equal
    distances."""
    input_image: bool = False
    """Whether a prompt has an image that the model edits."""
    max_sequence_length: Count
    """Tokens of a prompt."""
    guidance: NotNegative | None = None
    """Value of the guidance embedding, of a model that has one."""
    guidance_scale: Guidance = 1
    """Scale of classifier-free guidance, which doubles the forward passes; 1: none. docs/models/index.md"""
    flow_shift: Shift | None = None
    """Shift of the noise levels, of a model that has one."""
    decode_batch: Count
    """Images decoded at once."""
    preview_decoder: str | None = None
    """Tiny autoencoder, of family.explore.decoder=preview: hub id or folder."""
    dtypes: dict[str, str]
    """Dtype of each component, and of all others under ``default``."""
    embeddings: str | None
    """Folder to cache embeddings of prompts in, whose sizes docs/models has; null: none."""
    gradient_checkpointing: Checkpointing
    """Recompute activations in the backward pass: false, selective (every second block), true, or auto (the least that
    fits the device; docs/plan.md)."""

    iterations: Count
    """Default of the run."""
    prompts_per_iteration: Count
    """Default of the run."""
    evaluation_every: CountOrAuto
    """Default of the run."""
    probe_every: CountOrZero
    """Iterations between probes of the ranking."""
    data: ModelData
    """Prompts of data=default."""
    policy: Policy
    """Adapter of the architecture."""

    solver: SolverName
    """Solver of all samplers: euler, or dpm2 (second-order multistep)."""
    full_steps: Steps
    """Solver steps of the training samples."""
    preview_steps: Steps
    """Solver steps of exploration."""
    prefix_steps: Steps
    """Solver steps before scoring in family=prefix, of full_steps."""
    rung_steps: RungSteps | None = None
    """Solver steps before scoring in family=race, if others than [3, 5]."""
    explore_decoder: Decoder = "full"
    """Decoder of explored images, which are only ranked: full, bf16 (full in bfloat16), or preview."""
    eval_steps: Steps
    """Solver steps of evaluations and sample grids."""
    rollout_batch: Count
    """Candidates per forward pass."""

    learning_rate: Positive
    """Learning rate of AdamW."""
    train_timestep_fraction: Share
    """Fraction of the full_steps noise levels that a sample is trained at."""
    micro_batch: Count
    """Rows per forward and backward pass."""
    max_grad_norm: Positive
    """Maximum L2 norm of the gradient."""
    kl_weight: NotNegative
    """Weight of the distance to the base model in objective=nft and objective=pepg."""
    ram_strength: Positive | None = None
    """Strength of objective=ram."""
    grpo_clip_range: Positive | None = None
    """Clip range of objective=flow_grpo and dance_grpo."""
    train: Training = "lora"
    """Weights that are trained: a low-rank update, or all of the transformer."""
    learning_rates: LearningRates | None = None
    """Learning rate of each value of ``train``."""
    init_lora: str | None
    """LoRA to start from: a file, or a folder of diffusers or peft."""
    lora: Lora
    """Low-rank update that is trained."""
    quantization: Quantization
    """Layers of the shadow that are quantised."""

    @property
    def custom(self) -> dict[str, Any]:
        """Class of a custom adapter, with the arguments that may decide its pictures; empty of a packaged one."""
        if is_packaged(self.policy["_target_"]):
            return {}
        return {key: value for key, value in self.policy.items() if key not in _SAME_PICTURES}

    def check(self) -> None:
        if isinstance(self.frames, int) and self.frames > (self.num_frames or 1):
            raise Broken(f"a video has model.num_frames={self.num_frames}.", "frames", "Set model.frames=all.")
