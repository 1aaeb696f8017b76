"""Command lines and files that cannot be meant, for test_malformed.py: what users mistype, and what disks and networks
spoil.

Every function yields (name, arguments). Files are written into a folder that the caller names; the arguments give them
by relative paths. Nothing is random: the same cases every time.
"""

import copy
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import parquet

Case = tuple[str, list[str]]

# One of each kind; tests/cli/test_options.py has the values.
_ONE_ARGUMENT = """
    iterations=1e400 run_dir=x evaluation=3 model.data=null family.keep=97 optimizer._target_=torch.optim.Nowhere
    optimizer.betas=0.9 +objective.typo=1 precision=fp3 reward=[] reward=[shapes,no] task=[train,audit] data.train=.
    data.train=hf://a data.train=shapes-trian model.preview_decoder=./nowhere trainer.accelerator=gpu trainer=null
    trainer.num_nodes=x hydra.run.dir= hydra.run.dir=/dev/null/run hydra.mode=SIDEWAYS hydra/launcher=nowhere
    iterations =3 iterations==3 iterations=[ iterations={ data.train='a data.train=${ ''=1 iterations..x=3
    iterations.x=3 family/sol_rl family=../model/tiny family= family=5 family=null family=[sol_rl,compile]
    family={sol_rl:1} experiment=nowhere + ~ ~nothing ~iterations=5 ~seed ~model ~reward +nothing=1 +ckpt=x
    seed=${nothing} seed=${seed} seed=${oc.env:NOTHING_OF_THIS_NAME} iterations=1,2 ckpt= ckpt=[a] ckpt=best ckpt=.
    ckpt=/dev/null ckpt=last
""".split()
_SEVERAL_ARGUMENTS = (
    ["data.train=\x07bell"],
    ["data.train=a b=c"],
    ["data.train=\ud800"],
    ["ckpt=" + "x" * 5000],
    ["hydra.run.dir=" + "x" * 5000],
    ["-m", "iterations=0,1"],
    ["-m", "family=glob(x*)"],
    ["-m", "seed=range(1,1)"],
    ["-m", "hydra/sweeper=nowhere", "seed=1,2"],
    ["-m", "seed=1,2", "hydra.sweep.subdir=same"],
    ["--config-name", "nowhere"],
    ["reward=clipscore", "reward.clipscore.pretrained=./nowhere"],
    ["task=compare", "task.runs='['"],
    ["task=evaluate", "ckpt=nowhere.ckpt"],
    ["task=export", "seed=1"],
    ["task=generate", "task.prompt_file=."],
)
_TASKS = {
    "audit": "task.proxies=5 task.proxies=[5] task.proxies=[{sampler:shadow,steps:x}]",
    "benchmark": "task.families=sol_rl task.sizes=5",
    "compare": "task.runs=5 task.runs='['",
    "evaluate": "ckpt=nowhere.ckpt",
    "export": "seed=1",
    "generate": "seed=1 task.prompts=5 task.prompts=[5] task.prompt_file=.",
    "plan": "task.cards=5",
}


def command_lines() -> Iterator[list[str]]:
    """Refused before anything is written, all with status 2."""
    yield from ([argument] for argument in _ONE_ARGUMENT)
    yield from map(list, _SEVERAL_ARGUMENTS)


# Files

