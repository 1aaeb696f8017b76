"""The configuration tree: every shipped file composes, names existing code, and is documented; checks of values."""

import functools
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

import solrl_lightning.conf
from solrl_lightning.cli import config
from solrl_lightning.cli.config import ConfigTree, application_config, check_choices, check_names
from solrl_lightning.errors import UserError
from solrl_lightning.options.run import Run

CONF = Path(str(solrl_lightning.conf.__file__)).parent
REPOSITORY = Path(__file__).parents[2]
GROUPS = "task model reward family objective explorers scheduler precision data trainer logger callbacks".split()
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
    return [option for folder, option in OPTIONS if folder == group]


def targets(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for value in node.values():
            yield from targets(value)


ALONE = """
import sys
from omegaconf import OmegaConf
from solrl_lightning.cli.config import ConfigTree

with ConfigTree() as tree:
    print(*(OmegaConf.to_yaml(tree.compose(line.split())) for line in sys.argv[1:]))
"""


def test_hydra_composes_what_the_suite_keeps_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        "model=flux1 family=race reward=[pickscore,hpsv2] reward.hpsv2.weight=0 seed=3",
        "experiment=smoke logger=[csv,tensorboard] callbacks=early_stopping ~callbacks.sample_grid +objective.own=1",
        "task=audit model=flux1 objective=flow_grpo family=prefix seed=4",
    )
    alone = subprocess.check_output([sys.executable, "-c", ALONE, *lines], text=True)
    for _ in range(2):  # composed, then kept
        with ConfigTree() as tree:
            print(*(OmegaConf.to_yaml(tree.compose(line.split())) for line in lines))
        assert capsys.readouterr().out == alone


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_shipped_option_has_valid_values_and_existing_targets(group: str, option: str) -> None:
    needs = {"fsdp": ["family=prefix", "callbacks.sample_grid.every=0"], "generate": ["task.prompts=[a]"]}
    cfg = compose(f"{group}={option}", *needs.get(option, []))
    Run.of(cfg)
    values = OmegaConf.to_container(cfg)
    assert isinstance(values, dict)
    if group == "task":
        inspect.signature(get_object(values["task"]["_target_"])).bind(values)
    elif group in values:
        for node in targets(values[group]):
            ours = {"weight"} if group == "reward" else set()  # for the sum, not for the reward
            keys = {key: value for key, value in node.items() if not key.startswith("_") and key not in ours}
            inspect.signature(get_object(node["_target_"])).bind_partial(**keys)


def test_groups_and_names_of_the_contract_exist() -> None:
    with ConfigTree() as tree:
        assert set(tree.groups()) == {*GROUPS, "experiment"}
    published = {"diffusionnft", "naive_scaling", "compile", "naive_quant", "sol_rl"}
    assert set(options("family")) == published | {"prefix", "race"}
    assert set(options("scheduler")) == {"constant", "linear", "cosine"}


def test_package_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CONFIG_MODULE", "solrl_lightning.nowhere")
    with pytest.raises(UserError, match="is not installed: .*Run pip install -e"):
        ConfigTree()


def test_common_knobs_are_settable_by_their_names() -> None:
    knobs = """seed=7 iterations=3 prompts_per_iteration=5 family.pool=48 family.keep=12 family.explore.steps=4
    family.regenerate.steps=8 model.pretrained=some/folder data.train=shapes-eval data.eval=shapes-train""".split()
    cfg = compose(*knobs)
    assert [f"{key}={OmegaConf.select(cfg, key)}" for key, _, _ in (knob.partition("=") for knob in knobs)] == knobs


def test_published_hyperparameters_are_the_defaults() -> None:
    cfg = compose()
    assert (cfg.model.lora.rank, cfg.model.lora.alpha) == (32, 64)
    assert (cfg.optimizer.weight_decay, cfg.optimizer.eps) == (1e-4, 1e-8)
    assert (cfg.objective.beta, cfg.objective.advantage_clip) == (1.0, 5.0)
    assert (cfg.family.explore.steps, cfg.family.regenerate.steps, cfg.model.train_timestep_fraction) == (4, 10, 0.2)
    assert cfg.trainer.gradient_clip_val == cfg.model.max_grad_norm == 1.0
    assert cfg.old_policy.decay_type == 1
    assert cfg.seed == 42


