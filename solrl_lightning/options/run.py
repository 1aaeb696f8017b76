"""The configuration of a run, typed and checked: every key with its bounds, and the rules over several keys."""

from collections.abc import Mapping
from os.path import expanduser
from typing import Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from typing_extensions import is_typeddict

from solrl_lightning.errors import UserError
from solrl_lightning.names import SHADOW, SHARDED, Storage, TrainingSampler
from solrl_lightning.options.data import Data
from solrl_lightning.options.explorers import Explorers
from solrl_lightning.options.family import Family
from solrl_lightning.options.model import Model, Policy
from solrl_lightning.options.optimizer import Optimizer
from solrl_lightning.options.precision import Precision
from solrl_lightning.options.reward import Reward
from solrl_lightning.options.rules import (
    UNCHECKED,
    Broken,
    Compile,
    Count,
    CountOrAuto,
    Group,
    Iterations,
    Node,
    Positive,
    Seed,
    explain,
    group_of,
    is_reference,
    written,
)
from solrl_lightning.options.task import AnyTask, Audit, Generate, Plan, Task
from solrl_lightning.options.trainer import Trainer

_Task = TypeVar("_Task", bound=Task)


class Evaluations(Group):
    every: CountOrAuto
    """Iterations between evaluations on held-out prompts."""


