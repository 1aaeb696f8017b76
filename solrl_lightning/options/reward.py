"""``reward``: the scores of an image, one entry for each."""

import copy
import math
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator
from typing_extensions import Required, TypedDict

from solrl_lightning.errors import UserError
from solrl_lightning.names import Combination
from solrl_lightning.options.rules import (
    NODE,
    Broken,
    Count,
    CountOrZero,
    Group,
    NotNegative,
    Positive,
    Share,
    must_be,
    number,
)
from solrl_lightning.rewards.addresses import check_url
from solrl_lightning.rewards.answers import normal

HTTP = "solrl_lightning.rewards.http.HTTPReward"
VLM = "solrl_lightning.rewards.vlm.VLMReward"
VLM_LOCAL = "solrl_lightning.rewards.vlm_local.LocalVLMReward"
GENEVAL = "solrl_lightning.rewards.GenEval"
REWARD_FILES = ("pretrained", "processor", "tokenizer", "head", "detector")  # keys of a reward's hub ids and paths


Weight = Annotated[float, number("a finite number; 0 for a reward that is only evaluated", lambda value: True)]


def _are_answers(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(
            isinstance(word, str) and word and type(mark) in (int, float) and math.isfinite(mark)
            for word, mark in value.items()
        )
        and len({float(mark) for mark in value.values()}) > 1
        and len({normal(word) for word in value}) == len(value)
    )


Answers = Annotated[
    dict[str, float],
    must_be("two or more answers with numbers that differ, as in {yes:1,no:0}, and not only in case", _are_answers),
]


class Member(TypedDict, total=False):
    """A reward: the arguments of its class, and its weight."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A subclass of ``Reward``."""
    weight: Required[Weight]
    """Weight in the reward to train on; 0: evaluation only."""


class Remote(Member, total=False):
    """A reward that is asked over the network."""

    url: Required[str]
    """Address that receives the requests."""
    concurrency: Count
    """Requests at the same time."""
    timeout: Positive
    """Seconds without an answer."""
    retries: CountOrZero
    """Further attempts of a failed request."""
    backoff: NotNegative
    """Seconds before the second of them."""


class Server(Remote, total=False):
    """reward=http."""

    batch: Count
    """Images per request."""


class Judge(Remote, total=False):
    """reward=vlm, vlm_marks, vlm_edit."""

    model: Required[str]
    """Name of the model there."""
    question: Required[str]
    """Text beside the image."""
    answers: Required[Answers]
    """Value of each answer."""
    logprobs: bool
    """Read the probabilities of the first word."""


class LocalJudge(Member, total=False):
    """reward=vlm_local."""

    question: Required[str]
    """Text beside the image."""
    answers: Required[Answers]
    """Value of each answer."""
    batch: Count
    """Images per forward pass."""


class Objects(Member, total=False):
    """reward=geneval."""

    threshold: Share
    """Lowest score of an object."""
    counting_threshold: Share
    """The same for prompts about numbers."""
    strict: bool
    """1 if every clause holds, else 0."""


def _of_its_class(member: Any) -> Any:
    kind: Any = {HTTP: Server, VLM: Judge, VLM_LOCAL: LocalJudge, GENEVAL: Objects}.get(member["_target_"], Member)
    return TypeAdapter(kind).validate_python(member)


class Reward(Group):
    """The rewards by name, beside these keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[dict[str, Any], BeforeValidator(_of_its_class)]] = Field(init=False)

    pretrained: str | None
    """Hub id or local folder; overrides that of the reward, if there is only one."""
    combine: Combination
    """How several rewards become one."""

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The arguments of each chosen reward."""
        return self.__pydantic_extra__ or {}

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """A copy of them."""
        return copy.deepcopy(self.entries)

    @property
    def name(self) -> str:
        """The reward that is trained on, as ``WeightedRewards.name``."""
        return next(iter(self.members)) if len(self.members) == 1 else "weighted_sum"

    @model_validator(mode="before")
    @classmethod
    def check_members(cls, node: Any) -> Any:
        for name in node.keys() - {"pretrained", "combine"} if isinstance(node, dict) else ():
            member = node[name] if isinstance(node[name], dict) else {}
            if "weight" not in member or not isinstance(member.get("_target_"), str):
                raise Broken(
                    "it must have a _target_ and a weight.",
                    name,
                    "Begin the reward's file with `# @package reward`, and put them below its one key, the reward's "
                    "name.",
                )
        return node

    def check(self) -> None:
        members = self.members
        for name, member in members.items():
            if member["_target_"] in (HTTP, VLM):
                check_url(f"reward.{name}.url", member["url"])
        if not members:
            raise UserError("reward=[] is invalid: a run needs a reward. Choose one with reward=<option>.")
        if all(member["weight"] == 0 for member in members.values()):
            names = ", ".join(members)
            raise UserError(f"At least one reward needs a weight other than 0; got 0 for {names}.")
        loaded = [name for name, member in members.items() if "pretrained" in member]
        if self.pretrained is not None and (len(members) > 1 or not loaded):
            keys = " or ".join(f"reward.{name}.pretrained" for name in loaded)
            raise Broken(
                f"it is for one reward that is loaded from files; got {', '.join(members)}.",
                "pretrained",
                f"Set {keys}." if loaded else "Leave it out.",
            )
