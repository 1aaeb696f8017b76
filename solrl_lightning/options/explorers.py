"""``explorers``: what explores for the run; the options of ``explorers=ray``."""

from solrl_lightning.names import AUTO, check_backend
from solrl_lightning.options.rules import Broken, Compile, Count, CountOrZero, Group, NotNegative


class Resources(Group):
    num_cpus: NotNegative = 1
    """Cores that Ray reserves."""
    num_gpus: NotNegative | None = None
    """GPUs that Ray reserves; null: 1 if the cluster has any."""
    label_selector: dict[str, str] = {}
    """Labels of the node, by Ray's syntax of label selectors."""


class Explorers(Group):
    count: CountOrZero
    """Explorers, of all ranks together, at least one of each; 0: this process explores."""
    resources: Resources = Resources()
    """What Ray reserves for each."""
    address: str | None = None
    """Cluster: null starts one on this machine, for this run; auto is the one of this machine, or <host>:6379, or
    ray://<host>:10001 (Ray Client; not tried)."""
    max_lag: CountOrZero = 0
    """Iterations by which the weights of an exploration may be older than the policy's; 1 explores during training."""
    precision: str | None = None
    """Number format of the explorers' shadow; null: the run's."""
    rollout_batch: Count | None = None
    """Candidates in a forward pass; null: model.rollout_batch."""
    compile: Compile | None = None
    """Compilation of the explorers' sampling; null: family.compile."""

    def check(self) -> None:
        others = self.model_fields_set - {"count"}
        if bool(self.count) != bool(others):
            fix = "Use explorers=ray, or explorers=none."
            raise Broken("explorers=none has 0 and no other option, explorers=ray at least 1.", "count", fix)
        if self.precision is not None:
            check_backend(self.precision, AUTO)
