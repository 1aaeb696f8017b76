"""Simulate an iteration of N explorers: python dev/explorers.py; the results are in dev/measurements/explorers.md.

Chunks of candidates take 1 each on an explorer, with a jitter; a lost explorer loses its chunk and stays away. Training
and regeneration take half as long as the whole exploration does on one explorer.
"""

import heapq
import random

CHUNKS, JITTER, REST, AWAY, ITERATIONS = 96, 0.2, 48.0, 30.0, 300


def explore(explorers: int, loss: float, generator: random.Random) -> float:
    """Return the time of an exploration; ``loss`` is the probability that a chunk is lost with its explorer."""
    free = [0.0] * explorers
    waiting, end = CHUNKS, 0.0
    while waiting:
        now = heapq.heappop(free)
        done = now + generator.uniform(1 - JITTER, 1 + JITTER)
        if generator.random() < loss:
            heapq.heappush(free, done + AWAY)
        else:
            heapq.heappush(free, done)
            waiting -= 1
            end = max(end, done)
    return end


def main() -> None:
    print("| explorers | lost chunks | explore | an iteration | with max_lag=1 |\n|---|---|---|---|---|")
    for loss in (0.0, 0.01):
        for explorers in (1, 2, 4, 8, 16):
            generator = random.Random(0)
            times = [explore(explorers, loss, generator) for _ in range(ITERATIONS)]
            mean = sum(times) / len(times)
            ahead = sum(max(time, REST) for time in times) / len(times)
            cells = f"{mean:.1f} | {mean + REST:.1f} | {ahead:.1f}"
            print(f"| {explorers} | {loss:.0%} | {cells} |")


if __name__ == "__main__":
    main()
