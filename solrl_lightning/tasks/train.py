"""task=train: align the policy with the reward."""

import copy
import logging
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from solrl_lightning.artifacts.files import has_ended, iterations_done, loop_state, read_checkpoint
from solrl_lightning.artifacts.finished_runs import end_of
from solrl_lightning.artifacts.formatting import counted, path_option
from solrl_lightning.artifacts.run_folder import LOG, commit_overrides, is_resuming
from solrl_lightning.build import build_trainer, build_training, load_weights
from solrl_lightning.callbacks.common import file_logger
from solrl_lightning.callbacks.ema import average_in
from solrl_lightning.callbacks.summary import base_and_final
from solrl_lightning.data.loaders import RankPrompts
from solrl_lightning.data.prompt import Prompt, contents, identities
from solrl_lightning.data.prompts import digest
from solrl_lightning.errors import UserError
from solrl_lightning.names import TRAINED
from solrl_lightning.options.run import Run
from solrl_lightning.policies.guidance import forward_passes
from solrl_lightning.policies.tensor_digest import file_digests
from solrl_lightning.quantization.backends import Hardware, hardware_of
from solrl_lightning.run_prompts import prompt_sets
from solrl_lightning.targets import make_optimizer
from solrl_lightning.training.loop import ExploreTrainLoop
from solrl_lightning.training.module import SolRLModule
from solrl_lightning.training.optimizer_state import ConfiguredSchedule, check_fits, check_shapes, keep_configured

log = logging.getLogger(__name__)

_CALLBACKS = "lightning.pytorch.callbacks."


def train(cfg: Run) -> float | None:
    """Train, or resume from ``cfg.ckpt``; return the final held-out reward, or None without an evaluation.

    Writes the files that the README lists into the run folder, also when interrupted.

    Raises:
        UserError: the checkpoint has another optimiser or other weights, a run resumes in its folder with other
            training prompts, or Lightning rejects the configuration.
    """
    with ExitStack() as stack:
        return _train(cfg, stack)


def _train(cfg: Run, stack: ExitStack) -> float | None:
    checkpoint = None if cfg.ckpt is None else read_checkpoint(cfg.ckpt)
    in_place, prompts = is_resuming(Path(cfg.run_dir)), prompt_sets(cfg)
    if checkpoint is not None:
        check_training_prompts(cfg, prompts.train, checkpoint, in_place)
        optimizer = make_optimizer(cfg.optimizer)([torch.zeros(1, 1, requires_grad=True)])
        for state in checkpoint["optimizer_states"]:
            check_fits(optimizer, state)
    trained = "all" if cfg.family.keep == cfg.family.pool else str(cfg.family.keep)
    log.info("family: %d candidates of each prompt, %s of them trained on", cfg.family.pool, trained)
    seed_everything(cfg.seed, verbose=False)
    trainer = build_trainer(cfg.trainer, cfg.callbacks, cfg.logger)
    folder = Path(cfg.run_dir)
    # The recorded command line changes once the checkpoint is loaded.
    if in_place and trainer.is_global_zero:
        commit = LambdaCallback(on_train_start=lambda *_: commit_overrides(folder))
        trainer.callbacks.append(commit)  # type: ignore[attr-defined]
    device = trainer.strategy.root_device
    if checkpoint is not None and device.type == "cpu":
        compare_threads(checkpoint)
    if cfg.explores_elsewhere:
        from solrl_lightning.explorers.cluster import explorers_of  # Ray is an optional dependency

        explorers = stack.enter_context(explorers_of(cfg, trainer.global_rank, trainer.world_size, device))
    module, loop = build_training(cfg, prompts, trainer)
    of_rewards = {key: Path(name) for key, name in cfg.reward.files.items() if name}
    module.model_files = {**module.model_files, **file_digests(of_rewards)}
    if checkpoint is None:
        load_weights(module, cfg)
    else:
        # An error about other weights must precede the loggers' first write.
        module.on_load_checkpoint(checkpoint)
        if in_place and (changed := module.changed_files(checkpoint)):
            branch = f"{path_option('ckpt', str(cfg.ckpt))} hydra.run.dir=<folder>"
            raise UserError(
                f"{', '.join(changed)}: this is not what the run in {folder} was trained with. Restore it, or start a "
                f"new folder from that state: {branch}."
            )
        average_in(checkpoint, module.policy_state(TRAINED))
    if shadow_layers := module.transformers.shadow_layers:
        file_logger.info("%s", shadow_layers)
        table = f"; table in {folder / LOG}" if (folder / LOG).is_file() else ""  # hydra/job_logging=none has no file
        log.info("%s%s", shadow_layers.splitlines()[-1].strip(), table)
    if cfg.explores_elsewhere:
        from solrl_lightning.explorers.sampler import RaySampler

        elsewhere = RaySampler(cfg, explorers, module.model, loop.pool_of)
        module.transformers = replace(module.transformers, explorers=elsewhere)
    if cfg.ckpt is not None and checkpoint is not None:
        optimizer = make_optimizer(cfg.optimizer)(module.trained_parameters())
        keep_configured(optimizer, module.optimizer_factory.keywords)
        _check_state(cfg.ckpt, checkpoint, optimizer, loop)
    if checkpoint is not None and in_place and has_ended(checkpoint, cfg.iterations):
        loop.ends_again = end_of(folder, iterations_done(checkpoint)) is None
    if checkpoint is not None and not module.evaluation.comparable:
        log.info(
            "the held-out prompts, their sampling, the rewards or files of models differ from the checkpoint's: "
            "base reward, best checkpoint and alarms begin anew, with an evaluation of the loaded weights"
        )
    module.evaluation.planned_seconds = planned_seconds(cfg, module, hardware_of(device), trainer.world_size)
    held_out = RankPrompts(module.evaluation.prompts, trainer.global_rank, trainer.world_size)
    try:
        if cfg.ckpt is None:
            trainer.validate(module, held_out, verbose=False)
        trainer.fit(module, loop.loader, held_out, ckpt_path=cfg.ckpt, weights_only=True)
    except Exception as error:
        if loop.termination.requested:
            raise SIGTERMException from error  # the signal has ended something else, too, such as a compiler
        check_callbacks(error, cfg.callbacks)
        raise
    return base_and_final(module.evaluation.history, module.rewards.name)[1]


