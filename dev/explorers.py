"""Measure explorers=ray here, and simulate more explorers: python dev/explorers.py [chunk ...] [key=value ...].

For each chunk size, iterations of exploration in this process and by one explorer follow each other, so that another
load of the machine meets both. ``--simulate`` simulates 1 to 64 explorers with a measured overhead of a chunk.
The results are in dev/measurements/explorers.md.
"""

import argparse
import functools
import heapq
import random
import statistics
import time
from typing import Any

CHUNKS, JITTER, REST, ITERATIONS, WAITING = 384, 0.2, 0.5, 200, 2
"""Chunks of an exploration, their relative spread, the rest of the iteration as a share of E, and requests at once."""


def measure(chunk: int, rounds: int, overrides: list[str]) -> None:
    """Print medians of an exploration's seconds and CPU seconds here and by one explorer, and their ratios.

    The CPU seconds are those of both processes, without Ray's own; the load of the machine changes them least.
    """
    import torch

    from solrl_lightning.build import build_model, build_rewards
    from solrl_lightning.cli.config import ConfigTree, application_config
    from solrl_lightning.data.prompt import identities
    from solrl_lightning.explorers.cluster import explorers_of
    from solrl_lightning.options.run import Run
    from solrl_lightning.run_prompts import prompt_sets
    from solrl_lightning.seeds import pool_seeds

    with ConfigTree() as tree:
        options = ["trainer=cpu", "explorers=ray", f"model.rollout_batch={chunk}", *overrides]
        cfg = Run.of(application_config(tree.compose(options), "outputs/explorers"))
    device = torch.device("cpu")
    module = build_model(cfg, device, {cfg.family.explore.sampler}, build_rewards(cfg.reward, cfg.model.frames, device))
    encoded = module.encode(prompt_sets(cfg).train[: cfg.prompts_per_iteration])
    stage, *_ = cfg.family.stages(module.model.sigmas)

    def pool_of(iteration: int) -> Any:
        return encoded, pool_seeds(cfg.seed, iteration, identities(encoded.prompts), cfg.family.pool)

    begin = time.perf_counter()
    with explorers_of(cfg, 0, 1, device) as explorers:
        import ray

        from solrl_lightning.explorers.sampler import RaySampler

        there = RaySampler(cfg, explorers, module.model, pool_of)

        def cpu_seconds() -> float:
            (explorer,) = explorers
            return time.process_time() + ray.get(explorer.__ray_call__.remote(lambda self: time.process_time()))

        start, idle = time.perf_counter() - begin, []
        seconds: dict[str, list[float]] = {"here": [], "there": []}
        cpu: dict[str, list[float]] = {"here": [], "there": []}
        module.requantize(0)
        there.sync(module.policy_state("old"), 0)
        for iteration in range(rounds + 1):
            for place, sampler in (("here", None), ("there", there)):
                object.__setattr__(module.transformers, "explorers", sampler)
                cpu_before, begin = cpu_seconds(), time.perf_counter()
                module.run_stage(stage, encoded, pool_of(iteration)[1])
                busy = there.metrics()["explorer_seconds"]
                seconds[place].append(time.perf_counter() - begin)
                cpu[place].append(cpu_seconds() - cpu_before)
            idle.append(seconds["there"][-1] / busy - 1)
            there.sync(module.policy_state("old"), iteration + 1)
        chunks = -(-encoded.conditioning[next(iter(encoded.conditioning))].shape[0] * cfg.family.pool // chunk)
        parts = []
        for unit, pair in (("s", seconds), ("CPU s", cpu)):
            here, elsewhere = (statistics.median(values[1:]) / chunks for values in pair.values())
            ratio = statistics.median(b / a for a, b in zip(pair["here"][1:], pair["there"][1:], strict=True))
            parts.append(f"{here:.3f} {unit} each here, {elsewhere:.3f} by an explorer, ratio {ratio:.3f}")
        without = statistics.median(idle[1:])
        print(f"chunks of {chunk}: {'; '.join(parts)}; without work {without:.3f}; start {start:.1f} s", flush=True)


def explore(explorers: int, overhead: float, generator: random.Random) -> float:
    """Return the time of an exploration of `CHUNKS` chunks of 1 each with a jitter, and an overhead in the driver.

    The driver sends one chunk after another, ``overhead`` each; an explorer has `WAITING` of them, so that only the
    driver's rate bounds it.
    """
    free, sent = [0.0] * explorers, 0.0
    heapq.heapify(free)
    for _ in range(CHUNKS):
        sent += overhead
        heapq.heappush(free, max(heapq.heappop(free), sent) + generator.uniform(1 - JITTER, 1 + JITTER))
    return max(free)


def simulate(overhead: float) -> None:
    """Print E/N + R and max(E/N, R) against the simulated iteration, relative to one process."""
    rest = REST * CHUNKS
    print("| explorers | explore | an iteration | E/N + R | with max_lag=1 | max(E/N, R) |\n|---|---|---|---|---|---|")
    for count in (1, 2, 4, 8, 16, 32, 64):
        times = [explore(count, overhead, random.Random(seed)) for seed in range(ITERATIONS)]
        mean, ahead = statistics.fmean(times), statistics.fmean(max(each, rest) for each in times)
        shares = (mean, mean + rest, CHUNKS / count + rest, ahead, max(CHUNKS / count, rest))
        print(f"| {count} | {' | '.join(f'{share / (CHUNKS + rest):.3f}' for share in shares)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="chunk sizes, and options of the run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--simulate", type=float, metavar="OVERHEAD", help="of a chunk, as a share of its seconds")
    arguments = parser.parse_args()
    if arguments.simulate is not None:
        simulate(arguments.simulate)
    chunks = [int(each) for each in arguments.arguments if each.isdigit()]
    overrides = [each for each in arguments.arguments if not each.isdigit()]
    for measured in map(functools.partial(measure, rounds=arguments.rounds, overrides=overrides), chunks):
        assert measured is None


if __name__ == "__main__":
    main()
