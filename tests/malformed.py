"""Command lines and files that cannot be meant: what test_faults.py gives to the program, all of it made here.

Every function yields (name, arguments). Files are written into a folder that the caller names; the arguments give them
by relative paths. Nothing is random: the same cases every time.
"""

import io
import itertools
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import parquet

Case = tuple[str, list[str]]

WHOLE = ("model.lora.rank", "model.micro_batch", "model.rollout_batch", "prompts_per_iteration", "data.eval_images")
WHOLE += (
    "iterations",
    "evaluation.every",
    "family.pool",
    "family.explore.steps",
    "model.full_steps",
    "model.decode_batch",
)
NOT_WHOLE = ("x", "0", "-3", "2.5", "nan", "true", "null", "[1]", "{a:1}", "''")
NUMBERS = ("optimizer.lr", "optimizer.weight_decay", "optimizer.eps", "objective.beta", "objective.kl_weight")
NUMBERS += ("model.guidance", "model.max_grad_norm", "model.train_timestep_fraction", "reward.shapes.weight")
NOT_NUMBERS = ("x", "-inf", "nan", "true", "[1.0]", "{a:1}")
TEXTS = (
    "data.train",
    "data.eval",
    "data.column",
    "model.pretrained",
    "model.variant",
    "model.solver",
    "precision.name",
)
TEXTS += ("precision.backend", "family.explore.sampler", "family.regenerate.solver", "family.explore.decoder")
NOT_TEXTS = ("[a,b]", "{a:b}")
OTHERS = (
    "model.lora.target_modules=to_q",
    "model.lora.target_modules=[]",
    "model.lora.target_modules=null",
    "model.lora.target_modules=[nothing_of_this_name]",
    "model.lora.target_modules=[1,2]",
    "model.lora.alpha=[64]",
    "model.dtypes.transformer=int8",
    "model.dtypes.default=float33",
    "model.dtypes=float32",
    "model.weights=mine",
    "model.resolution=31",
    "model.resolution=1",
    "model.max_sequence_length=0",
    "model.guidance=null",
    "model.gradient_checkpointing=maybe",
    "model.quantization.include=transformer_blocks",
    "model.quantization.exclude=[a]",
    "model.quantization=null",
    "model.lora=null",
    "model.policy=null",
    "model.policy._target_=nowhere.Policy",
    "model.preview_decoder=./nowhere",
    "model.preview_decoder=7",
    "model.embeddings=/dev/null/cache",
    "model.embeddings=[a]",
    "family.keep=1",
    "family.keep=97",
    "family.keep=2.0",
    "family.explore=5",
    "family.explore=text",
    "family.regenerate=null",
    "family.regenerate=[1]",
    "family.explore.sampler=old",
    "family.explore.solver=rk4",
    "family.regenerate.sampler=null",
    "family.compile=maybe",
    "family.compile=[true]",
    "+family.explore.stop_after=6",
    "+family.explore.stop_after=x",
    "+family.regenerate.stop_after=2",
    "family.explore.decoder=preview",
    "family.explore.decoder=tiny",
    "optimizer=null",
    "optimizer=sgd",
    "optimizer.betas=0.9",
    "optimizer.betas=[0.9]",
    "optimizer.betas=[2,0.9]",
    "optimizer.betas=[a,b]",
    "optimizer._target_=torch.optim.Nowhere",
    "optimizer._target_=7",
    "+optimizer.momentum=0.9",
    "old_policy.decay_type=9",
    "old_policy.decay_type=x",
    "old_policy.decay_type=3",
    "old_policy.slope=x",
    "old_policy=null",
    "objective.beta=0",
    "objective.advantage_clip=-1",
    "objective._target_=nowhere.loss",
    "+objective.typo=1",
    "precision.backend=cuda",
    "precision.name=fp3",
    "precision=fp3",
    "reward.shapes=null",
    "reward.shapes=5",
    "reward.shapes._target_=nowhere.Reward",
    "reward.shapes._target_=json.dumps",
    "+reward.shapes.dtype=float32",
    "reward.pretrained=x",
    "reward=[]",
    "reward=[shapes,nothing]",
    "reward={shapes:1}",
    "reward.weight=2",
    "task=trane",
    "task=[train,audit]",
    "task._target_=nowhere.task",
    "task._target_=json",
    "task.reads=[prompts]",
    "task.reads=train",
    "data.train=nowhere.txt",
    "data.train=.",
    "data.train=/dev/null",
    "data.train=''",
    "data.train=hf://a",
    "data.train=hf://a/b/c/d",
    "data.train=shapes-trian",
    "data.train=null",
    "data.train=shapes-eval",
    "data.eval=null",
    "data.eval_prompts=0",
    "data.eval_prompts=-1",
    "data.eval_prompts=x",
    "data.eval_prompts=1.5",
    "trainer.accelerator=abacus",
    "trainer.accelerator=gpu",
    "trainer.devices=0",
    "trainer.devices=-5",
    "trainer.devices=many",
    "trainer.devices=[7]",
    "trainer.num_nodes=0",
    "trainer.num_nodes=x",
    "trainer.strategy=teleport",
    "trainer.precision=64-false",
    "+trainer.typo=1",
    "trainer._target_=nowhere.Trainer",
    "trainer=null",
    "logger._target_=nowhere.Logger",
    "logger=tensorbord",
    "logger.save_dir=/dev/null/logs",
    "+logger.typo=1",
    "callbacks.checkpoint._target_=nowhere.Callback",
    "callbacks.checkpoint.every_n_epochs=x",
    "callbacks.checkpoint.save_top_k=-2",
    "callbacks.checkpoint.dirpath=/dev/null/checkpoints",
    "callbacks.sample_grid.every=x",
    "callbacks.sample_grid.every=-1",
    "callbacks.sample_grid.prompts=0",
    "callbacks.sample_grid.steps=0",
    "callbacks.sample_grid.typo=1",
    "+callbacks.sample_grid.typo=1",
    "callbacks.rank_correlation.probe_every=x",
    "callbacks.rank_correlation.probe_every=-2",
    "callbacks.reward_guard.patience=0",
    "callbacks.progress.max_lines=x",
    "callbacks.summary.hparams=7",
    "callbacks=null",
    "callbacks=5",
    "+callbacks.mine=7",
    "+callbacks.mine={}",
    "seed=-1",
    "seed=1.5",
    "seed=x",
    "seed=null",
    "seed=4294967296",
    "seed=99999999999999999999",
    "iterations=1e400",
    "run_dir=x",
    "hydra.run.dir=",
    "hydra.run.dir=/dev/null/run",
    "hydra.run.dir=[a]",
    "hydra.run.dir=null",
    "hydra.run=null",
    "hydra.job=null",
    "hydra.mode=SIDEWAYS",
    "hydra.output_subdir=[a]",
    "hydra/launcher=nowhere",
    "evaluation=null",
    "evaluation=3",
    "model.iterations=x",
    "model.data=null",
)
GRAMMAR = (
    "iterations",
    "=3",
    "=",
    "iterations==3",
    "iterations=[",
    "iterations=]",
    "iterations={",
    "data.train='a",
    'data.train="a',
    "data.train=a b=c",
    "data.train=(a",
    "data.train=a)",
    "data.train=$",
    "data.train=${",
    "data.train=${a",
    "data.train=\x07bell",
    "data.train=a\nb",
    "iterations=3\n",
    "data.train=\ud800",
    "дата.train=x",
    "data.train=файл.txt",
    "data.train=" + "x" * 5000,
    "x" * 5000 + "=1",
    "iterations.=3",
    ".iterations=3",
    "iterations..x=3",
    "iterations.x=3",
    "iterations=3;seed=1",
    "iterations: 3",
    "data.train=[[[[[[",
    "data.train={a:{b:{c:1}}",
    "''=1",
    "@family=sol_rl",
    "family@=sol_rl",
    "family@model=sol_rl",
    "family:=sol_rl",
    "/family=sol_rl",
    "family/sol_rl",
    "conf/family=sol_rl",
    "../family=sol_rl",
    "family=../model/tiny",
    "family=",
    "family=''",
    "family=5",
    "family=true",
    "family=null",
    "family=[sol_rl,compile]",
    "family={sol_rl:1}",
    "model=null",
    "reward=null",
    "objective=null",
    "precision=null",
    "task=null",
    "data=null",
    "experiment=nowhere",
)
PREFIXED = (
    "+iterations=3",
    "+family=sol_rl",
    "++family=sol_rl",
    "+",
    "~",
    "++",
    "~nothing",
    "~iterations",
    "~iterations=5",
    "~seed",
    "~model",
    "~reward",
    "~trainer",
    "~task",
    "~optimizer",
    "~data",
    "~objective",
    "~precision",
    "~family=sol_rl,compile",
    "~family.pool",
    "~model.policy",
    "~model.lora",
    "~model.solver",
    "~model.quantization",
    "~model.rollout_batch",
    "~optimizer.lr",
    "~family.explore",
    "~family.compile",
    "~family.regenerate",
    "~objective.kl_weight",
    "~reward.pretrained",
    "~reward.shapes.weight",
    "~evaluation",
    "~old_policy",
    "~ckpt",
    "~data.column",
    "~task.reads",
    "~precision.backend",
    "~callbacks.nothing",
    "~hydra.run.dir",
    "+nothing=1",
    "+model.nothing=1",
    "++model.policy.nothing=1",
    "+family.nothing=1",
    "+optimizer.nothing=1",
    "+old_policy.nothing=1",
    "+ckpt=x",
    "++ckpt=5",
)
MANY = (
    ["seed=${nothing}"],
    ["seed=${seed}"],
    ["seed=${iterations}", "iterations=${seed}"],
    ["seed=${oc.env:NOTHING_OF_THIS_NAME}"],
    ["seed=${nowhere:1}"],
    ["seed=${model}"],
    ["data.train=${now:}"],
    ["model.policy.resolution=${model.nothing}"],
    ["iterations=1,2"],
    ["iterations=range(1,4)"],
    ["iterations=choice(1,2)"],
    ["iterations=interval(1,2)"],
    ["iterations=glob(*)"],
    ["family=sol_rl,compile"],
    ["-m", "iterations=0,1"],
    ["-m", "family=glob(x*)"],
    ["-m", "iterations=interval(1,2)"],
    ["-m", "seed=range(1,1)"],
    ["-m", "ckpt=last"],
    ["-m", "family=sol_rl,nothing"],
    ["-m", "hydra.sweep.dir=/dev/null/sweep"],
    ["-m", "hydra/launcher=nowhere"],
    ["-m", "hydra/sweeper=nowhere", "seed=1,2"],
    ["-m", "family=choice()"],
    ["-m", "seed=1,2", "hydra.sweep.dir=null"],
    ["-m", "seed=1,2", "hydra.sweep.subdir=same"],
    ["ckpt="],
    ["ckpt=[a]"],
    ["ckpt={a:1}"],
    ["ckpt=true"],
    ["ckpt=5"],
    ["ckpt=first"],
    ["ckpt=best"],
    ["ckpt=LAST"],
    ["ckpt=."],
    ["ckpt=/"],
    ["ckpt=/dev/null"],
    ["ckpt=last", "hydra.run.dir=nowhere"],
    ["ckpt=last", "hydra.run.dir=old"],
    ["ckpt=old"],
    ["ckpt=old/.hydra/overrides.yaml"],
    ["ckpt=a.ckpt,b.ckpt"],
    ["ckpt=" + "x" * 5000],
    ["hydra.run.dir=old"],
    ["hydra.run.dir=old/.hydra/overrides.yaml"],
    ["hydra.run.dir=" + "x" * 5000],
    ["--config-dir", "nowhere"],
    ["--config-name", "nowhere"],
    ["--config-path", "nowhere"],
    ["--package", "nowhere"],
    ["reward=[shapes,clipscore]", "reward.pretrained=x"],
    ["reward=[shapes,clipscore]", "reward.shapes.weight=0", "reward.clipscore.weight=0"],
    ["reward=clipscore", "reward.clipscore.pretrained=./nowhere"],
    ["reward=clipscore", "reward.clipscore.pretrained=old"],
    ["reward=clipscore", "reward.clipscore.dtype=int8"],
    ["reward=pickscore", "reward.pretrained=./nowhere"],
    ["reward=pickscore", "reward.pickscore.processor=/nowhere"],
    ["reward=hpsv2", "reward.hpsv2.pretrained=./nowhere.pt"],
    ["reward=hpsv2", "reward.hpsv2.pretrained=old"],
    ["reward=imagereward", "reward.imagereward.pretrained=./nowhere"],
    ["reward=imagereward", "reward.imagereward.batch=0"],
    ["reward=imagereward", "reward.imagereward.tokenizer=./nowhere"],
    ["family=prefix", "family.explore.stop_after=10"],
    ["family=prefix", "family.explore.stop_after=0"],
    ["family=prefix", "family.explore.sampler=policy"],
    ["family=prefix", "family.regenerate.steps=3"],
    ["family=prefix", "model.prefix_steps=10"],
    ["family=diffusionnft", "family.keep=25"],
    ["family=diffusionnft", "family.regenerate.steps=0"],
    ["family=naive_quant", "family.regenerate.sampler=nothing"],
    ["objective=awm", "objective.beta=1"],
    ["objective=awm", "objective.ratio_clip=-1"],
    ["objective=awm", "objective.ratio_clip=x"],
    ["objective=awm", "objective.old_weight=nan"],
    ["model=flux1", "model.pretrained=./nowhere"],
    ["model=sd3", "model.pretrained=old"],
    ["model=sana", "model.pretrained=tiny"],
    ["model=sana", "model.transformer_weights=./nowhere"],
    ["prompts_per_iteration=1000000"],
    ["data=pickapic", "data.train=nowhere.parquet"],
    ["trainer=cpu", "precision.backend=torch"],
    ["trainer=gpu"],
    ["trainer=ddp", "trainer.devices=0"],
)
TASKS: dict[str, tuple[list[str], ...]] = {
    "audit": (
        ["task.proxies=[]"],
        ["task.proxies=5"],
        ["task.proxies=null"],
        ["task.proxies=[5]"],
        ["task.proxies=[shadow]"],
        ["task.proxies={sampler:shadow}"],
        ["task.proxies=[{sampler:nothing,steps:6}]"],
        ["task.proxies=[{sampler:shadow}]"],
        ["task.proxies=[{sampler:shadow,steps:0}]"],
        ["task.proxies=[{sampler:shadow,steps:x}]"],
        ["task.proxies=[{sampler:shadow,steps:6,precision:fp3}]"],
        ["task.proxies=[{sampler:shadow,steps:6,decoder:preview}]"],
        ["task.proxies=[{sampler:shadow,steps:6,stop_after:6}]"],
        ["task.proxies=[{sampler:shadow,steps:6,typo:1}]"],
        ["task.prompts=0"],
        ["task.prompts=[a]"],
        ["task.pool=x"],
        ["task.keep=97"],
        ["task.keep=1"],
    ),
    "benchmark": (
        ["task.families=[]"],
        ["task.families=[nothing]"],
        ["task.families=sol_rl"],
        ["task.families=null"],
        ["task.families=[5]"],
        ["task.precisions=[fp3]"],
        ["task.precisions=nvfp4"],
        ["task.precisions=[]"],
        ["task.decoders=[tiny]"],
        ["task.decoders=full"],
        ["task.decoders=[preview]"],
        ["task.repeats=0"],
        ["task.rounds=0"],
        ["task.rounds=x"],
        ["task.sizes.pool=0"],
        ["task.sizes.keep=1"],
        ["task.sizes.pool=2", "task.sizes.keep=4"],
        ["task.sizes=5"],
        ["task.compile=maybe"],
    ),
    "compare": (
        ["task.runs=nowhere"],
        ["task.runs=old"],
        ["task.runs=5"],
        ["task.runs=null"],
        ["task.runs=''"],
        ["task.runs=[a,b]"],
        ["task.runs='['"],
        ["task.runs='**'"],
    ),
    "evaluate": (
        [],
        ["ckpt=nowhere.ckpt"],
        ["ckpt=/dev/null"],
        ["ckpt=old"],
        ["ckpt=null"],
    ),
    "export": ([], ["ckpt=nowhere.ckpt"], ["ckpt=5"], ["ckpt=last", "task.typo=1"]),
    "generate": (
        [],
        ["task.prompts=5"],
        ["task.prompts=text"],
        ["task.prompts=null"],
        ["task.prompts=[5]"],
        ["task.prompts=['']"],
        ["task.prompts={a:b}"],
        ["task.prompts=[a]", "task.prompt_file=b.txt"],
        ["task.prompt_file=nowhere.txt"],
        ["task.prompt_file=."],
        ["task.prompt_file=[a]"],
        ["task.prompts=[a]", "task.seeds=5"],
        ["task.prompts=[a]", "task.seeds=[]"],
        ["task.prompts=[a]", "task.seeds=[-1]"],
        ["task.prompts=[a]", "task.seeds=[1,1]"],
        ["task.prompts=[a]", "task.seeds=[4294967296]"],
        ["task.prompts=[a]", "task.seeds=[x]"],
        ["task.prompts=[a]", "task.images=0"],
        ["task.prompts=[a]", "task.base=false"],
        ["task.prompts=[a]", "task.base=maybe"],
        ["task.prompts=[a]", "task.grid_prompts=0"],
        ["task.prompts=[a]", "task.grid_images=x"],
    ),
    "plan": (
        ["task.devices=0"],
        ["task.devices=x"],
        ["task.devices=1.5"],
        ["task.tflops=0"],
        ["task.tflops=-5"],
        ["task.tflops=nan"],
        ["task.tflops=x"],
        ["task.speedup=0"],
        ["task.speedup=x"],
        ["task.families=[nothing]"],
        ["task.families=5"],
        ["task.families=null"],
    ),
    "pretrain": (
        ["task.vae_steps=0"],
        ["task.vae_steps=x"],
        ["task.vae_batch=0"],
        ["task.vae_lr=-1"],
        ["task.vae_lr=x"],
        ["task.flow_steps=1.5"],
        ["task.flow_batch=null"],
        ["task.flow_lr=nan"],
        ["task.distractors=2"],
        ["task.distractors=x"],
        ["task.preview_steps=0"],
        ["task.preview_lr=0"],
        ["task.folder=/dev/null/model"],
        ["task.folder=null"],
    ),
}


