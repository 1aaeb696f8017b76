"""``explorers``: processes elsewhere that explore for the run."""

from solrl_lightning.options.rules import Broken, CountOrZero, Group, Positive
from solrl_lightning.rewards.addresses import check_url


class Explorers(Group):
    urls: list[str]
    """Addresses of task=explore; none: this process explores."""
    max_lag: CountOrZero
    """Iterations by which the weights of an exploration may be older than the policy's."""
    timeout: Positive
    """Seconds without an answer after which an explorer is lost, and the run ends without any."""

    def check(self) -> None:
        for index, url in enumerate(self.urls):
            check_url(f"explorers.urls.{index}", url, "")
        if len(set(self.urls)) < len(self.urls):
            raise Broken("an address stands there twice.", "urls", "Name each once.")
        if self.max_lag and not self.urls:
            raise Broken("only explorers elsewhere lag behind.", "max_lag", "Set explorers.urls, or leave it out.")
