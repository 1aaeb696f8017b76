"""The configuration tree: every shipped file composes, names existing code, and is documented; checks of values."""

import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

import solrl_lightning.conf
from solrl_lightning.cli.config import ConfigTree, application_config, check_names
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run

CONF = Path(str(solrl_lightning.conf.__file__)).parent
REPOSITORY = Path(__file__).parents[2]
GROUPS = (
    "task",
    "model",
    "reward",
    "family",
    "objective",
    "scheduler",
    "precision",
    "data",
    "trainer",
    "logger",
    "callbacks",
)
OPTIONS = sorted(
    (file.parent.name, file.stem) for file in CONF.glob("*/*.yaml") if file.parent.name in (*GROUPS, "experiment")
)


@functools.cache
def _composed(*arguments: str) -> DictConfig:
    with ConfigTree() as tree:
        return application_config(tree.compose(arguments), "run")


def compose(*arguments: str) -> DictConfig:
    return _composed(*arguments).copy()


def options(group: str) -> list[str]:
    return [option for own, option in OPTIONS if own == group]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_shipped_option_composes_to_valid_values(group: str, option: str) -> None:
    needs = {"fsdp": ["family=prefix", "callbacks.sample_grid.every=0"], "generate": ["task.prompts=[a]"]}
    Run.of(compose(f"{group}={option}", *needs.get(option, [])))


# Groups know nothing of each other, so every option once is enough.
@pytest.mark.parametrize(
    ("family", "objective", "precision"),
    list(zip(options("family"), itertools.cycle(options("objective")), itertools.cycle(options("precision")))),
)
def test_families_go_with_objectives_and_precisions(family: str, objective: str, precision: str) -> None:
    cfg = compose(f"family={family}", f"objective={objective}", f"precision={precision}")
    Run.of(cfg)
    assert cfg.callbacks.summary.hparams.family == family
    assert cfg.precision.name == precision


def test_groups_and_names_of_the_contract_exist() -> None:
    with ConfigTree() as tree:
        assert set(tree.groups()) == {*GROUPS, "experiment"}
    published = {"diffusionnft", "naive_scaling", "compile", "naive_quant", "sol_rl"}
    assert set(options("family")) == published | {"adaptive", "prefix", "race"}
    assert set(options("scheduler")) == {"constant", "linear", "cosine"}


@pytest.mark.parametrize(
    "knob",
    [
        "seed=7",
        "iterations=3",
        "prompts_per_iteration=5",
        "family.pool=48",
        "family.keep=12",
        "family.explore.steps=4",
        "family.regenerate.steps=8",
        "model.pretrained=some/folder",
        "data.train=shapes-eval",
        "data.eval=shapes-train",
    ],
)
def test_common_knob_is_settable_by_its_name(knob: str) -> None:
    key, value = knob.split("=")
    assert str(OmegaConf.select(compose(knob), key)) == value


def test_published_hyperparameters_are_the_defaults() -> None:
    cfg = compose()
    assert (cfg.model.lora.rank, cfg.model.lora.alpha) == (32, 64)
    assert (cfg.optimizer.weight_decay, cfg.optimizer.eps) == (1e-4, 1e-8)
    assert (cfg.objective.beta, cfg.objective.advantage_clip) == (1.0, 5.0)
    assert (cfg.family.explore.steps, cfg.family.regenerate.steps, cfg.model.train_timestep_fraction) == (4, 10, 0.2)
    assert cfg.trainer.gradient_clip_val == cfg.model.max_grad_norm == 1.0
    assert cfg.old_policy.decay_type == 1
    assert cfg.seed == 42


@pytest.mark.parametrize("model", options("model"))
def test_published_experiment_has_the_published_hyperparameters_on_every_model(model: str) -> None:
    cfg = compose(f"model={model}", "experiment=published")
    assert (cfg.optimizer.lr, list(cfg.optimizer.betas), cfg.optimizer.weight_decay) == (3e-4, [0.9, 0.999], 1e-4)
    assert (cfg.objective.beta, cfg.objective.kl_weight, cfg.objective.advantage_clip) == (1.0, 1e-4, 5.0)
    assert (cfg.scheduler._target_.rpartition(".")[2], cfg.scheduler.warmup) == ("constant", 0)
    assert (cfg.old_policy.decay_type, cfg.old_velocity, cfg.optimizer_steps) == (1, "policy", 1)
    assert (cfg.prompts_per_iteration, cfg.family.pool, cfg.family.keep) == (48, 96, 24)
    assert (cfg.family.explore.steps, cfg.family.regenerate.steps) == (6, 10)
    assert (cfg.model.lora.rank, cfg.model.lora.alpha) == (32, 64)


