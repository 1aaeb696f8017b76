"""A callback that keeps a rank that Lightning has started from meeting the first one; see test_ddp."""

import os
import time
from pathlib import Path

from lightning.pytorch import Callback


class LateRank1(Callback):
    """Writes the process id of rank 1 to the file ``pid`` and waits."""

    def __init__(self) -> None:
        if os.environ.get("LOCAL_RANK") == "1":
            Path("pid.tmp").write_text(str(os.getpid()))
            os.replace("pid.tmp", "pid")
            time.sleep(120)
