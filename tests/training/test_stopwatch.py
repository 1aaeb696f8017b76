import pytest

from solrl_lightning.training.stopwatch import Stopwatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_counts_for_innermost_stage_only(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    clock.now += 50  # before any stage
    with stopwatch.stage("explore"):
        clock.now += 1
        assert stopwatch.seconds == {"explore": 1}
        with stopwatch.stage("requantize"):
            clock.now += 10
            with stopwatch.stage("requantize"):
                clock.now += 20
        clock.now += 2
    clock.now += 50  # between stages
    for _ in range(2):
        with stopwatch.stage("train"):
            clock.now += 4
    assert stopwatch.seconds == {"explore": 3, "requantize": 30, "train": 8}
    assert list(stopwatch.seconds) == ["explore", "requantize", "train"]


def test_since_returns_stages_that_ran_since(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    with stopwatch.stage("explore"):
        clock.now += 1
    earlier = stopwatch.seconds
    with stopwatch.stage("train"):
        clock.now += 5
        assert stopwatch.since(earlier) == {"train": 5}
        with stopwatch.stage("evaluate"):
            clock.now += 2
        assert stopwatch.elapsed == 7
    assert stopwatch.since({}) == {"explore": 1, "train": 5, "evaluate": 2}
    assert stopwatch.elapsed == 0


def test_only_a_change_of_stage_synchronizes(clock: Clock) -> None:
    calls: list[float] = []
    stopwatch = Stopwatch(clock, lambda: calls.append(clock.now))
    with stopwatch.stage("explore"):
        clock.now += 3
        stopwatch.progress(1, 2)
        assert stopwatch.elapsed == 3 and len(calls) == 1
    assert len(calls) == 2 and stopwatch.seconds == {"explore": 3}


def test_failed_stage_is_counted_and_left(clock: Clock) -> None:
    stopwatch = Stopwatch(clock)
    with pytest.raises(KeyboardInterrupt), stopwatch.stage("explore"), stopwatch.stage("decode"):
        clock.now += 3
        raise KeyboardInterrupt
    assert stopwatch.seconds == {"explore": 0, "decode": 3}
    assert stopwatch.current == ""


def test_on_change_is_called_for_stages_and_progress() -> None:
    stopwatch = Stopwatch()
    seen: list[tuple[str, int, int]] = []
    stopwatch.on_change.append(lambda: seen.append((stopwatch.current, stopwatch.done, stopwatch.total)))
    with stopwatch.stage("explore"):
        stopwatch.progress(1, 4)
        with stopwatch.stage("requantize"):
            stopwatch.progress(2, 3)
    inner = [("requantize", 0, 0), ("requantize", 2, 3)]
    assert seen == [("explore", 0, 0), ("explore", 1, 4), *inner, ("explore", 1, 4), ("", 0, 0)]
    assert stopwatch.seconds["explore"] > 0  # by the clock of the process