@pytest.mark.parametrize(
    ("family", "pool", "explores", "samplers"),
    [
        ("diffusionnft", 24, False, {"merged"}),
        ("naive_scaling", 96, False, {"policy"}),
        ("compile", 96, False, {"merged"}),
        ("naive_quant", 96, False, {"shadow"}),
        ("sol_rl", 96, True, {"shadow", "merged"}),
    ],
)
def test_family_is_the_row_of_the_table(family: str, pool: int, explores: bool, samplers: set[str]) -> None:
    settings = compose(f"family={family}").family
    stages = [stage for stage in (settings.explore, settings.regenerate) if stage is not None]
    assert (settings.pool, settings.keep, settings.explore is not None) == (pool, 24, explores)
    assert {stage.sampler for stage in stages} == samplers
    assert (settings.warning is not None) == (family == "naive_quant")


@pytest.mark.parametrize("family", options("family"))
def test_smoke_experiment_selects_where_the_family_does(family: str) -> None:
    whole, small = (compose(f"family={family}", *experiment).family for experiment in ((), ("experiment=smoke",)))
    assert small.pool == 8
    assert (small.keep < small.pool) == (whole.keep < whole.pool)


def targets(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for value in node.values():
            yield from targets(value)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_target_exists_and_takes_the_keys_beside_it(group: str, option: str) -> None:
    cfg = OmegaConf.to_container(compose(f"{group}={option}"))
    assert isinstance(cfg, dict)
    if group == "task":
        inspect.signature(get_object(cfg["task"]["_target_"])).bind(cfg)
    if group in cfg and group != "task":
        for node in targets(cfg[group]):
            ours = {"weight"} if group == "reward" else set()  # for the sum, not for the reward
            keys = {key: value for key, value in node.items() if not key.startswith("_") and key not in ours}
            inspect.signature(get_object(node["_target_"])).bind_partial(**keys)


def test_every_configuration_file_opens_with_what_it_is() -> None:
    for file in CONF.rglob("*.yaml"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line != "# @package _global_"]
        assert lines[0].startswith("# "), file


@pytest.mark.parametrize("option", options("experiment"))
def test_experiment_names_the_command_that_runs_it(option: str) -> None:
    text = (CONF / "experiment" / f"{option}.yaml").read_text(encoding="utf-8")
    assert re.search(rf"^#   python -m solrl_lightning .*experiment={option}$", text, re.MULTILINE)


def test_every_package_of_the_repository_is_installed() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^packages = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    folders = {file.parent.relative_to(REPOSITORY) for file in REPOSITORY.glob("solrl_lightning/**/__init__.py")}
    packages = {".".join(folder.parts) for folder in folders} | {"solrl_lightning.callbacks", "solrl_lightning.conf"}
    assert set(re.findall(r'"(.+?)"', listed[1])) == packages


def test_experiment_may_name_the_values_of_a_sweep() -> None:
    with ConfigTree() as tree:
        jobs = tree.jobs(["experiment=selection", "iterations=5"], multirun=True)
    chosen = {(cfg.hydra.runtime.choices.family, cfg.seed) for cfg in jobs}
    assert chosen == set(itertools.product(("sol_rl", "diffusionnft"), (1, 2, 3)))
    assert {cfg.iterations for cfg in jobs} == {5}


def test_time_to_reward_runs_every_family_with_equal_settings_over_three_seeds() -> None:
    with ConfigTree() as tree:
        jobs = tree.jobs(["experiment=time_to_reward"], multirun=True)
    chosen = [(cfg.hydra.runtime.choices.family, cfg.seed) for cfg in jobs]
    families = ("diffusionnft", "naive_scaling", "compile", "naive_quant", "sol_rl", "prefix", "race")
    assert chosen == list(itertools.product(families, (1, 2, 3)))
    assert {(cfg.iterations, cfg.evaluation.every, cfg.prompts_per_iteration) for cfg in jobs} == {(12, 2, 8)}


# Names


@pytest.mark.parametrize(
    ("argument", "suggestion"),
    [
        ("famly=sol_rl", "family"),
        ("family=solrl", "family=sol_rl"),
        ("family=sol-rl", "family=sol_rl"),
        ("objective=ntf", "objective=nft"),
        ("family.explor.steps=4", "family.explore.steps"),
        ("explore.steps=4", "family.explore.steps"),
        ("lr=1e-3", "optimizer.lr"),
        ("model.guidance_scale=4.5", "model.guidance"),  # of FLUX.1
        ("iteration=4", "iterations"),
        ("experimnt=smoke", "experiment"),
        ("hydra.run.dirr=x", "hydra.run.dir"),
    ],
)
def test_unknown_name_is_answered_with_the_nearest(argument: str, suggestion: str) -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match=rf"Did you mean {re.escape(suggestion)}\b"):
        check_names(tree, [argument])


def test_unknown_name_like_nothing_else_is_an_error_without_a_guess() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="There is no key xyzzy. --help"):
        check_names(tree, ["xyzzy=1"])


def test_error_of_an_unknown_key_of_a_small_group_names_its_keys() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="limits has fall, diversity, kl, drift. --help"):
        check_names(tree, ["callbacks.guard.limits.pictures=4"])


