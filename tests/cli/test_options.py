"""The typed configuration: one wrong value of each kind, and the message that names its key, value, rule and fix."""

import ast
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from solrl_lightning import names
from solrl_lightning.cli.checks import check_machine, options_of
from solrl_lightning.cli.config import ConfigTree, application_config
from solrl_lightning.errors import UserError
from solrl_lightning.options import data, family, model, precision, reward, run, task
from solrl_lightning.options.rules import Positive, is_whole
from solrl_lightning.options.run import Run
from solrl_lightning.rewards.weighted import COMBINATIONS
from solrl_lightning.sampling import SOLVERS
from solrl_lightning.targets import check_arguments

Compose = Callable[..., Run]

# A command line, and a part of its message after the key and the value of the first argument (or of what it breaks).
WRONG = """
seed=-1                          | it must be a whole number from 0 to 4294967295. Leave it out
seed=true                        | seed=true is invalid: it must be a whole number
iterations=0                     | it must be a whole number from 1 to 100000000. Leave it out
iterations=null                  | iterations=null is invalid: it must be a whole number from 1 to
family.pool=100001               | it must be a whole number from 1 to 100000
optimizer.eps=1e-50              | it must be a finite number of at least 1e-30, as float32
objective.kl_weight=-0.1         | it must be a finite number of at least 0
objective=awm objective.ratio_clip=-1 | objective.ratio_clip=-1 is invalid: it must be a finite number above 0
scheduler._target_=solrl_lightning.training.schedules.ema_decay | keys beside _target_, which lack step, and must
scheduler._target_=collections.Counter | keys beside _target_ and must return a function of the iterations done. Write
scheduler._target_=builtins.dict | scheduler: builtins.dict could not be made: no signature found
model=sd3 model.guidance_scale=0.5 | model.guidance_scale=0.5 is invalid: it must be a finite number of at least
model.train_timestep_fraction=1.5 | it must be a fraction above 0 and at most 1
model.lora.alpha=1e300           | model.lora.alpha=1e+300 is invalid: it must be a number above 0 and at most 1000000
model.solver=heun                | it must be one of euler, dpm2. Leave it out for the default.
model.gradient_checkpointing=1   | it must be one of true, false, selective, auto
trainer.accelerator=tpus         | it must be one of auto, cpu, gpu
trainer.devices=[0,0]            | trainer.devices=[0, 0] is invalid: it must be auto, a number of devices
trainer.default_root_dir=/tmp/x  | it must be run, which the program relies on. Leave it out; 
+trainer.default_root_dir=x      | +trainer.default_root_dir=x is invalid: trainer.default_root_dir is there, and
+callbacks.best.dirpath=x seed=1 | Write callbacks.best.dirpath=x.
+seed=1                          | Write seed=1.
trainer.precision=16-mixed       | it must be 32-true, as every dtype is set in the code
trainer.strategy=deepspeed       | Use trainer.strategy=ddp
+trainer.check_val_every_n_epoch=5 | Set evaluation.every=<iterations>
+trainer.limit_train_batches=1   | trainer.limit_train_batches=1 is invalid: it must be 1.0
trainer.accumulate_grad_batches=2 | or set model.micro_batch=<rows>
trainer.overfit_batches=1        | trainer.overfit_batches=1 is invalid: it must be 0.0. An iteration takes
trainer.fast_dev_run=true        | or use experiment=smoke.
trainer.val_check_interval=0.5   | Set evaluation.every=<iterations> instead.
trainer.logger=false             | trainer.logger=false is invalid: the program makes it of the group logger. Choose one
logger=mlflow +logger.mlflow.log_model=all | log_model=all is invalid: it must be false, which the
+trainer.callbacks=[]            | remove one with ~callbacks.<name>.
+trainer.enable_progress_bar=false | Leave it out, or remove the bar with ~callbacks.progress.
+trainer.enable_checkpointing=false | Leave it out: a run resumes by its checkpoint.
+trainer.max_steps=3             | trainer.max_steps=3 is invalid: it must be -1. Set iterations=<number> instead.
+trainer.max_time=00:00:01:00    | it must be null. Set max_seconds=<seconds> instead.
trainer.max_epochs=5             | Leave it out; iterations=<number>
~trainer.max_epochs              | trainer.max_epochs=null is invalid
precision.backend=foo            | with precision=auto it must be one of auto, torch, transformer_engine, emulated
callbacks.guard.stop=5           | it must be true or false
callbacks.guard.limits=null      | it must be a group of keys
+callbacks.guard.limits.jump=5   | nothing reads that key. The keys here are fall, diversity, kl, drift.
explorers.count=2                | explorers=none has 0 and no other option, explorers=ray at least 1. Use explorers=ray
explorers=ray family=diffusionnft | it needs a family that explores, and another trainer
explorers=ray trainer=fsdp family=prefix ~callbacks.sample_grid | another trainer than fsdp, which explores
explorers=ray explorers.precision=fp9 | precision=fp9 is invalid: it must be one of auto, nvfp4, fp8, int8, bf16
~callbacks                       | ~callbacks is invalid: training needs the callbacks requant
~callbacks.requantize            | ~callbacks.requantize is invalid: training needs
+callbacks.mine={every:5}        | Leave it out with ~callbacks.mine, also where an experiment sets keys of it, or
+objective.more=1                | objective.more=1 is invalid: nothing reads that key. NFT takes beta, advantage_clip
callbacks.best.monitor=nothing   | it must be one of the run's rewards, shapes, or null
optimizer.lr="0.005"             | it must be a finite number above 0. A text is no number. Write it without quotes
optimizer.lr="1e-4"              | it must be a finite number above 0. A text is no number. Write it without quotes
iterations="5"                   | A text is no number. Write it without quotes
optimizer.lr="-0.005"            | it must be a finite number above 0. Leave it out for the default
data.column=5                    | it must be a text; a number needs quotes
model.lora.target_modules=to_q   | it must be a list
model.lora.target_modules=[1]    | model.lora.target_modules.0=1 is invalid: it must be a text
~model.lora                      | model.lora is missing: a run needs it. Add it with +model.lora=<value>, or
+evaluation.ever=5               | evaluation.ever=5 is invalid: nothing reads that key. Did you mean every?
+model.ful_steps=8               | reads that key, and it resembles one. Did you mean full_steps? If it is a key of your
reward.combine=mean              | it must be one of sum, gdpo
+logger._target_=a.B             | logger._target_=a.B is invalid: it must be a group of keys with a _target_
+reward.clipscore.weight=0       | Choose it, too, with reward=[...,clipscore], or leave its keys out with ~reward.clips
reward.shapes=0.5                | it must have a _target_ and a weight. Set reward.shapes.weight=0.5.
+reward.b={target:m.B,weight:1}   | it must have a _target_ and a weight. Write _target_ in place of target.
+reward.mean={_target_:a.B,weight:1} | a metric or key has that name. Choose another name for the reward.
+reward.prompt={_target_:a.B,weight:1} | a metric or key has that name. Choose another name for the reward.
reward.shapes.weight=null        | 0 for a reward that is only evaluated. Set reward.shapes.weight=1.
reward=http reward.http.url=ftp://scorer | reward.http.url=ftp://scorer is invalid: it must begin with http:// or
reward=http reward.http.url=http://scorer: | a host and, if any, the number of its port
reward=vlm reward.vlm.url=localhost:8001/v1 | Set reward.vlm.url=http://<host>:<port>/<path>, and
reward=vlm reward.vlm.answers={yes:1,no:1} | it must be two or more words or whole numbers that differ not only
reward=vlm ++reward.vlm.answers={50%:1,0%:0} | it must be two or more words or whole numbers
reward=vlm ++reward.vlm.answers={yes:1,Yes:0} | by ~reward.vlm.answers '+reward.vlm.answers={good:1,bad:0}'; in a
reward=vlm ++reward.vlm.answers={true:1,false:0} | in a file, yes and no need quotes
reward.pretrained=x              | it is for one reward that is loaded from files; got shapes. Leave it out.
reward=[pickscore,hpsv2] reward.pretrained=x/y | Set reward.pickscore.pretrained or reward.hpsv2.pretrained
reward.shapes.weight=0           | a run needs a reward with a weight other than 0
family.keep=1                    | it must be a whole number of at least 2: the best and the worst of a prompt
family.pool=10                   | family.keep=24 is invalid: it must be at most family.pool=10. Raise
task=audit task.pool=12          | task.keep=24 is invalid: it must be at most task.pool=12
optimizer.betas=[0.9,1]          | it must be a list of two numbers of at least 0 and below 1
family=race family.keep=4 family.explore.rungs=[{step:3,keep:24}] | Set it so, or leave family.pool and family.keep out.
optimizer_steps=25               | it must be at most family.keep=24
objective=dance_grpo family.keep=2 | of every prompt. Set optimizer_steps=2 or raise family.keep.
family=prefix family.explore.steps=3 | below family.explore.steps=3. Lower it (by default model.prefix_steps) or raise
objective=flow_grpo objective.window=1 model.full_steps=1 | family.regenerate.steps=1 is invalid: objective=FlowGRPO
objective=dance_grpo model.full_steps=1 | trains on the steps before the last one. Set model.full_steps=2, or
objective=flow_grpo objective.window=6 | objective.window=6 is invalid: it must be at most 5, half of family.regen
base_weights=int8 family.compile=true | with family.compile=true it must be bfloat16, as torch.compile does not
family.explore.stop_after=6      | family.explore.stop_after=6 is invalid: it must be at least 1 and below family.ex
family=prefix family.explore.stop_below=0.7 | stop_below=0.7 is invalid: family.explore.stop_after=4 stops the same
family=race family.explore.stop_after=2 | family.explore.stop_after=2 stops the same trajectories. Set
family=race family.explore.stop_below=.5 | or family.explore.rungs=null.
family.explore.stop_below=1       | it must be a noise level above 0 and below 1
++family.regenerate.stop_below=0.7 | nothing reads that key. The keys here are sampler, steps,
family.explore.decoder=preview   | it needs a tiny autoencoder of this model's latents
task=audit task.proxies=[]       | task.proxies=[] is invalid: it must be a list with at least one
task=audit task.proxies=[{sampler:shadows,steps:2}] | proxies.0.sampler=shadows is invalid: it must be one of shadow
task=audit task.proxies=[{sampler:merged,steps:2,stop_after:2}] | task.proxies.0.stop_after=2 is invalid
task=audit task.proxies=[{sampler:shadow}] | task.proxies.0.steps is missing: a run needs it. Add it.
task=generate                    | task.prompt_file=<file>; got neither
task=generate task.prompts=5     | task.prompts=5 is invalid: it must be a list of texts that are not empty. Give
task=generate task.prompts=['']  | task.prompts=[''] is invalid: it must be a list of texts that are not empty
task=generate task.prompts=[a] task.seeds=[1,1] | it must be a list of different whole numbers
task=generate task.prompts=[a] task.prompt_file=b | got both
task=generate task.prompts=[a] task.seeds=[-1] | task.seeds=[-1] is invalid
task=export ckpt=a task.push=lora | task.push=lora is invalid: it must be a hub id. Use task.push=<your account>
task=compare task.runs=[a,b]     | it must be one glob, in quotes, that matches all runs
task=serve task.port=70000       | it must be a whole number from 0 to 65535; 0 takes a free port
model.policy.decode_batch=[]     | it is model.decode_batch. Set model.decode_batch, which
model.scheduler.shift=9.0         | so it has no keys. All of them are set by model.scheduler={<key>:<value>,...}
model=sana model.flow_shift=0 | model.flow_shift=0 is invalid: it must be a number from 0.001 to 1000
model=wan model.num_frames=32 | model.num_frames=32 is invalid: it must be 1 more than a multiple of 4
model=wan model.frames=34 | a video has model.num_frames=33. Set model.frames=all.
trainer.devices=0               | it must be auto, a number of devices of at least 1, or a list of their indices
model=wan model.frames=last | it must be first, middle, all, or a whole number of at least 1
callbacks.checkpoint.dirpath=x  | run/checkpoints, which the program relies on
callbacks.best.dirpath=x        | run/checkpoints, which the program relies on
experiment=smoke model.rung_steps=[1,2,3] | two numbers of solver steps from 1 to 1000. Other rungs are family
family=race family.explore.rungs=[] | it must be a list of rungs such as 'family.explore.rungs=[{step:3,keep:48},
family=race family.explore.rungs=[{step:2,keep:x}] | .keep=x is invalid: it must be a whole number of at least 1. Co
family=race family.explore.rungs=[{step:2}] | family.explore.rungs.0.keep is missing
family=race family.explore.rungs=[{keep:24}] | rungs.0={keep:24} is invalid: it must have a step or below, a noise
family=race family.explore.rungs=[{step:4,below:0.7,keep:24}] | and not both. For example {step:4,keep:24} or {below:0.7
family=race family.explore.rungs=[{below:0.5,keep:60},{below:0.5,keep:24}] | below, under the one before it
family=race family.explore.rungs=[{below:0.7,keep:60},{step:3,keep:48}] | down to 24 in the last rung
family=race family.explore.rungs=[{step:4,keep:60},{step:2,keep:24}] | each with a step above the one before it
family=race family.explore.rungs=[{step:2,keep:24},{step:4,keep:36}] | a keep not above the one before it
family=race family.explore.rungs=[{step:2,keep:97},{step:4,keep:24}] | from the pool of 96
family=race family.explore.rungs=[{step:2,keep:60},{step:4,keep:23}] | down to 24 in the last rung
family=race family.explore.rungs=[{step:2,keep:60},{step:11,keep:24}] | up to 10
family=race family.explore.rungs=[{step:10,keep:24}] | its last rung ends with step 10, the last one
family=race family.regenerate.steps=20 | it resumes the trajectories of family.explore, which stops early with steps=10.
model.embeddings=                | model.embeddings='' is invalid: it must not be empty, as a shell variable is
data.train=                      | data.train='' is invalid: it must not be empty
trainer=fsdp                     | family.explore.sampler=shadow is invalid with trainer=fsdp
trainer=fsdp family=prefix       | Set callbacks.sample_grid.every=0
task=evaluate trainer=fsdp       | Set task=train, or trainer=auto
base_weights=int8 model.train=full family=prefix | model.train=full has no frozen weights
model.train=full family=prefix model.init_lora=a | model.train=full has no frozen weights and no LoRA
trainer=fsdp family=prefix callbacks.sample_grid.every=0 family.compile=true | Set family.compile=false
trainer=fsdp family=prefix callbacks.sample_grid.every=0 compile_training=true | Set compile_training=false
trainer=fsdp family=prefix callbacks.sample_grid.every=0 base_weights=int8 | Set base_weights=bfloat16
"""
KIND = "{_target_:solrl_lightning.callbacks"
WRONG += f"""+callbacks.b={KIND}.checkpoints.BestCheckpoint,monitor:y}} | callbacks.b.monitor=y is invalid
trainer=fsdp family=prefix callbacks.sample_grid=null +callbacks.g={KIND}.sample_grid.SampleGrid,every:6}} | g.every=0
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines(), ids=lambda line: line.split(" | ")[0].strip())
def test_error_of_a_wrong_value_states_its_rule(line: str) -> None:
    command, message = (part.strip() for part in line.split(" | "))
    with ConfigTree() as tree, pytest.raises(UserError) as error:
        check_machine(options_of(tree.compose(tree.completed(command.split())), "run"))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith((".", "?"))


@pytest.mark.parametrize(
    "arguments",
    [
        "trainer.precision=32 +trainer.max_steps=-1 trainer.deterministic=true trainer.gradient_clip_val=null",
        "~trainer.precision ~trainer.strategy +trainer.accumulate_grad_batches=1 +trainer.limit_train_batches=1.0",
        "trainer.strategy={_target_:lightning.pytorch.strategies.DDPStrategy} trainer.devices=auto",
        "task=evaluate ~callbacks ~logger",
        "task._target_=mine.task ~callbacks",
        "~callbacks.best callbacks.guard.limits.kl=null callbacks.sample_grid=null",
        "~callbacks.best +callbacks.best={_target_:lightning.pytorch.callbacks.ModelCheckpoint,monitor:eval/shapes}",
        "+callbacks.mine={_target_:mine.Mine,every:x} +optimizer.amsgrad=true",
        "family.pool=7 family.keep=7 optimizer.lr=1",
        "family=sol_rl +family.explore.rungs=[{step:3,keep:48},{step:4,keep:24}] ~family.explore.solver",
        "experiment=smoke family=race",
        "model.gradient_checkpointing=selective reward.combine=gdpo",
        "+model.own=3 task._target_=mine.task",
        "model=wan model.num_frames=5 model.frames=5",
        "reward=vlm ~reward.vlm.answers +reward.vlm.answers={good:1,bad:0}",  # as the error about answers says
    ],
)
def test_other_values_are_left_to_the_user(compose: Compose, arguments: str) -> None:
    compose(*arguments.split())


@pytest.mark.parametrize("words", ["early_stopping", "[default,early_stopping]"])
def test_early_stopping_is_added_to_the_default_callbacks(compose: Compose, words: str) -> None:
    assert list(compose(f"callbacks={words}").callbacks) == [*compose().callbacks, "early_stopping"]


def test_values_keep_their_types(compose: Compose) -> None:
    options = compose("optimizer.lr=1", "model.lora.alpha=64.0", "family.compile=false")
    values = options.optimizer["lr"], options.model.lora.alpha, options.family.compile, options.model.lora.rank
    assert [type(value) for value in values] == [int, float, bool, int]
    assert not is_whole(True) and not is_whole(1.0)


def test_options_hold_what_the_files_say() -> None:
    for arguments in (["reward=[shapes,http]", "family=race"], ["task=audit", "family=prefix"]):
        with ConfigTree() as tree:
            cfg = application_config(tree.compose(arguments), "run")
        tree = Run.of(cfg).tree()
        assert tree == OmegaConf.to_container(cfg)
        assert list(tree["reward"]) == list(cfg.reward)
        assert list(tree["callbacks"]) == list(cfg.callbacks)  # in which they are called


def test_names_are_those_of_the_code_that_implements_them() -> None:
    assert set(SOLVERS) == set(get_args(names.SolverName))
    assert set(COMBINATIONS) == set(get_args(names.Combination))


def test_every_key_of_a_group_has_a_sentence() -> None:
    for module in (data, family, model, precision, reward, run, task):
        for kind in ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body:
            is_group = isinstance(kind, ast.ClassDef) and "TypedDict" not in map(ast.unparse, kind.bases)
            for line, following in pairwise(kind.body) if is_group else ():
                if isinstance(line, ast.AnnAssign) and not ast.unparse(line.target).startswith("__"):
                    assert isinstance(following, ast.Expr), ast.unparse(line)


# A user's files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", 'A YAML file of your own is invalid: .*family/mine.yaml", line 2, column 2. Correct it.'),
        (
            "defaults: [override /logger: [csv], sol_rl]\n",
            "an override before another entry. Write overrides last.",
        ),
        ("defaults: sol_rl\n", "Invalid defaults list in 'family/mine', defaults must be a list"),
        ("- 8\n", r"family=\[8\] is invalid: it must be a group of keys"),
        ("pool: 8\n", r"family.keep is missing: .* begin with `defaults: \[<option>, _self_\]`"),
        ("defaults: [sol_rl, _self_]\nkep: 8\n", "family.kep=8 is invalid: nothing reads .* Did you mean keep"),
        ("defaults: [sol_rl, _self_]\nexplore: {step: 8}\n", "family.explore.step=8 is invalid: .* Did you mean steps"),
    ],
)
def test_error_of_a_wrong_file_names_the_fault(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "family").mkdir()
    (tmp_path / "family" / "mine.yaml").write_text(text)
    with ConfigTree(config_dir=str(tmp_path)) as tree, pytest.raises(UserError, match=message):
        options_of(tree.compose(["family=mine", "family.pool=96"] if "pool" in text else ["family=mine"]), "run")


OPTIONS = "task:evaluate model:tiny reward:shapes family:race trainer:ddp logger:csv callbacks:default".split()


@pytest.mark.parametrize("line", [*OPTIONS, "reward:[shapes,red]"])
def test_option_as_the_value_of_its_group_belongs_in_the_defaults_list(tmp_path: Path, line: str) -> None:
    (tmp_path / "experiment").mkdir()
    file, text = tmp_path / "experiment" / "mine.yaml", "# @package _global_\ndefaults: [smoke{}, _self_]\n{}\n"
    file.write_text(text.format("", line.replace(":", ": ")))
    with ConfigTree(config_dir=str(tmp_path)) as tree, pytest.raises(UserError, match=r"list.* `- override /") as error:
        tree.jobs(["experiment=mine"], multirun=False)
    if "[" not in line:
        advice = str(error.value).partition("`- ")[2].partition("`")[0]
        file.write_text(text.format(f", {advice}", ""))
        with ConfigTree(config_dir=str(tmp_path)) as tree:
            (cfg,) = tree.jobs(["experiment=mine"], multirun=False)
        group, _, option = line.partition(":")
        assert cfg.hydra.runtime.choices[group] == option


@pytest.mark.parametrize(
    "line", ["callbacks.guard.limits={}", "logger={}", "++reward={}", "+callbacks={}", "family.explore={}"]
)
def test_empty_mapping_over_keys_is_an_error(line: str) -> None:
    key = line.strip("+").removesuffix("={}")
    with ConfigTree() as tree:
        with pytest.raises(UserError, match=rf"is invalid: {key} has keys, .* one with {key}.<key>=null or ~"):
            tree.jobs([line], multirun=False)
        tree.jobs(["model.scheduler={}", f"~{key}"], multirun=False)


def capped(cap: Positive, weights: dict[str, float] | None = None) -> None:
    """A function of a user's own, one of whose arguments has no default."""


def test_value_of_a_class_of_one_s_own_must_have_the_annotated_type() -> None:
    node = {"_target_": f"{__name__}.capped", "cap": 1.0}
    check_arguments("objective", node | {"weights": {"red": 1.0}})
    for key, value, message in (
        ("cap", -1.0, r"objective.cap=-1.0 is invalid: .* above 0\. Correct it\.$"),  # it has no default
        ("weights", {"red": "high"}, "objective.weights.red=high is invalid: it must be a number"),
    ):
        with pytest.raises(UserError, match=message):
            check_arguments("objective", node | {key: value})


def test_model_file_may_have_more_keys(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nown: 3\nfull_steps: ${model.own}\n")
    with ConfigTree(config_dir=str(tmp_path)) as tree:
        options: Any = options_of(tree.compose(["model=mine", "experiment=smoke"]), "run")
        assert options.model.own == 3