def command_lines() -> Iterator[list[str]]:
    """Refused before anything is written, all with status 2."""
    yield from ([f"{key}={value}"] for key, value in itertools.product(WHOLE, NOT_WHOLE))
    yield from ([f"{key}={value}"] for key, value in itertools.product(NUMBERS, NOT_NUMBERS))
    yield from ([f"{key}={value}"] for key, value in itertools.product(TEXTS, NOT_TEXTS))
    yield from ([argument] for argument in (*OTHERS, *GRAMMAR, *PREFIXED))
    yield from map(list, MANY)
    for task, cases in TASKS.items():
        yield from ([f"task={task}", *case] for case in cases)


# Files

DEEP = b"[" * 200_000
PROMPT_FILES = {
    "empty.txt": b"",
    "blank.txt": b"\n \t\r\n\n",
    "latin1.txt": "caf\u00e9".encode("latin-1"),
    "utf16.txt": "a red circle".encode("utf-16"),
    "binary.txt": bytes(range(256)) * 20,
    "cut.txt": "a red circle\ncaf\u00e9".encode()[:-1],
    "mark.txt": b"\xef\xbb\xbf",
    "empty.jsonl": b"",
    "text.jsonl": b"a red circle\n",
    "cut.jsonl": b'{"prompt": "a red ci',
    "array.jsonl": b'["a red circle"]\n',
    "number.jsonl": b"5\n",
    "null.jsonl": b"null\n",
    "key.jsonl": b'{"text": "a red circle"}\n',
    "list.jsonl": b'{"prompt": ["a red circle"]}\n',
    "none.jsonl": b'{"prompt": null}\n',
    "blank.jsonl": b'{"prompt": " "}\n',
    "tag.jsonl": b'{"prompt": "a red circle", "tag": 5}\n',
    "second.jsonl": b'{"prompt": "a red circle"}\n{"prompt": 5}\n',
    "deep.jsonl": b'{"prompt": ' + DEEP,
    "latin1.jsonl": '{"prompt": "caf\u00e9"}'.encode("latin-1"),
    "surrogate.jsonl": b'{"prompt": "\\ud800"}\n',
    "empty.parquet": b"",
    "text.parquet": b"a red circle\n",
    "magic.parquet": b"PAR1PAR1",
    "zeros.parquet": bytes(1000),
}


