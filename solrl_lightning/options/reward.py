"""``reward``: the scores of an image, one entry for each."""

import copy
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Required, TypedDict

from solrl_lightning.errors import UserError
from solrl_lightning.names import TAKEN_BY_METRICS, Combination, trained_reward
from solrl_lightning.options.rules import HERE, NODE, Broken, Group, number
from solrl_lightning.rewards.addresses import HTTP, VLM, check_url

GENEVAL = "solrl_lightning.rewards.geneval.GenEval"
_CHANGES_NO_SCORE = ("weight", "url", "batch", "concurrency", "timeout", "retries", "backoff")
REWARD_FILES = ("pretrained", "processor", "tokenizer", "head", "detector")  # keys of a reward's hub ids and paths


Weight = Annotated[
    float, number("a finite number; 0 for a reward that is only evaluated", lambda value: True, f"Set {HERE}=1.")
]


class Member(TypedDict, total=False):
    """A reward: the arguments of its class, and its weight."""

    __pydantic_config__ = NODE  # type: ignore[misc]
    _target_: Required[str]
    """A subclass of ``Reward``."""
    weight: Required[Weight]
    """Weight in the reward to train on; 0: evaluation only."""


class Reward(Group):
    """The rewards by name, beside these keys."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Member] = Field(init=False)

    pretrained: str | None
    """Hub id or local folder; overrides the reward's, if there is only one."""
    combine: Combination
    """How several rewards become one."""

    @property
    def entries(self) -> dict[str, Any]:
        """The arguments of each chosen reward."""
        return self.__pydantic_extra__ or {}

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        """A copy of them."""
        return copy.deepcopy(self.entries)

    @property
    def scoring(self) -> dict[str, Any]:
        """The arguments of each reward that decide its scores, and ``pretrained``."""
        arguments = {
            name: {key: value for key, value in member.items() if key not in _CHANGES_NO_SCORE}
            for name, member in self.entries.items()
        }
        return {"pretrained": self.pretrained, **arguments}

    @property
    def files(self) -> dict[str, str]:
        """The hub ids and paths of the rewards by key, with ``pretrained`` in place of the one that it overrides."""
        files = {"reward.pretrained": self.pretrained} if self.pretrained else {}
        for name, member in self.entries.items():
            parts = [part for part in REWARD_FILES if part != "pretrained" or not self.pretrained]
            texts = {part: member[part] for part in parts if isinstance(member.get(part), str)}  # others name no file
            files |= {f"reward.{name}.{part}": text for part, text in texts.items()}
        return files

    @property
    def name(self) -> str:
        """The reward that is trained on, as ``WeightedRewards.name``."""
        return trained_reward({name: member["weight"] for name, member in self.entries.items()})

    @model_validator(mode="before")
    @classmethod
    def check_members(cls, node: Any) -> Any:
        for name in node if isinstance(node, dict) else ():
            if name in ("pretrained", "combine"):
                continue
            if name in TAKEN_BY_METRICS:
                raise Broken("a metric or key has that name.", name, "Choose another name for the reward.")
            member = node[name] if isinstance(node[name], dict) else {}
            if "weight" not in member or not isinstance(member.get("_target_"), str):
                fix = "Begin the reward's file with `# @package reward`, and put them below its one key, its name."
                if isinstance(node[name], int | float):
                    fix = f"Set reward.{name}.weight={node[name]}."
                elif misspelt := [key for key in member if key != "_target_" and str(key).strip("_") == "target"]:
                    fix = f"Write _target_ in place of {misspelt[0]}."
                elif member and "_target_" not in member:  # as of an experiment whose reward another one replaces
                    fix = f"Choose it, too, with reward=[...,{name}], or leave its keys out with ~reward.{name}."
                raise Broken("it must have a _target_ and a weight.", name, fix)
        return node

    def check(self) -> None:
        members = self.members
        for name, member in members.items():
            if member["_target_"] in (HTTP, VLM) and isinstance(member.get("url"), str):
                check_url(f"reward.{name}.url", member["url"])
        if all(member["weight"] == 0 for member in members.values()):
            raise UserError(
                f"reward=[{','.join(members)}] is invalid: a run needs a reward with a weight other than 0. Choose one "
                "with reward=<option>, or set reward.<name>.weight=1."
            )
        loaded = [name for name, member in members.items() if "pretrained" in member]
        if self.pretrained is not None and (len(members) > 1 or not loaded):
            keys = " or ".join(f"reward.{name}.pretrained" for name in loaded)
            raise Broken(
                f"it is for one reward that is loaded from files; got {', '.join(members)}.",
                "pretrained",
                f"Set {keys}." if loaded else "Leave it out.",
            )