DEEP = b"[" * 200_000
PROMPT_FILES = {
    "empty.txt": b"",
    "latin1.txt": "caf\u00e9".encode("latin-1"),
    "binary.txt": bytes(range(256)) * 20,
    "text.jsonl": b"a red circle\n",
    "cut.jsonl": b'{"prompt": "a red ci',
    "key.jsonl": b'{"text": "a red circle"}\n',
    "second.jsonl": b'{"prompt": "a red circle"}\n{"prompt": 5}\n',
    "deep.jsonl": b'{"prompt": ' + DEEP,
    "surrogate.jsonl": b'{"prompt": "\\ud800"}\n',
    "text.parquet": b"a red circle\n",
    "zeros.parquet": bytes(1000),
    "binary.csv": bytes(range(256)) * 20,
    "twice.csv": b"prompt,prompt\na,b\n",
    "quote.csv": b'prompt\n"a red circle\n',
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
    yield "generate", ["task=generate", "task.prompt_file=latin1.txt"]


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


_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "text count": lambda state: state["loops"]["fit_loop"]["state_dict"].update(iterations_done="3"),
    "negative count": lambda state: state["loops"]["fit_loop"]["state_dict"].update(iterations_done=-1),
    "no loop": lambda state: state["loops"].pop("fit_loop"),
    "no schedule": lambda state: state.pop("lr_schedulers"),
    "no optimizer": lambda state: state["optimizer_states"].clear(),
    "few parameters": lambda state: state["optimizer_states"][0]["param_groups"][0]["params"].pop(),
    "moment of another shape": lambda state: state["optimizer_states"][0]["state"][0].update(exp_avg=torch.zeros(2)),
    "half-precision adapters": lambda state: state.update(
        state_dict={name: value.bfloat16() for name, value in state["state_dict"].items()}
    ),
    "average of other names": lambda state: state["callbacks"]["WeightEMA"].update(average={"x": torch.zeros(2)}),
    "guard without rows": lambda state: state["callbacks"]["Guard"].pop("rows"),
}


def training_states(folder: Path, run: Path) -> Iterator[Case]:
    """Checkpoints in a folder with the record of ``run``, a finished one, whose training state is spoilt."""
    (folder / "run" / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / ".hydra", folder / "run" / ".hydra")
    good = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    for name, change in _STATES.items():
        state = copy.deepcopy(good)
        change(state)
        file = f"run/checkpoints/{name}.ckpt"
        torch.save(state, folder / file)
        yield name, [f"ckpt='{file}'", "iterations=2"]
    yield "export", ["task=export", "ckpt='run/checkpoints/average of other names.ckpt'"]


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
    for key in ("global_step", "state_dict", "callbacks"):
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
    for name in ("no state_dict", "shape"):
        for task in ("evaluate", "export"):
            yield f"{task} {name}", [f"task={task}", f"ckpt='{name}.ckpt'"]


def model_folders(folder: Path, good: Path) -> Iterator[Case]:
    """Pipeline folders with one file of ``good`` gone or spoilt."""
    weights = "transformer/diffusion_pytorch_model.safetensors"
    changes: dict[str, dict[str, bytes | None]] = {
        "no index": {"model_index.json": None},
        "index of a list": {"model_index.json": b"[]"},
        "deep index": {"model_index.json": DEEP},
        "no weights": {weights: None},
        "no tokenizer": {"tokenizer/tokenizer.json": None, "tokenizer/tokenizer_config.json": None},
        "autoencoder of a list": {"vae/config.json": b"[]"},
        "wide transformer": {"transformer/config.json": config_with(good, "attention_head_dim", 64)},
        "transformer of words": {"transformer/config.json": config_with(good, "num_layers", "two")},
    }
    content = (good / weights).read_bytes()
    spoilt = damaged(content)  # flips in the numbers are other numbers: safetensors has no checksum
    changes |= {name: {weights: spoilt[name]} for name in ("cut at 50 %", "flipped at 0 %")}
    for name, files in changes.items():
        copy = folder / name
        shutil.copytree(good, copy, copy_function=os.symlink)
        for path, new in files.items():
            (copy / path).unlink()
            if new is not None:
                (copy / path).write_bytes(new)
        yield name, ["task=generate", "task.prompts=[a red circle]", f"model.pretrained='./{name}'"]


def config_with(good: Path, key: str, value: Any) -> bytes:
    return json.dumps({**json.loads((good / "transformer" / "config.json").read_text()), key: value}).encode()


def reward_files(folder: Path) -> Iterator[Case]:
    """Folders and files that are to be rewards, spoilt before their weights matter."""
    configs = {
        "empty": b"",
        "deep": DEEP,
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
    for name, content in (("header", struct.pack("<Q", 2**60)),):
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
    for name, content in (("empty", b""), ("deep", DEEP)):
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
