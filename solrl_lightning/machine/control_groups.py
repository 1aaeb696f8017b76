"""Limits of the control groups (cgroups(7), version 1 and 2) of this process.

A container sees its group as the root of the mount. Elsewhere a group is a path below it, and every folder of the path
may have a limit: systemd's CPUQuota is one, and a step of SLURM has one.
"""

from collections.abc import Iterator
from pathlib import Path

GROUPS, MOUNTS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def limits(controller: str, new: tuple[str, ...], old: tuple[str, ...], groups: Path, mounts: Path) -> Iterator[str]:
    """Yield the text of the files ``new`` (version 2) or ``old`` (version 1) of each group that has them, in one line.

    Args:
        controller: as "cpu" or "memory".
        groups: the file that names this process's groups.
        mounts: the folder of version 2; it has the folders of the controllers of version 1.
    """
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = mounts / controller if controllers else mounts
        group, files = mount / path.lstrip("/"), old if controllers else new
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            if all((folder / file).is_file() for file in files):
                yield " ".join((folder / file).read_text().strip() for file in files)