DISTILLED = {"flux2_klein", "z_image_turbo", "qwen_image_lightning"}  # with their few steps; nothing is published


@pytest.mark.parametrize("model", sorted({*options("model")} - DISTILLED))
def test_published_experiment_has_the_published_hyperparameters_on_every_model(model: str) -> None:
    cfg = compose(f"model={model}", "experiment=published")
    assert (cfg.optimizer.lr, list(cfg.optimizer.betas), cfg.optimizer.weight_decay) == (3e-4, [0.9, 0.999], 1e-4)
    assert (cfg.objective.beta, cfg.objective.kl_weight, cfg.objective.advantage_clip) == (1.0, 1e-4, 5.0)
    assert (cfg.scheduler._target_.rpartition(".")[2], cfg.scheduler.warmup) == ("constant", 0)
    assert (cfg.old_policy.decay_type, cfg.optimizer_steps) == (1, 1)
    assert (cfg.prompts_per_iteration, cfg.family.pool, cfg.family.keep) == (48, 96, 24)
    assert (cfg.family.explore.steps, cfg.family.regenerate.steps) == (6, 10)
    assert (cfg.model.lora.rank, cfg.model.lora.alpha) == (32, 64)
    assert cfg.callbacks.rank_correlation.probe_every == cfg.model.probe_every == (12 if model == "tiny" else 20)


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
    cfg = compose(f"family={family}")
    assert cfg.callbacks.summary.hparams.family == family
    settings = cfg.family
    stages = [stage for stage in (settings.explore, settings.regenerate) if stage is not None]
    assert (settings.pool, settings.keep, settings.explore is not None) == (pool, 24, explores)
    assert {stage.sampler for stage in stages} == samplers
    assert (settings.warning is not None) == (family == "naive_quant")


def test_every_configuration_file_opens_with_what_it_is() -> None:
    for file in CONF.rglob("*.yaml"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line != "# @package _global_"]
        assert lines[0].startswith("# "), file


def test_every_experiment_names_the_command_that_runs_it() -> None:
    for option in options("experiment"):
        text = (CONF / "experiment" / f"{option}.yaml").read_text(encoding="utf-8")
        assert re.search(rf"^#   python -m solrl_lightning .*experiment={option}$", text, re.MULTILINE), option


def test_every_package_of_the_repository_is_installed() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^packages = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    folders = {file.parent.relative_to(REPOSITORY) for file in REPOSITORY.glob("solrl_lightning/**/__init__.py")}
    packages = {".".join(folder.parts) for folder in folders} | {"solrl_lightning.callbacks", "solrl_lightning.conf"}
    assert set(re.findall(r'"(.+?)"', listed[1])) == packages


@pytest.mark.parametrize(
    ("experiment", "families", "settings"),
    [
        ("selection", "sol_rl diffusionnft", (36, None, 9, 4)),
        ("time_to_reward", "diffusionnft naive_scaling compile naive_quant sol_rl prefix race", (100000, 240, 2, 4)),
    ],
)
def test_experiment_sweeps_families_with_equal_settings_over_three_seeds(
    experiment: str, families: str, settings: tuple[int, float | None, int, int]
) -> None:
    with ConfigTree() as tree:
        jobs = tree.jobs([f"experiment={experiment}"], multirun=True)
    pairs = {(cfg.hydra.runtime.choices.family, cfg.seed) for cfg in jobs}
    assert pairs == set(itertools.product(families.split(), (1, 2, 3)))
    keys = "iterations", "max_seconds", "evaluation.every", "prompts_per_iteration"
    assert {tuple(OmegaConf.select(cfg, key) for key in keys) for cfg in jobs} == {settings}


