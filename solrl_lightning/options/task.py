"""``task``: the command, with one class for each."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationInfo

from solrl_lightning.artifacts.hub import HUB_ID
from solrl_lightning.errors import UserError
from solrl_lightning.names import Decoder
from solrl_lightning.options.family import Exploration, Pool
from solrl_lightning.options.rules import (
    MAX_ITERATIONS,
    MAX_SEED,
    Count,
    Group,
    Images,
    Kept,
    NotNegative,
    Positive,
    Share,
    is_whole,
    must_be,
    whole,
)

_TEXTS = """for example 'task.prompts=["a red apple", "two dogs"]'"""
Port = Annotated[int, whole(0, 65535, "; 0 takes a free port")]
Glob = Annotated[
    str,
    must_be(
        "one glob, in quotes, that matches all runs",
        lambda value: isinstance(value, str),
        "For example 'task.runs=outputs/train/*'.",
    ),
]


def _is_hub_id(value: Any) -> bool:
    return value is None or (isinstance(value, str) and HUB_ID.fullmatch(value) is not None)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) and each.strip() for each in value)


def _are_seeds(value: Any) -> bool:
    whole = isinstance(value, list) and all(is_whole(each, 0, MAX_SEED) for each in value)
    return value is None or bool(whole and value and len(set(value)) == len(value))


Seeds = Annotated[
    list[int] | None,
    must_be(
        f"a list of different whole numbers from 0 to {MAX_SEED}, for example 'task.seeds=[1,2,3]'",
        _are_seeds,
        "Leave it out for the seeds of evaluations.",
    ),
]


class Task(Group):
    """task=train, or a custom task, which may have more keys."""

    model_config = ConfigDict(extra="allow", serialize_by_alias=True, validate_by_name=True)
    takes_ranks: ClassVar[bool] = True
    """Whether several processes share the work; otherwise each would do all of it."""
    target: str = Field(alias="_target_")
    """The function that is called."""
    reads: list[Literal["train", "eval", "ckpt", "reward"]]
    """What is checked before the start: prompts, the checkpoint, rewards."""


class _Known(Task):
    model_config = ConfigDict(extra="forbid")
    takes_ranks = False


class Proxy(Exploration):
    precision: str | None = None
    """Precision of the shadow; the run's, if there is none."""


class Audit(_Known, Pool):
    prompts: Count
    """Number of prompts, the first of ``data.eval``."""
    min_gap: Share
    """Share of the reward gap between best and worst that the early stops of ``search`` keep, or less by a standard
    error."""
    overrides: list[str]
    """Options of this command and where it finds them, for the recommended one."""
    proxies: Annotated[list[Proxy], Field(min_length=1)]
    """Proxies to compare."""
    search: bool
    """Also score every step of one BF16 trajectory, and name the cheapest prefix and race that keep ``min_gap``."""

    def check(self) -> None:
        super().check()
        for index, proxy in enumerate(self.proxies):
            proxy.check_rungs(f"proxies.{index}", self.pool, self.keep)


class Sizes(Group):
    pool: Images | None
    """``family.pool`` of all families; null: as configured."""
    keep: Kept | None
    """``family.keep`` of all families; null: as configured."""


class Benchmark(_Known):
    families: Annotated[list[str], Field(min_length=1)]
    """Families to time; naive_scaling and compile, if listed, are the baselines."""
    precisions: list[str] | None
    """Time families with a shadow once with each, e.g. [nvfp4,int8]; null: ``precision=`` only."""
    decoders: list[Decoder] | None
    """Time families that explore once with each, e.g. [full,preview]; null: as configured."""
    sizes: Sizes
    """Overrides for all families."""
    repeats: Count
    """Timed iterations of a family, after one warm-up iteration."""
    rounds: Count
    """Passes through all families in alternating order, so that slow drift affects all equally."""
    compile: bool
    """If there is a compiler: also time compiled forward passes, and compile families with compile=auto on a CPU,
    too."""


