"""Seeds of one exploration over several iterations, in closed form; test_loop.py and test_ddp.py train on them."""

import pytest
import torch

from solrl_lightning.data.prompts import PromptSchedule
from solrl_lightning.rollout.explore import Kept
from solrl_lightning.training.kept_seeds import KeptSeeds

PROMPTS = [f"prompt {i}" for i in range(12)]
K = 4


def explore(iteration: int, prompts: list[str], sets: int) -> Kept:
    """Seeds that tell the iteration, the prompt, the set and their place."""
    numbers = [1000 * iteration + 100 * PROMPTS.index(prompt) for prompt in prompts]
    seeds = torch.tensor(numbers)[:, None, None] + 10 * torch.arange(sets)[:, None] + torch.arange(K)
    return Kept(seeds + 2**31, seeds / 2**14)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("uses", [1, 2, 3])
def test_each_iteration_of_a_prompt_takes_the_next_set_of_its_exploration(uses: int, same: bool) -> None:
    schedule = PromptSchedule(PROMPTS, 6, seed=1, uses=uses)
    sets = 1 if same else uses
    kept, explored = KeptSeeds(schedule, sets), {}
    for iteration in range(12):
        prompts, reused = schedule.for_iteration(iteration), kept.reused(iteration)
        assert reused == schedule.repeated(iteration)
        new, old = prompts[: 6 - reused], prompts[6 - reused :]
        if old:
            seeds, merits = kept.next_set(old)
            for prompt, actual, merit in zip(old, seeds[:, 0], merits[:, 0], strict=True):
                first = explored[prompt]
                expected = explore(first, [prompt], sets)
                number = 0 if same else iteration - first
                assert torch.equal(actual, expected.seeds[0, number])
                assert torch.equal(merit, expected.merits[0, number])
        explored |= dict.fromkeys(new, iteration)
        kept.keep(iteration, explore(iteration, new, sets))
        kept.keep(iteration, explore(iteration, new, sets))  # an iteration may be repeated
        state = KeptSeeds(schedule, sets)
        kept.advance()
        state.load_state_dict(kept.state_dict())
        kept = state
