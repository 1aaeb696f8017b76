import json

import pytest
import torch
from forks import two_ranks

from solrl_lightning.seeds import pool_seeds


@pytest.mark.slow
def test_two_ranks_with_uneven_prompts_log_the_values_of_one_rank_with_all_prompts(tmp_path, stand_in, forks):
    ended = forks.ranks(tmp_path, two_ranks(), str(tmp_path), target="callbacks/two_ranks:train")
    assert [each.status for each in ended] == [0, 0], ended
    rows = json.loads((tmp_path / "metrics.json").read_text())

    for iteration, prompts in enumerate(["ab", "cde"]):
        pool = stand_in.rewards_of(pool_seeds(0, iteration, list(prompts), stand_in.POOL)).sort(dim=1).values
        half = stand_in.KEEP // 2
        kept = torch.cat([pool[:, :half], pool[:, -half:]], dim=1)
        row = rows[iteration]
        assert row["reward/mean"] == pytest.approx(float(kept.mean()), abs=1e-6)
        assert row["reward/std"] == pytest.approx(float(kept.std(correction=0)), abs=1e-6)
        assert row["explore/proxy_reward"] == pytest.approx(float(pool.mean()) * 0.5 - 1, abs=1e-6)
        assert row["rank/spearman"] == pytest.approx(1.0, abs=1e-5)
        assert row["rank/kept_kendall"] == pytest.approx(1.0, abs=1e-5)
        assert row["reward/zero_std_fraction"] == 0.0
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    pictures = "grid_000001.png grid_000002.png pool_000002.png"  # in iteration 0 rank 0 has no pool to draw
    assert " ".join(sorted(path.name for path in (tmp_path / "samples").iterdir())) == pictures
    assert ended[0].output.count("completed after 2 iterations") == 1