class Run(Group):
    """The options of a run. Errors are reported in this order: a key stands before those that follow from it."""

    seed: Seed
    """Equal seeds give equal runs."""
    model: Model
    """Text-to-image model."""
    iterations: Iterations
    """Each explores, selects, regenerates and trains."""
    max_seconds: Positive | None
    """Of training, without evaluations; the run ends at the end of the iteration that reaches them."""
    prompts_per_iteration: Count
    """Of all ranks together."""
    optimizer_steps: Count
    """Of an iteration; each takes an equal part of the training rows."""
    training_sampler: TrainingSampler
    """Samples the images to train on."""
    base_weights: Storage
    """Storage of the frozen linear layers of the blocks."""
    encode_on: Literal["device", "cpu"]
    """Where the text encoders run."""
    compile_training: Compile
    """torch.compile of the trained transformer; auto: on a GPU."""
    evaluation: Evaluations
    """When the policy is evaluated."""
    ckpt: str | None
    """Checkpoint to resume from or to evaluate."""
    family: Family
    """How training samples are chosen."""
    task: AnyTask
    """What is done."""
    explorers: Explorers
    """What explores for the run."""
    objective: Node
    """Loss."""
    optimizer: Optimizer
    """Optimiser of the trained LoRA."""
    scheduler: Node
    """Learning rate schedule."""
    old_policy: Node
    """Decay of the policy that samples."""
    precision: Precision
    """Number format of the shadow."""
    data: Data
    """Prompts."""
    reward: Reward
    """Scores of an image."""
    trainer: Trainer
    """Lightning's Trainer."""
    callbacks: dict[str, Node | None] = {}
    """Callbacks by name."""
    logger: dict[str, Node | None] = {}
    """Loggers by name."""
    run_dir: str
    """The run's folder."""

    @classmethod
    def of(cls, cfg: DictConfig, context: object = None) -> "Run":
        """Return the options of an application config. UserError for the first that is invalid.

        ``~/`` at the beginning of a text is the home folder. ``UNCHECKED`` leaves out rules over several keys.
        """
        try:
            tree = _at_home(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
        except OmegaConfBaseException:  # an invalid value may be why others that refer to it have none
            try:
                cls.model_validate(OmegaConf.to_container(cfg, resolve=False))
            except ValidationError as invalid:
                for error in invalid.errors():
                    if not is_reference(error["input"]):
                        raise explain(error) from None
            raise
        return cls.of_tree(tree, context)

    @classmethod
    def of_tree(cls, tree: Any, context: object = None) -> "Run":
        """Return the options of resolved values, as `tree` gives them."""
        try:
            return cls.model_validate(tree, context=context)
        except ValidationError as error:
            raise explain(error.errors()[0]) from None

    @classmethod
    def defaults(cls, parent: str) -> list[str]:
        """Return the keys of the group ``parent`` that a run may leave out of its files and has a rule for."""
        group: type[Group] = cls
        for part in parent.split("."):
            field = group.model_fields.get(part)
            kind: Any = None if field is None else field.annotation
            if is_typeddict(kind):
                return sorted(kind.__optional_keys__)
            below = None if kind is None else group_of(kind)
            if below is None:
                return []
            group = below
        fields = group.model_fields if group.model_config.get("extra") == "forbid" else {}
        return [name for name, field in fields.items() if name not in group.no_keys and not field.is_required()]

    def tree(self) -> dict[str, Any]:
        """Return the values as mappings and lists, without defaults."""
        return self.model_dump(by_alias=True, exclude_unset=True)

    def with_group(self, group: str, node: Any) -> "Run":
        """Return a copy with another value of a group; rules over several keys are not checked."""
        kind: Any = type(getattr(self, group))
        changed = self.model_copy(deep=True)
        setattr(changed, group, kind.model_validate(node, context=UNCHECKED))
        return changed

    def task_as(self, kind: type[_Task]) -> _Task:
        """Return `task`, narrowed to ``kind``."""
        assert isinstance(self.task, kind)
        return self.task

    # Facts

    @property
    def uses_model(self) -> bool:
        return not {"train", "eval", "ckpt"}.isdisjoint(self.task.reads) or isinstance(self.task, Generate)

    @property
    def trains(self) -> bool:
        """Whether the task is task=train, or a custom task."""
        return type(self.task) is Task

    @property
    def explores_elsewhere(self) -> bool:
        """Whether other processes explore for the training."""
        return self.explorers.count > 0 and self.trains

    @property
    def samplers(self) -> set[str]:
        """Names of the samplers of the family's stages in this process."""
        return {self.family.regenerate.sampler} | (set() if self.explores_elsewhere else self.family.exploring_samplers)

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks share the weights, as with trainer=fsdp."""
        strategy: Any = self.trainer.get("strategy")
        return isinstance(strategy, dict) and strategy.get("_target_") == SHARDED

    @property
    def lora(self) -> str | None:
        """The path of the LoRA that training begins with; None with a checkpoint, which has its own weights."""
        return self.model.init_lora if self.ckpt is None else None

    @property
    def weights(self) -> dict[str, str]:
        """The name of each model in task=generate and task=evaluate, and its name in ``SolRLModule.sample``."""
        base = {"base": "base"} if isinstance(self.task, Generate) and self.task.base else {}
        return base | ({} if self.ckpt is None and self.lora is None else {"trained": "ema"})

    def callbacks_of(self, kind: str) -> dict[str, Mapping[str, Any]]:
        """Return, by name, the arguments of the callbacks of a class of ``solrl_lightning.callbacks``."""
        target = f"solrl_lightning.callbacks.{kind}"
        return {name: node for name, node in self.callbacks.items() if node and node["_target_"] == target}

    # Rules over several groups

    def check(self) -> None:
        self.check_policy()
        self.check_training()
        self.check_exploration()
        self.check_compilation()
        self.check_full()
        self.check_sharded()
        self.check_explorers()

    def check_policy(self) -> None:
        known = self.model.model_dump(exclude={"policy"})
        for key, value in self.model.policy.items():
            if key in known and known[key] != value:
                raise Broken(f"it is model.{key}.", f"model.policy.{key}", f"Set model.{key}, which is checked.")
        for key in Policy.__annotations__:
            if key not in (*self.model.policy, "pretrained") and known.get(key) is not None:
                fix = f"Leave it out or set it to null, or add '+model.policy.{key}=${{model.{key}}}'."
                raise Broken("model.policy does not have it, so nothing reads it.", f"model.{key}", fix)

    def check_training(self) -> None:
        family = self.family
        if self.optimizer_steps > family.keep:
            rule = f"it must be at most family.keep={family.keep}, so that each step has rows of every prompt."
            raise Broken(rule, "optimizer_steps", f"Set optimizer_steps={family.keep} or raise family.keep.")
        names = dict.fromkeys([*self.reward.members, self.reward.name])
        for name, best in self.callbacks_of("checkpoints.BestCheckpoint").items():
            if best.get("monitor") not in (None, *names):
                rule = f"it must be one of the run's rewards, {', '.join(names)}, or null."
                raise Broken(rule, f"callbacks.{name}.monitor")
        folder = f"{self.run_dir}/checkpoints"
        values = {
            "trainer.max_epochs": (self.trainer.get("max_epochs"), self.iterations),
            "trainer.default_root_dir": (self.trainer.get("default_root_dir"), self.run_dir),
        }
        for name in ("checkpoint", "best"):  # of any class: ckpt=last and ckpt=best look there
            values[f"callbacks.{name}.dirpath"] = ((self.callbacks.get(name) or {}).get("dirpath", folder), folder)
        for name, node in self.logger.items():
            values[f"logger.{name}.log_model"] = (bool((node or {}).get("log_model")), False)
        for key, (actual, expected) in values.items():
            if actual != expected:
                fix = (
                    "Leave it out; iterations=<number> is the length of a run, hydra.run.dir=<folder> its folder, and "
                    "callbacks.periodic.every=<iterations> keeps other checkpoints there."
                )
                raise Broken(f"it must be {written(expected)}, which the program relies on.", key, fix)

    def check_exploration(self) -> None:
        if self.family.explore is not None:
            self.check_decoder("family.explore.decoder", self.family.explore.decoder)
        for index, proxy in enumerate(self.task.proxies if isinstance(self.task, Audit) else ()):
            self.check_decoder(f"task.proxies.{index}.decoder", proxy.decoder)

    def check_decoder(self, key: str, decoder: str) -> None:
        """Raise UserError if ``decoder``, the value of ``key``, is "preview" without ``model.preview_decoder``."""
        if decoder == "preview" and self.model.policy.get("preview_decoder") is None:
            raise UserError(
                f"{key}=preview is invalid: it needs a tiny autoencoder of this model's latents, and "
                "model.preview_decoder names none. docs/models names those that fit, model=tiny brings one "
                f"(model.preview_decoder=tiny); or set {key}=full."
            )

    def check_compilation(self) -> None:
        keys = {
            "family.compile": self.family.compile,
            "compile_training": self.compile_training,
            "task.compile": getattr(self.task, "compile", False),
        }
        for key, value in keys.items():
            if value is True and self.base_weights != "bfloat16":
                raise Broken(
                    f"with {key}=true it must be bfloat16, as torch.compile does not run stored weights of torchao.",
                    "base_weights",
                    f"Set {key}=false.",
                )

    def check_sharded(self) -> None:
        """Raise UserError for what trainer=fsdp cannot do: no rank has a copy of the transformer or computes alone."""
        if not self.is_sharded:
            return
        grids = [name for name, node in self.callbacks_of("sample_grid.SampleGrid").items() if node.get("every")]
        grid = f"callbacks.{(grids or ['sample_grid'])[0]}"
        rules = {
            f"task._target_={self.task.target}": (type(self.task) not in (Task, Plan), "task=train"),
            "family.explore.sampler=shadow": (SHADOW in self.family.exploring_samplers, "family=prefix"),
            "family.compile=true": (self.family.compile is True, "family.compile=false"),
            "compile_training=true": (self.compile_training is True, "compile_training=false"),
            f"base_weights={self.base_weights}": (self.base_weights != "bfloat16", "base_weights=bfloat16"),
            grid: (bool(grids), f"{grid}.every=0"),
        }
        for option, (broken, fix) in rules.items():
            if broken:
                raise UserError(
                    f"{option} is invalid with trainer=fsdp: ranks have no copy of the weights and compute each "
                    f"forward pass together. Set {fix}, or trainer=auto."
                )

    def check_full(self) -> None:
        """Raise UserError for an option of frozen weights or of a LoRA with model.train=full, which has neither."""
        values = {"base_weights": (self.base_weights, "bfloat16"), "model.init_lora": (self.model.init_lora, None)}
        for key, (actual, expected) in values.items():
            if self.model.train == "full" and actual != expected:
                fix = f"Set {key}={written(expected)}."
                raise Broken("model.train=full has no frozen weights and no LoRA.", key, fix)

    def check_explorers(self) -> None:
        """Raise unless a run with explorers explores, and with other processes than its ranks."""
        if self.explorers.count and (self.family.explore is None or self.is_sharded):
            rule = "it needs a family that explores, and another trainer than fsdp, which explores with its own ranks."
            raise Broken(rule, "explorers.count", "Use explorers=none.")


def _at_home(value: Any) -> Any:
    """Return a value with the home folder for ``~`` at the beginning of each of its texts."""
    if isinstance(value, dict):
        return {key: _at_home(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    return expanduser(value) if isinstance(value, str) and value.startswith("~/") else value