class Compare(_Known):
    runs: Glob
    """Glob of run folders, relative to the working directory."""
    reference: str | None
    """Words of the name of a group; null: the group of family=diffusionnft, else the first one."""
    cost: Any
    """Also simulate the seconds of another machine: factors of stages, as {explore: 0.25}, or a table, as
    flux1_h100."""


class Doctor(_Known):
    iterations: Annotated[int, whole(0, MAX_ITERATIONS)] | None
    """Iterations of training on captions of shapes; 0: none; null: 2 with the embedded model, and with random
    weights on a
    GPU."""


class Evaluate(_Known):
    takes_ranks = True
    grid_prompts: Count
    """Rows of the picture, the first n prompts."""
    grid_images: Count
    """Images per prompt and model in the picture."""


class Export(_Known):
    push: Annotated[str | None, must_be("a hub id", _is_hub_id, "Use task.push=<your account>/<name>.")]
    """Hub id (owner/name) to upload the files to; the repository is created as a private one."""


class Generate(_Known):
    prompts: Annotated[list[str], must_be("a list of texts that are not empty", _are_texts, f"Give texts, {_TEXTS}.")]
    """Texts; quote one with a comma, bracket or =."""
    prompt_file: str | None
    """File or named source, as in data.train, instead of ``prompts``."""
    images: Images
    """Images of each prompt, with the seeds of evaluations."""
    seeds: Seeds
    """One image of every prompt each, instead of ``images``."""
    base: bool
    """Also images of the base model, where there are trained weights."""
    grid_prompts: Count
    """Rows of the picture, the first n prompts."""
    grid_images: Images
    """Images per prompt and model in the picture."""

    def check(self) -> None:
        if bool(self.prompts) == (self.prompt_file is not None):
            both = "both" if self.prompts else "neither"
            raise UserError(f"task=generate takes task.prompts, {_TEXTS}, or task.prompt_file=<file>; got {both}.")


class Card(Group):
    name: str
    """Name of the GPU."""
    memory: Positive
    """10^9 bytes, as torch.cuda reports it."""
    capability: Positive
    """Compute capability."""


class Plan(_Known):
    devices: Count
    """Devices that share prompts_per_iteration."""
    overrides: list[str]
    """Options of this command and where it finds them, for the printed ones."""
    cards: list[Card]
    """GPUs to find the options for: memory in 10^9 bytes, as torch.cuda reports it, and compute capability."""
    reserve: NotNegative
    """GB of a card that stay free, for a reward model, CUDA and the allocator."""


class Prove(_Known):
    folder: str
    """Of the results and of the steps' runs; another one begins a new proof."""
    minutes: Positive
    """After which no step continues."""
    steps: list[str] | None
    """Names of the steps to run, again if they have ended; null: those that have not."""


class Serve(_Known):
    host: str
    """Address to listen on; any but this machine's own requires the token SOLRL_REWARD_TOKEN."""
    port: Port
    """Port to listen on; 0: a free one."""
    max_images: Count
    """Images of a request."""
    max_pixels: Count
    """Pixels of an image."""


# A task by the name of its function; where a custom function stands there, by a key that no other task has.
_TASKS: dict[str, tuple[str, type[Task]]] = {
    "audit": ("proxies", Audit),
    "benchmark": ("rounds", Benchmark),
    "compare": ("runs", Compare),
    "doctor": ("iterations", Doctor),
    "generate": ("prompt_file", Generate),
    "evaluate": ("grid_prompts", Evaluate),
    "export": ("push", Export),
    "plan": ("cards", Plan),
    "prove": ("minutes", Prove),
    "serve": ("port", Serve),
}


def _of_its_class(node: Any, info: ValidationInfo) -> Any:
    if not isinstance(node, dict):
        return node
    name = str(node.get("_target_")).removeprefix("solrl_lightning.tasks.").partition(".")[0]
    marked = (kind for key, kind in _TASKS.values() if key in node)
    return (_TASKS[name][1] if name in _TASKS else next(marked, Task)).model_validate(node, context=info.context)


AnyTask = Annotated[SerializeAsAny[Task], BeforeValidator(_of_its_class)]