@pytest.mark.parametrize(
    "arguments",
    [
        ["objective=flow_grpo,dance_grpo", "objective.clip_range=0.1"],
        ["reward=shapes_strict,[shapes_strict,shapes]", "reward.shapes_strict.weight=2"],
        ["family=prefix,race", "family.explore.steps=4", "seed=1,2"],
    ],
)
def test_jobs_of_a_sweep_may_set_keys_that_all_choices_have(arguments: list[str]) -> None:
    with ConfigTree() as tree:
        jobs = tree.jobs(arguments, multirun=True)
        key, _, value = arguments[1].partition("=")
        assert len(jobs) == 2 ** sum("," in argument for argument in arguments)
        assert all(OmegaConf.select(job, key) == float(value) for job in jobs)
        with pytest.raises(UserError, match="gives several values. Add -m for a run of each"):
            tree.jobs(arguments, multirun=False)
        with pytest.raises(UserError, match="There is no key objective.clip_range with objective=nft"):
            tree.jobs(["objective=flow_grpo,nft", "objective.clip_range=0.1"], multirun=True)


# Names


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("famly=sol_rl", "Did you mean family?"),
        ("family=sol-rl", "Did you mean family=sol_rl?"),
        ("family.explor.steps=4", "Did you mean family.explore.steps"),
        ("explore.steps=4", "Did you mean family.explore.steps"),
        ("lr=1e-3", "Did you mean optimizer.lr? --help"),
        ("model=flux1 model.guidance_scale=4.5", "Did you mean model.guidance? These have it: model=flux2, "),
        ("hydra.run.dirr=x", "Did you mean hydra.run.dir?"),
        ("xyzzy=1", "There is no key xyzzy. --help"),
        ("experiment=smoke.yaml xyzzy=1", "There is no key xyzzy. --help"),  # Hydra takes the ending
        ("task.memory_gb=24", "with task=train, as no task is chosen, which has none. Choose one of audit, "),
        ("task=plan task.memory_gb=24", "There is no key task.memory_gb. task has devices, "),
        ("family=prefix family.explore.nope=2", "There is no key family.explore.nope. family.explore has sampler, "),
        ("callbacks.nope.x=1", "no key callbacks.nope.x. callbacks has timings, "),
        ("family=zzz", "compile, diffusionnft, naive_quant, naive_scaling, "),
        (
            "family=diffusionnft family.explore.steps=4",
            "with family=diffusionnft. These have it: family=prefix, family=race, ",
        ),
        ("callbacks.checkpoint.verbose=true", "Write +callbacks.checkpoint.verbose=<value> if solrl_lightning."),
        ("reward=vlm reward.vlm.answers=[yes]", "must be keys with values. Write 'reward.vlm.answers={<key>: <value>"),
        (
            "reward=vlm reward.vlm.answers={good:1,no:0}",
            "has yes, no and no good. Replace it by ~reward.vlm.answers '+reward.vlm.answers={good:1,no:0}'.",
        ),
        ("~callbacks.ema +callbacks.ema._target_=x data.eval_promts=2", "Did you mean data.eval_prompts?"),
        ("~callbacks.guard +callbacks.guard._target_=x callbacks.guard.stop=1 a=1", "There is no key a. "),
        ("~callbacks.guard callbacks.guard.stop=true", "~callbacks.guard deletes it. Leave one of them out."),
        ("hydra.job.env_set={A:1}", "hydra.job.env_set has no keys and no A. Add +hydra.job.env_set.A=<value>."),
        ("optimizer.betas={a:1}", "betas={a:1} is invalid: it must be a list. Write 'optimizer.betas=[<value>"),
    ],
)
def test_unknown_name_error_names_the_nearest_or_all(argument: str, message: str) -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match=re.escape(message)):
        check_names(tree, argument.split())


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ("family.explore.stop_below=0.5", "++family.explore.stop_below=0.5"),
        ("family.explore.steps=5 model.data.images=3", "family.explore.steps=5 model.data.images=3"),
        ("family=prefix family.explore.stop_below=0.5", "family=prefix family.explore.stop_below=0.5"),
        ("family=prefix,sol_rl family.explore.stop_after=1,2", "family=prefix,sol_rl ++family.explore.stop_after=1,2"),
        ("+family.explore.stop_below=0.5", "+family.explore.stop_below=0.5"),
        *[(each, each) for each in ("family.explore.name=x", "family.explore.stop=1", "model.guidance_scale=4.5")],
        ("family=diffusionnft family.explore.decoder=full", "family=diffusionnft family.explore.decoder=full"),
    ],
)
def test_option_with_a_default_needs_no_key_in_a_file(arguments: str, added: str) -> None:
    with ConfigTree() as tree:
        assert tree.completed(arguments.split()) == added.split()