def test_option_that_does_not_exist_is_answered_with_all_that_do() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="compile, diffusionnft, naive_quant, naive_scaling, "):
        check_names(tree, ["family=zzz"])


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        (
            "callbacks.checkpoint.verbose=true",
            "Write +callbacks.checkpoint.verbose=<value> if lightning.",
        ),
        ("optimizer.amsgrad=true", "Write +optimizer.amsgrad=<value> if torch.optim.AdamW takes it."),
        ("trainer.deterministic=true", "Write +trainer.deterministic=<value> if lightning.Trainer takes it."),
    ],
)
def test_argument_that_a_target_may_take_can_be_added(argument: str, hint: str) -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match=re.escape(hint)):
        check_names(tree, [argument])


def test_key_that_nothing_takes_is_not_to_be_added() -> None:
    for argument in ("family.pol=3", "task.x=1", "iterationss=2"):
        with ConfigTree() as tree, pytest.raises(UserError) as refusal:
            check_names(tree, [argument])
        assert "+" not in str(refusal.value)


def test_stage_that_the_family_lacks_is_said_to_be_missing() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="family.explore is null in the chosen family"):
        check_names(tree, ["family=diffusionnft", "family.explore.steps=4"])


def test_known_names_pass() -> None:
    with ConfigTree() as tree:
        check_names(tree, ["family=compile", "family.pool=48", "+trainer.fast_dev_run=true", "~callbacks.progress"])


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("+rater._target_=torch.optim.lr_scheduler.StepLR", "so nothing reads it"),
        ("+rater=cosine", "so nothing reads it"),
        ("++iteration=3", "Did you mean iterations?"),
        ("+lr=1e-4", "Did you mean optimizer.lr?"),
    ],
)
@pytest.mark.parametrize("sweep", [(), ("seed=1,2",)])
def test_plus_adds_no_key_at_the_root(argument: str, hint: str, sweep: tuple[str, ...]) -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match=rf"^{re.escape(argument)} is invalid: .*{hint}"):
        tree.jobs([argument, *sweep], multirun=bool(sweep))


@pytest.mark.parametrize(
    "argument",
    [
        "+callbacks.lr._target_=lightning.pytorch.callbacks.LearningRateMonitor",
        "+trainer.deterministic=true",
        "+optimizer.amsgrad=true",
        "+reward.mine={_target_:a.B,weight:1.0}",
        "+objective.more=1",
        "+hydra.job.env_set.A=b",
    ],
)
def test_plus_adds_what_is_passed_on(argument: str) -> None:
    with ConfigTree() as tree:
        tree.jobs([argument], multirun=False)


def test_key_at_the_root_of_a_file_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    for name, text in {"mine": "# @package _global_\niteration: 3\n", "bare": "iterations: 3\n"}.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text, encoding="utf-8")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        with pytest.raises(UserError, match="the key iteration in a file of your own is invalid"):
            tree.jobs(["experiment=mine"], multirun=False)
        with pytest.raises(UserError, match="experiment=bare is invalid: .*`# @package _global_`"):
            tree.jobs(["experiment=bare"], multirun=False)


def test_word_that_is_no_assignment_is_answered_with_the_group_it_belongs_to() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="Did you mean task=audit?"):
        tree.parse(["audit"])


def test_several_rewards_are_composed_side_by_side_with_weights() -> None:
    cfg = compose("reward=[pickscore,hpsv2]", "reward.hpsv2.weight=0.5", "model=flux1")
    Run.of(cfg)
    assert {name: member["weight"] for name, member in Run.of(cfg).reward.members.items()} == {
        "pickscore": 1.0,
        "hpsv2": 0.5,
    }
    assert cfg.callbacks.summary.hparams.reward == "pickscore+hpsv2"


PRESETS = itertools.product(("flux1", "sd3", "sana"), ("imagereward", "clipscore", "pickscore", "hpsv2"))


@pytest.mark.parametrize(
    ("model", "reward", "family"),
    [(*preset, family) for preset, family in zip(PRESETS, itertools.cycle(options("family")))],
)
def test_every_preset_of_the_paper_composes(model: str, reward: str, family: str) -> None:
    """3 models x 4 rewards, each with one of the families; the numbers are those of the published presets."""
    published = {"flux1": (512, "dpm2", 0.4, 12), "sd3": (1024, "dpm2", 0.6, 4), "sana": (1024, "euler", 0.6, 16)}
    cfg = compose(f"model={model}", f"family={family}", f"reward={reward}")
    Run.of(cfg)
    own = cfg.model
    assert (own.resolution, own.solver, own.train_timestep_fraction, own.micro_batch) == published[model]
    assert (cfg.optimizer.lr, own.lora.rank, own.lora.alpha) == (3e-4, 32, 64)
    assert list(Run.of(cfg).reward.members) == [reward]
    assert cfg.family.regenerate.steps == 10


@pytest.mark.parametrize("model", options("model"))
def test_model_says_how_often_its_proxy_is_probed(model: str) -> None:
    cfg = compose(f"model={model}")
    assert cfg.callbacks.rank_correlation.probe_every == cfg.model.probe_every == (4 if model == "tiny" else 20)
