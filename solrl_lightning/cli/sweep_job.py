"""A job of a sweep, as Lightning's launcher sees it."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

import solrl_lightning
from solrl_lightning.artifacts.run_folder import claimed
from solrl_lightning.cli.config import as_written, own_sources, searched
from solrl_lightning.cli.launch import expire_store, is_first

RANK_VARIABLES = {"LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


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
    finally:
        solrl_lightning.BEGAN = time.perf_counter()  # of the next job in this process
        program.__spec__ = spec
        sys.argv[1:] = arguments
        for name in RANK_VARIABLES - environment.keys():
            os.environ.pop(name, None)
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
            expire_store()