def test_the_home_folder_is_known_in_files_and_in_every_quoted_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/o'neill")
    (tmp_path / "reward").mkdir()
    text = "defaults: [shapes]\nshapes: {other: {files: [~/a, a~/b]}, detector: ~/c}"
    (tmp_path / "reward" / "mine.yaml").write_text(text)
    arguments = ["hydra.sweep.dir='~/x'", 'data.train="~/a.txt","~/b.txt"', "+task.files=[a, '~/c', 'a ~/d']"]
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        at_home = tree.completed(arguments)
        cfg = application_config(tree.compose(["reward=mine"]), tmp_path)
    home = "/home/o'neill"
    escaped = home.replace("'", r"\'")
    tables = f'data.train="{home}/a.txt","{home}/b.txt"'
    assert at_home == [f"hydra.sweep.dir='{escaped}/x'", tables, f"+task.files=[a, '{escaped}/c', 'a ~/d']"]
    shapes = Run.of(cfg).reward.members["shapes"]
    assert shapes["other"] == {"files": [f"{home}/a", "a~/b"]} and shapes["detector"] == f"{home}/c"


@pytest.mark.parametrize("argument", ["+experiment=fast", "++reward=shapes", "+seed=1", "+run_dir=x"])
def test_plus_replaces_no_option(argument: str) -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match=rf"{argument.lstrip('+')}\.$"):
        tree.compose([argument])


def test_a_file_with_the_name_of_a_packaged_option_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "race.yaml").write_text("pool: 8")
    with pytest.raises(UserError, match="family/race.yaml is invalid: the package has a file of that name"):
        ConfigTree(config_dir=str(tmp_path))
    (tmp_path / "family" / "race.yaml").rename(tmp_path / "config.yaml")  # as the record of a run has
    with pytest.raises(UserError, match="config.yaml is invalid: the package has a file of that name"):
        ConfigTree(config_dir=str(tmp_path))
    with ConfigTree(config_dir=str(Path(__file__).parents[2] / "conf")):
        pass


def test_two_rewards_whose_files_have_one_key_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "reward").mkdir()
    for name, key in (("soft", "shapes"), ("hard", "hard")):
        entry = f"{key}:\n  _target_: solrl_lightning.rewards.shapes.ShapesStrict\n  weight: 2.0\n"
        (tmp_path / "reward" / f"{name}.yaml").write_text(f"# @package reward\n{entry}")
    with ConfigTree(str(tmp_path)) as tree:
        for both in ("[shapes,soft]", "[soft,hard,shapes]"):
            with pytest.raises(UserError, match=r"two of their files have the key shapes, and would be one reward"):
                tree.jobs([f"reward={both}"], multirun=False)
        (cfg,) = tree.jobs(["reward=[soft,hard]"], multirun=False)
        assert set(cfg.reward) == {"pretrained", "combine", "shapes", "hard"}


def test_a_folder_of_options_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--config-dir={tmp_path}/mine is invalid: .* no such folder"):
        ConfigTree(config_dir=f"{tmp_path}/mine")


def test_error_of_a_key_that_nothing_takes_suggests_no_plus() -> None:
    for argument in ("family.pol=3", "task.x=1", "iterationss=2"):
        with ConfigTree() as tree, pytest.raises(UserError) as error:
            check_names(tree, [argument])
        assert "+" not in str(error.value)


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