def check_callbacks(error: Exception, nodes: Mapping[str, Any]) -> None:
    """Raise UserError if ``error`` is one of Lightning about its callbacks, made of ``nodes``, loggers and trainer.

    For example, a callback that needs a logger, or one whose metric no run has.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    reason = " ".join(str(error).partition(" HINT:")[0].split()).rstrip(".")  # hints are about the module's code
    if frames[-1].f_globals["__name__"].startswith(_CALLBACKS) and not isinstance(error, OSError):  # of a file
        owners = [frame.f_locals.get("self") for frame in frames]
        kind = next((type(owner).__name__ for owner in reversed(owners) if isinstance(owner, Callback)), "")
        keys = [f"callbacks.{key}" for key, node in nodes.items() if node and node["_target_"].endswith(f".{kind}")]
        key = " or ".join(keys) or "callbacks"
        fix = f"Set {key}.monitor=<metric>" if "monitor" in reason or "metric" in reason else f"Correct {key}"
        raise UserError(f"{key} is invalid: {reason}. {fix}, or leave it out with ~{key}.") from error
    if isinstance(error, MisconfigurationException):
        raise UserError(f"Lightning cannot run these callbacks, loggers and trainer together: {reason}.") from error


def compare_threads(checkpoint: dict[str, Any]) -> None:
    """Report that ``checkpoint`` was computed with another number of threads: its sums were rounded otherwise."""
    before, threads = loop_state(checkpoint).get("threads"), torch.get_num_threads()
    if before not in (None, threads):
        log.info(
            f"{counted(threads, 'thread')}, where the checkpoint's run had {before}: results differ by rounding from "
            f"an uninterrupted run's; with OMP_NUM_THREADS={before} they are equal"
        )


def planned_seconds(cfg: Run, module: SolRLModule, hardware: Hardware, ranks: int) -> float | None:
    """Return the seconds of an evaluation by the packaged estimates, if there are any for the model on ``hardware``."""
    from solrl_lightning.study.elsewhere import table_of  # other runs do without

    table, evaluation = table_of(cfg.model.pretrained, cfg.model.resolution, hardware.capability), module.evaluation
    if table is None:
        return None
    passes = evaluation.passes * forward_passes(module.model.guidance_scale)
    return table.seconds({"bf16": passes, "image": len(evaluation.prompts) * evaluation.images}) / ranks


def _check_state(
    ckpt: str, checkpoint: Mapping[str, Any], optimizer: torch.optim.Optimizer, loop: ExploreTrainLoop
) -> None:
    """Raise UserError unless Lightning will be able to restore the training state of ``checkpoint``.

    Tries it: what a checkpoint lacks that is not as a run writes it would end in errors of all kinds.
    """
    try:
        (state,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
        optimizer.load_state_dict(state)
        check_shapes(optimizer)
        ConfiguredSchedule(optimizer, lambda _: 1.0).load_state_dict(schedule)
        fresh = loop.state_dict()
        loop.load_state_dict(checkpoint["loops"]["fit_loop"])
        loop.load_state_dict(fresh)
        for callback in loop.trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key in checkpoint["callbacks"] and type(callback).__module__.startswith(
                "solrl_lightning."
            ):
                callback.load_state_dict(copy.deepcopy(checkpoint["callbacks"][callback.state_key]))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"ckpt={ckpt} is invalid: its training state cannot be restored ({type(error).__name__}: {error}). Take "
            "another checkpoint of the run, or begin a new one with ckpt=null."
        ) from error


def check_training_prompts(cfg: Run, prompts: Sequence[Prompt], checkpoint: dict[str, Any], in_place: bool) -> None:
    """Raise UserError if the run that resumes in its folder has other training prompts than the checkpoint's.

    A branch says so. An older checkpoint has no record of them, or one of their identities alone.
    """
    recorded = loop_state(checkpoint).get("training_prompts")
    if recorded in (None, digest(contents(prompts)), digest(identities(prompts))):
        return
    if not in_place:
        log.info("the training prompts, their metadata or images differ from the checkpoint's")
        return
    raise UserError(
        f"data.train={cfg.data.train} is invalid: its prompts without the prompts of data.eval={cfg.data.eval}, or "
        f"their metadata or images, are not the ones that the run in {cfg.run_dir} was trained on, so it could not "
        f"be repeated. Restore them, or start a new folder from that state: ckpt={cfg.ckpt} hydra.run.dir=<folder>."
    )