def prompt_files(folder: Path) -> Iterator[Case]:
    for name, content in PROMPT_FILES.items():
        (folder / name).write_bytes(content)
        yield name, [f"data.train={name}"]
    table = folder / "good.parquet"
    parquet.write_table(
        pyarrow.table({"prompt": ["a red circle"] * 50, "number": [1] * 50, "none": [None] * 50}), table
    )
    content = table.read_bytes()
    for name, part in (("cut.parquet", content[:-40]), ("flipped.parquet", flipped(content, len(content) - 20))):
        (folder / name).write_bytes(part)
        yield name, [f"data.train={name}"]
    yield from (
        (f"column {name}", ["data.train=good.parquet", f"data.column={name}"]) for name in ("text", "number", "none")
    )
    (folder / "folder.txt").mkdir()
    (folder / "dangling.txt").symlink_to("nowhere")
    for name in ("folder.txt", "dangling.txt", "empty.txt/below.txt"):
        yield name, [f"data.train={name}"]
    for name in ("empty.txt", "latin1.txt", "cut.jsonl", "text.parquet", "folder.txt"):
        yield f"generate {name}", ["task=generate", f"task.prompt_file={name}"]
        yield f"eval {name}", ["task=audit", f"data.eval={name}"]


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def damaged(content: bytes) -> dict[str, bytes]:
    """A file that the disk, the network or the user has spoilt."""
    size = len(content)
    cuts = {f"cut at {share} %": content[: size * share // 100] for share in (1, 50, 99)}
    flips = {f"flipped at {share} %": flipped(content, size * share // 100) for share in (0, 20, 60, 99)}
    others = {
        "empty": b"",
        "byte": b"P",
        "zeros": bytes(size),
        "text": b"<html>not found</html>",
        "longer": content + content,
    }
    return {**cuts, "cut by a byte": content[:-1], **flips, **others}


def checkpoints(folder: Path, good: bytes) -> Iterator[Case]:
    """Files in the place of ``good``, the checkpoint of a run."""
    made = damaged(good)
    made.pop("flipped at 0 %")  # the first bytes of a zip file are read by nobody
    made.pop("longer")  # a zip file with something in front
    for name, content in made.items():
        (folder / f"{name}.ckpt").write_bytes(content)
        yield name, [f"ckpt='{name}.ckpt'"]
    state = torch.load(io.BytesIO(good), weights_only=True)
    mark = {"pytorch-lightning_version": "2.6"}
    others: dict[str, Any] = {
        "list": [mark],
        "text": "pytorch-lightning_version",
        "mark": mark,
        "weights": state["state_dict"],
        "foreign": {**state, "state_dict": {"layer.weight": torch.zeros(2)}, "callbacks": {}, "optimizer_states": [{}]},
        "code": {**state, "hyper_parameters": Path("x")},
        "step": {**state, "global_step": "five"},
        "shape": {**state, "state_dict": {name: value[:1] for name, value in state["state_dict"].items()}},
        "no adapters": {**state, "state_dict": {}},
    }
    for key in ("global_step", "state_dict", "callbacks", "loops", "optimizer_states"):
        others[f"no {key}"] = {name: value for name, value in state.items() if name != key}
        others[f"{key} of text"] = {**state, key: "x"}
    for name, value in others.items():
        torch.save(value, folder / f"{name}.ckpt")
        yield name, [f"ckpt='{name}.ckpt'"]
    torch.save(state, folder / "old.ckpt", _use_new_zipfile_serialization=False)
    yield "old format", ["ckpt=old.ckpt"]
    with zipfile.ZipFile(folder / "zip.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"pytorch-lightning_version")
    yield "zip", ["ckpt=zip.ckpt"]
    for name in ("code", "no state_dict", "no callbacks", "shape", "cut at 50 %"):
        for task in ("evaluate", "export"):
            yield f"{task} {name}", [f"task={task}", f"ckpt='{name}.ckpt'"]


def model_folders(folder: Path, good: Path) -> Iterator[Case]:
    """Pipeline folders with one file of ``good`` gone or spoilt."""
    weights = "transformer/diffusion_pytorch_model.safetensors"
    index: dict[str, Any] = json.loads((good / "model_index.json").read_text())
    changes: dict[str, dict[str, bytes | None]] = {
        "no index": {"model_index.json": None},
        "index of text": {"model_index.json": b"model_index"},
        "empty index": {"model_index.json": b""},
        "index of a list": {"model_index.json": b"[]"},
        "index of nothing": {"model_index.json": b"{}"},
        "deep index": {"model_index.json": DEEP},
        "another pipeline": {"model_index.json": json.dumps({**index, "_class_name": "SanaPipeline"}).encode()},
        "class of a number": {"model_index.json": json.dumps({**index, "_class_name": 5}).encode()},
        "unknown component": {"model_index.json": json.dumps({**index, "vae": ["diffusers", "Nothing"]}).encode()},
        "component of no kind": {"model_index.json": json.dumps({**index, "vae": ["diffusers"]}).encode()},
        "no weights": {weights: None},
        "no tokenizer": {"tokenizer/tokenizer.json": None, "tokenizer/tokenizer_config.json": None},
        "tokenizer of text": {"tokenizer/tokenizer.json": b"tokenizer"},
        "no scheduler": {"scheduler/scheduler_config.json": None},
        "scheduler of text": {"scheduler/scheduler_config.json": b"x"},
        "text encoder of nothing": {"text_encoder/config.json": b"{}"},
        "text encoder of text": {"text_encoder/config.json": b"x"},
        "autoencoder of a list": {"vae/config.json": b"[]"},
        "wide transformer": {"transformer/config.json": config_with(good, "attention_head_dim", 64)},
        "transformer of words": {"transformer/config.json": config_with(good, "num_layers", "two")},
    }
    content = (good / weights).read_bytes()
    changes |= {name: {weights: spoilt} for name, spoilt in damaged(content).items() if name not in _STILL_WEIGHTS}
    for name, files in changes.items():
        copy = folder / name
        shutil.copytree(good, copy, copy_function=os.symlink)
        for path, new in files.items():
            (copy / path).unlink()
            if new is not None:
                (copy / path).write_bytes(new)
        yield name, ["task=generate", "task.prompts=[a red circle]", f"model.pretrained='./{name}'"]


_STILL_WEIGHTS = ("flipped at 20 %", "flipped at 60 %", "flipped at 99 %")  # other numbers: safetensors has no checksum


def config_with(good: Path, key: str, value: Any) -> bytes:
    return json.dumps({**json.loads((good / "transformer" / "config.json").read_text()), key: value}).encode()


def reward_files(folder: Path) -> Iterator[Case]:
    """Folders and files that are to be rewards, spoilt before their weights matter."""
    configs = {
        "text": b"config",
        "empty": b"",
        "list": b"[]",
        "number": b"5",
        "nothing": b"{}",
        "deep": DEEP,
        "llama": b'{"model_type": "llama"}',
        "clip without weights": b'{"model_type": "clip"}',
        "binary": bytes(range(256)),
    }
    for name, content in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(content)
        yield f"clipscore {name}", ["reward=clipscore", f"reward.pretrained='./{name}'"]
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_bytes(b'{"model_type": "clip"}')
    for name, content in (("text", b"weights"), ("header", struct.pack("<Q", 2**60)), ("empty", b"")):
        copy = folder / f"weights {name}"
        shutil.copytree(weights, copy)
        (copy / "model.safetensors").write_bytes(content)
        yield f"pickscore {name}", ["reward=pickscore", f"reward.pretrained='./weights {name}'"]
    torch.save({"state_dict": {"x": torch.zeros(2)}}, folder / "whole.pt")
    torch.save([1], folder / "list.pt")
    made = {"text": b"x", "empty": b"", "cut": (folder / "whole.pt").read_bytes()[:200]}
    for name, content in made.items():
        (folder / f"{name}.pt").write_bytes(content)
    for name in ("whole", "list", *made):
        yield f"hpsv2 {name}", ["reward=hpsv2", f"reward.pretrained=./{name}.pt"]
    for name, content in configs.items():
        (folder / f"blip {name}").mkdir()
        (folder / f"blip {name}" / "med_config.json").write_bytes(content)
        (folder / f"blip {name}" / "ImageReward.pt").write_bytes(b"x")
        yield f"imagereward {name}", ["reward=imagereward", f"reward.pretrained='./blip {name}'"]


def records(folder: Path, run: Path) -> Iterator[Case]:
    """Folders of ``run``, a finished one, whose record or summary is spoilt."""
    for name, content in (
        ("text", b"x: ["),
        ("list", b"- 'a=b=c'"),
        ("keys", b"a: 1"),
        ("number", b"5"),
        ("binary", b"\xff\x00"),
    ):
        copy = folder / f"record {name}"
        shutil.copytree(run, copy)
        (copy / ".hydra" / "overrides.yaml").write_bytes(content)
        yield f"record {name}", ["ckpt=last", f"hydra.run.dir='record {name}'"]
    for name, content in (
        ("text", b"x"),
        ("list", b"[]"),
        ("empty", b""),
        ("keys", b"{}"),
        ("deep", DEEP),
        ("binary", b"\xff"),
    ):
        copy = folder / f"summary {name}"
        shutil.copytree(run, copy)
        (copy / "summary.json").write_bytes(content)
        yield f"summary {name}", ["task=compare", f"task.runs='summary {name}'"]