def test_known_names_and_plus_with_what_is_passed_on_are_accepted() -> None:
    arguments = """family=compile family.pool=48 ~callbacks.progress +trainer.profiler=simple +optimizer.amsgrad=true
    +callbacks.lr._target_=lightning.pytorch.callbacks.LearningRateMonitor +reward.mine={_target_:a.B,weight:1.0}
    +objective.more=1 +hydra.job.env_set.A=b""".split()
    with ConfigTree() as tree:
        check_names(tree, arguments)
        tree.jobs(arguments, multirun=False)


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("iteration: 3", "iteration is neither a group nor a key of the configuration, .* Did you mean iterations"),
        ("family: race", "an option is chosen in the defaults list. Write `- override /family: race` there."),
        ("optimizer.lr: 0.1", "dots are for command lines. Write `optimizer: {lr: 0.1}` there."),
        ("hydra.run.dir: a", "dots are for command lines. Write `hydra: {run: {dir: a}}` there."),
        ("run_dir: a", "the program sets that key. Leave it out; hydra.run.dir=<folder> is the folder of a run."),
        ("ckpt: last", "a run begins with it. Write ckpt=<file> on the command line."),
    ],
)
def test_error_names_a_key_at_the_root_of_a_file(tmp_path: Path, line: str, rule: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{line}\n", encoding="utf-8")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        with pytest.raises(UserError, match=f"^{line} in a file of your own is invalid: {rule}"):
            tree.jobs(["experiment=mine"], multirun=False)


def test_a_file_that_hydra_would_tell_in_its_words_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("defaults:\n  - override /family: race\n", encoding="utf-8")  # which Hydra reports in its words
    with pytest.raises(UserError, match="mine.yaml is invalid: .*`# @package _global_`[.]$"):
        ConfigTree(config_dir=str(tmp_path))
    file.write_text("# @package _global_\niterations: 3\n", encoding="utf-8-sig")
    with pytest.raises(UserError, match="mine.yaml is invalid: .* with a byte order mark. Save it as UTF-8 without."):
        ConfigTree(config_dir=str(tmp_path))


def test_error_of_a_bare_word_names_its_group() -> None:
    with ConfigTree() as tree, pytest.raises(UserError, match="Did you mean task=audit?"):
        tree.parse(["audit"])


def test_several_rewards_are_composed_side_by_side_with_weights() -> None:
    cfg = compose("reward=[pickscore,hpsv2]", "reward.hpsv2.weight=0.5", "model=flux1")
    weights = {name: member["weight"] for name, member in Run.of(cfg).reward.members.items()}
    assert weights == {"pickscore": 1.0, "hpsv2": 0.5}
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
    options = cfg.model
    assert (options.resolution, options.solver, options.train_timestep_fraction, options.micro_batch) == published[
        model
    ]
    assert (cfg.optimizer.lr, options.lora.rank, options.lora.alpha) == (3e-4, 32, 64)
    assert list(Run.of(cfg).reward.members) == [reward]
    assert cfg.family.regenerate.steps == 10


@pytest.mark.parametrize("line", ["/family: race", "family: race", "override family: race"])
def test_a_family_in_the_defaults_of_an_experiment_needs_an_override_with_a_slash(tmp_path: Path, line: str) -> None:
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"# @package _global_\ndefaults: [{{{line}}}]\n")
    fix = r"In the defaults list of an experiment write `- override /family: <option>`\."
    with ConfigTree(config_dir=str(tmp_path)) as tree, pytest.raises(UserError) as error:
        tree.compose(["experiment=mine"])
    assert re.fullmatch(rf"[^.]+\.( No match in the defaults list\.)? {fix}", str(error.value))
    file.write_text("# @package _global_\ndefaults: [{override /family: race}]\n")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        assert tree.compose(["experiment=mine"]).hydra.runtime.choices.family == "race"


def test_deleting_the_option_that_a_file_chooses_has_advice(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [{override /logger: [csv]}]\n")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        with pytest.raises(UserError, match=r"a file of your own chooses it. Choose one with .*, as in logger=none\."):
            tree.compose(["experiment=mine", "~logger"])
        assert "logger" not in tree.compose(["~logger"]) and tree.compose(["experiment=mine", "logger=none"])


@pytest.mark.parametrize("group", ["reward", "objective", "callbacks", "old_policy"])
def test_a_group_with_nothing_below_it_is_an_error(tmp_path: Path, group: str) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{group}:\n")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        with pytest.raises(UserError, match=f"{group}=null is invalid: it must be a group of keys. Leave it out for"):
            check_choices(tree.compose(["experiment=mine"]))
        check_choices(tree.compose([]))


def test_defaults_that_include_themselves_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [/experiment: smoke]\n")
    with ConfigTree(config_dir=str(tmp_path)) as tree, pytest.raises(UserError, match="includes itself. Name a file"):
        tree.compose(["experiment=mine"])
