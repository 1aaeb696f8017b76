"""A job of a sweep, as Lightning's launcher sees it."""

import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

import solrl_lightning
from solrl_lightning.artifacts.formatting import quoted
from solrl_lightning.artifacts.run_folder import LAST, NEXT_RECORD, RECORD, claimed
from solrl_lightning.cli.config import as_written, own_sources, searched
from solrl_lightning.cli.launch import expire_store, is_first
from solrl_lightning.cli.resume import check_checkpoint

log = logging.getLogger(__name__)

RANK_VARIABLES = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def continued(cfg: DictConfig, folder: Path) -> DictConfig:
    """Return the options of a job that its scheduler has started again, which continues after its last checkpoint.

    Only such a job has a checkpoint in its folder: a sweep begins in a new one. Raises UserError for a damaged file.
    """
    checkpoint = folder.absolute() / LAST
    check_checkpoint(checkpoint)
    (folder / NEXT_RECORD).mkdir(exist_ok=True)
    if is_first():
        for file in (folder / RECORD).glob("*.yaml"):  # which Hydra has written again
            shutil.copy(file, folder / NEXT_RECORD)
        log.info("this job was started again: it continues %s", checkpoint)
    settings: Any = HydraConfig.get()
    with read_write(settings), open_dict(settings), open_dict(cfg):
        settings.overrides.task.append(f"ckpt={quoted(checkpoint)}")  # for the ranks that Lightning starts
        cfg.ckpt = str(checkpoint)
    return cfg


@contextmanager
def isolated_sweep_job(folder: Path) -> Iterator[None]:
    """Make a sweep job look like a standalone run in ``folder`` to Lightning's launcher.

    Lightning starts further ranks with the program and the command line of this process, in ``hydra.run.dir``, and
    leaves its rank variables in the environment, where the next job would read them.
    """
    from torch import distributed  # --help and mistakes do without

    settings: Any = HydraConfig.get()
    with read_write(settings), open_dict(settings):
        settings.run.dir = settings.runtime.output_dir
    program = sys.modules["__main__"]
    spec, arguments, environment = program.__spec__, sys.argv[1:], dict(os.environ)
    program.__spec__ = find_spec("solrl_lightning.__main__")
    sys.argv[1:] = [*as_written(settings.overrides.task), *searched(own_sources(settings))]
    try:
        with claimed(folder, new=False) if is_first() else nullcontext():
            yield
            if distributed.is_available() and distributed.is_initialized():
                distributed.barrier()  # a rank that Lightning has started waits for this one (launch.end_together)
    finally:
        solrl_lightning.BEGAN = time.perf_counter()  # of the next job in this process
        program.__spec__ = spec
        sys.argv[1:] = arguments
        for name in RANK_VARIABLES - environment.keys():
            os.environ.pop(name, None)
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
            expire_store()
