"""--help <group>: the options of a group, of the package's classes and of the user's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

OWN = '''
from torch import Tensor

from solrl_lightning.options.rules import Share
from solrl_lightning.rewards.base import Reward


class Redness(Reward):
    """Scores red.

    Args:
        least: redness that scores 0,
            at most 1.
    """

    name = "redness"

    def __init__(self, device: str, least: Share = 0.5) -> None:
        self.least = least

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images[:, 0].mean((1, 2)) - self.least
'''


PLAIN = """from dataclasses import dataclass
from solrl_lightning.objectives.nft import NFT

@dataclass(frozen=True, kw_only=True)
class Plain(NFT):
    other: int = 1
"""


def test_help_of_a_group_describes_the_options_that_no_file_names(command: Command) -> None:
    result = command("--help", "family", "family=sol_rl", "family.pool=48")
    assert result.status == 0
    assert "family.pool=48\n    Candidates of each prompt.\n" in result.out
    assert "family.explore.stop_below=null\n    Instead of ``stop_after``: the highest noise level from" in result.out
    out = command("--help", "reward", "reward=clipscore").out
    assert "reward.clipscore.processor=openai/clip-vit-large-patch14\n    hub ids or folders, of the weights" in out
    assert "family.explore.name" not in result.out and "family.regenerate.decoder" not in result.out


def test_help_of_an_option_needs_no_others(command: Command) -> None:
    assert "task.prompts=[]\n    Texts; quote one" in command("--help", "task", "task=generate").out
    out = command("--help", "trainer", "trainer=fsdp").out
    assert "\ntrainer.devices=" in out and "\n+trainer.profiler=null\n" in out, "a plus as the command line needs it"
    assert "task.proxies=[{sampler:shadow, steps:4}, {sampler:" in command("--help", "task", "task=audit").out


def test_help_describes_callbacks_and_a_reward_of_the_users_own(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "help_redness.py").write_text(f"{OWN}\n\n{PLAIN}")
    (tmp_path / "mine/reward").mkdir(parents=True)
    (tmp_path / "mine/reward/redness.yaml").write_text(
        "# @package reward\nredness: { _target_: help_redness.Redness, weight: 2.0 }\n"
    )
    out = command("--help", "callbacks", "reward", "--config-dir", "mine", "reward=redness").out
    assert "callbacks.guard.stop=false\n    end the run at the first alarm" in out
    assert "reward.redness: help_redness.Redness\n    Scores red.\nreward.redness.weight=2.0\n    in the reward" in out
    assert "redness.device" not in out
    assert "reward.redness.least=0.5\n    redness that scores 0, at most 1.\n" in out
    out = command("--help", "objective", "objective._target_=help_redness.Plain").out
    assert "objective: help_redness.Plain\nobjective." in out, "its docstring is only a signature"


def test_help_shows_the_files_of_experiments(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine/experiment/short.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\niterations: 3\n")
    out = command("--help", "experiment", "--config-dir", "mine").out
    assert "experiment=fast\n    # @package _global_\n    # The split of the work" in out
    assert "experiment=short\n    # @package _global_\n    iterations: 3\n" in out
    file.write_text("iterations: 3\n")
    ended = command("--config-dir", "mine", "experiment=short")
    assert ended.status == 2 and f"{file} is invalid: an experiment's file must begin with" in ended.err


def test_help_of_an_unknown_group_says_so(command: Command) -> None:
    assert (
        "Cannot read 'fam': an option is written key=value. --help lists the common ones."
        in command("--help", "fam").err
    )


def test_help_of_a_group_of_the_users_own_says_so(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine" / "colours").mkdir(parents=True)
    (tmp_path / "mine" / "colours" / "red.yaml").write_text("hue: 0")
    result = command("--config-dir", "mine", "--help", "colours")
    assert result.status == 2 and "--help colours is invalid: the group is your own" in result.err
