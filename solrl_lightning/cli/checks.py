"""Checks of valid options against files, the network and this machine, before models are loaded.

Each raises UserError for the first thing that a run would lack.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from solrl_lightning.artifacts.complete import check_header, lora_file
from solrl_lightning.artifacts.finished_runs import finished_runs
from solrl_lightning.artifacts.formatting import path_option
from solrl_lightning.cli.config import as_written, without_hydra
from solrl_lightning.cli.hub import check_push
from solrl_lightning.cli.launch import check_alone
from solrl_lightning.data.sources import check_source
from solrl_lightning.errors import UserError
from solrl_lightning.machine.packages import check_installed
from solrl_lightning.names import LORA_FILES
from solrl_lightning.options.reward import GENEVAL
from solrl_lightning.options.run import Run
from solrl_lightning.options.task import Compare, Export, Generate, Prove, Serve
from solrl_lightning.options.trainer import Trainer, check_shares, named_devices
from solrl_lightning.rewards.addresses import HTTP, VLM, check_served, read_token
from solrl_lightning.rewards.geneval_metadata import check_metadata
from solrl_lightning.run_prompts import prompt_sets, requested_prompts, sources

_TRAIN = "solrl_lightning.tasks.train.train"
_PACKAGES = {  # that optional classes import, and the requirement with them
    "solrl_lightning.artifacts.loggers.WandB": (["wandb"], "wandb"),
    "solrl_lightning.artifacts.loggers.MLflow": (["mlflow"], "mlflow"),
    "solrl_lightning.rewards.ocr.OCR": (["onnxruntime", "rapidocr"], "solrl-lightning[ocr]"),
}
_NEEDED_CALLBACKS = ("requantize", "checkpoint", "export", "summary")


def options_of(cfg: DictConfig, run_dir: str) -> Run:
    """Return the options of a composed configuration. UserError for the first that is missing, unknown or invalid."""
    check_callbacks(cfg)  # first: what an experiment sets of a callback that is left out has no class
    with without_hydra(cfg, run_dir) as application:
        options = Run.of(application)
    check_overrides(options, as_written(cfg.hydra.overrides.task))
    check_paths(options)
    return options


def check_callbacks(cfg: DictConfig) -> None:
    """Raise UserError for training without the callbacks that requantise and write the results."""
    missing = [name for name in _NEEDED_CALLBACKS if OmegaConf.select(cfg, f"callbacks.{name}") is None]
    if not missing or cfg.task.get("_target_") != _TRAIN:  # a custom task sets its callbacks itself
        return
    key = re.compile(rf"[~+]*callbacks(\.({'|'.join(missing)}))?(=|$)")
    culprits = " ".join(filter(key.match, as_written(cfg.hydra.overrides.task))) or "callbacks in a file of your own"
    raise UserError(
        f"{culprits} is invalid: training needs the callbacks {', '.join(_NEEDED_CALLBACKS)}, and this leaves out "
        f"{', '.join(missing)}. Add callbacks with callbacks=[default,<name>], remove another one with "
        "~callbacks.<name>."
    )


def check_overrides(options: Run, overrides: Sequence[str]) -> None:
    """Raise UserError for an option on the command line that has no effect: of a LoRA, or of a proof, which has its
    own.
    """
    of_lora = [override for override in overrides if override.lstrip("+").startswith("model.lora.")]
    if options.model.train == "full" and of_lora:
        raise UserError(
            f"{of_lora[0]} is invalid: model.train=full has no LoRA. Leave it out, or set model.train=lora."
        )
    if isinstance(options.task, Prove):
        passed_on = {"task", "trainer", "trainer.accelerator"}
        if len(named_devices(options.trainer)) == 1:
            passed_on.add("trainer.devices")
        for override in reversed(overrides):  # those that ckpt adds are the first
            key = override.lstrip("+~").partition("=")[0]
            if key not in passed_on and not key.startswith("task."):
                raise UserError(
                    f"{override} is invalid: task=prove runs fixed settings, on the CPU or on one device such as "
                    "trainer.devices=[1]. Leave it out."
                )


def check_paths(options: Run) -> None:
    """Raise UserError for a path-like value (/, ., ~) that does not exist; anything else may be a hub id."""
    paths = {"model.pretrained": options.model.pretrained, "model.preview_decoder": options.model.preview_decoder}
    for key, value in (paths | options.reward.files).items():
        if value is not None and str(value).startswith(("/", ".", "~")) and not Path(value).expanduser().exists():
            raise UserError(
                f"{key}={value} is invalid: it must be a hub id, a local folder or file; there is none at that path."
            )
    lora = options.lora
    if lora is not None:
        path = Path(lora).expanduser()
        named = f"model.init_lora={lora} is invalid"
        if (weights := lora_file(path)) is None:
            rule = f"it must be a LoRA file, or a folder with {' or '.join(LORA_FILES)}"
            # A file of another name, as on the hub, or the LoRA inside a run folder.
            files = [file for name in LORA_FILES for file in path.glob(f"*/{name}")]
            others = [*path.glob("[!.]*.safetensors")]
            near = sorted([*others, *(file.parent for file in files)])
            fix = ", or ".join(path_option("model.init_lora", file) for file in near) or "model.init_lora=<LoRA>"
            raise UserError(f"{named}: {rule}. Set {fix}{', if it is a LoRA' * bool(others)}.")
        check_header(weights, named)


def check_needs(options: Run) -> None:
    """Raise UserError if the task lacks something that it needs, as far as this can be known without torch."""
    task = options.task
    if not task.takes_ranks:
        check_alone()
    if name := min((name for name in os.environ if name.startswith("PL_TRAINER_")), default=None):
        raise UserError(
            f"{name}={os.environ[name]} in the environment is invalid: Lightning would take it in place of an option "
            f"that a run checks and records. Run unset {name}, and set trainer.<option>."
        )
    if ("ckpt" in task.reads and options.ckpt is None) or (isinstance(task, Generate) and not options.weights):
        raise UserError(
            "ckpt=null is invalid: this task takes trained weights. Set ckpt=<file>, or ckpt=last or ckpt=best of the "
            "newest run; task=generate also takes model.init_lora=<LoRA>."
        )
    if isinstance(task, Generate) and task.prompt_file is not None:
        check_source(task.prompt_file)
    if isinstance(task, Compare):
        finished_runs(task.runs)
    if isinstance(task, Serve):
        check_served(options.reward.members, options.reward.combine, task.host, task.port)
    if isinstance(task, Export) and task.push is not None:
        check_push(task.push)
    if any(member["_target_"] in (HTTP, VLM) for member in options.reward.members.values()):
        read_token()
    check_packages(options)
    for source in sources(options).values():
        check_source(source)


def check_packages(options: Run) -> None:
    """Raise UserError for an optional package that is not installed and that the run imports."""
    if options.explores_elsewhere:
        check_installed("explorers=ray", "ray", of="solrl-lightning[ray]")
    nodes = [(f"logger={name}", node or {}) for name, node in options.logger.items()]
    for option, node in [*nodes, *((f"reward={name}", node) for name, node in options.reward.members.items())]:
        packages, of = _PACKAGES.get(node.get("_target_", ""), ([], ""))
        check_installed(option, *packages, of=of)


def check_prompts(options: Run) -> None:
    """Raise UserError for a prompt source that cannot be read, or that has fewer prompts than an iteration takes."""
    if not options.uses_model:
        return
    if isinstance(options.task, Generate):
        requested_prompts(options)
    prompts = prompt_sets(options)
    if "train" in options.task.reads:
        from solrl_lightning.data.prompts import PromptSchedule  # imports torch

        PromptSchedule(prompts.train, options.prompts_per_iteration, options.seed)
    if any(member["_target_"] == GENEVAL for member in options.reward.members.values()):
        each = [*prompts.train, *prompts.eval]
        check_metadata([prompt.text for prompt in each], [prompt.metadata for prompt in each])
    if options.is_sharded:
        evaluated = len(prompts.eval[: options.data.eval_prompts])
        ranks = devices_of(options.trainer) * options.trainer.get("num_nodes", 1)
        check_shares(options.prompts_per_iteration, evaluated, ranks)


# What torch knows


def devices_of(trainer: Trainer) -> int:
    """Return the number of devices of a node that the trainer uses; 1 where only Lightning can tell."""
    import torch

    devices = trainer.get("devices", "auto")
    if str(devices) in ("auto", "-1"):
        return max(1, torch.cuda.device_count() if trainer.get("accelerator") != "cpu" else 1)
    return len(named_devices(trainer)) or int(str(devices))


def check_machine(options: Run) -> None:
    """Raise UserError for a device, precision or optimiser that is not available here. Imports torch, but not
    Lightning.
    """
    import torch

    from solrl_lightning.policies.base_weights import check_storage
    from solrl_lightning.quantization import resolve
    from solrl_lightning.targets import check_arguments, check_factor, check_objective, check_optimizer

    accelerator, devices = options.trainer.get("accelerator"), options.trainer.get("devices")
    on_gpus = accelerator == "cuda" or (accelerator == "gpu" and not torch.backends.mps.is_available())
    indices = named_devices(options.trainer)
    needed = max(indices) + 1 if indices else devices_of(options.trainer)
    if options.uses_model and on_gpus and needed > torch.cuda.device_count():
        raise UserError(
            f"trainer.accelerator={accelerator} trainer.devices={devices} is invalid: torch finds "
            f"{torch.cuda.device_count()} GPUs on this machine. Use trainer=auto."
        )
    samples = not {"train", "eval"}.isdisjoint(options.task.reads)
    if samples and not options.explores_elsewhere:
        gpu = accelerator != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda", indices[0] if indices else 0) if gpu else torch.device("cpu")
        resolve(options.precision.name, options.precision.backend, device)
    if options.uses_model:
        check_storage(options.base_weights)
    if not {"train", "eval", "reward"}.isdisjoint(options.task.reads):
        for name, member in options.reward.members.items():
            del member["weight"]
            check_arguments(f"reward.{name}", member, {"device"})
    if options.trains:
        for group, nodes in (("callbacks", options.callbacks), ("logger", options.logger)):
            for name, node in nodes.items():
                if node is not None:
                    check_arguments(f"{group}.{name}", node)
    if "train" in options.task.reads:
        check_factor("scheduler", options.scheduler)
        check_factor("old_policy", options.old_policy)
        check_optimizer(options.optimizer)
        check_objective(options.objective, options.family.regenerate.steps, options.model.guidance_scale)
