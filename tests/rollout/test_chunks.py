"""One stage of a rollout on the real classes: chunks, padding, prompts of candidates, and non-finite rewards."""

import pickle
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from nano import PROMPTS, load_model, prompts_of, relative_error, save_nano
from torch import Tensor, nn

from solrl_lightning.data.prompt import Prompt, identities
from solrl_lightning.errors import NonFiniteError, UserError
from solrl_lightning.objectives.advantages import group_advantages
from solrl_lightning.policies.flux1 import Flux1
from solrl_lightning.rewards.base import Metadata, Reward
from solrl_lightning.rewards.weighted import WeightedRewards
from solrl_lightning.rollout.chunks import (
    BatchSize,
    check_finite,
    check_finite_merits,
    fill_missing,
    iter_sampled_chunks,
    score_chunks,
    score_images,
)
from solrl_lightning.rollout.records import Candidates, EncodedPrompts
from solrl_lightning.rollout.scoring_worker import background_worker, inline_worker
from solrl_lightning.rollout.select import select_contrastive
from solrl_lightning.rollout.stage import Stage
from solrl_lightning.sampling import SolverState, start
from solrl_lightning.seeds import pool_seeds
from solrl_lightning.training.sharding import FixedBatchSize

SEEDS = pool_seeds(0, 0, PROMPTS, 5)  # 15 candidates of 3 prompts
TEXTS = [prompt for prompt in PROMPTS for _ in range(5)]


class Recorder(Flux1):
    """Records the seeds of every chunk and the rows of every forward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seeds: list[list[int]] = []
        self.rows: list[int] = []

    def noise(self, seeds: Tensor) -> Tensor:
        self.seeds.append(seeds.tolist())
        return super().noise(seeds)

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: dict[str, Tensor]) -> Tensor:
        assert {len(value) for value in conditioning.values()} == {len(x)}
        self.rows.append(len(x))
        return super().velocity(transformer, x, sigma, conditioning)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_nano(tmp_path_factory.mktemp("nano"))


@pytest.fixture
def model(folder: str) -> Recorder:
    return load_model(folder, model_class=Recorder, embeddings=f"{folder}/embeddings")  # text encoders once


def brightness(images: Tensor, prompts: list[str]) -> Tensor:
    return images.mean((1, 2, 3))


def nan(images: Tensor, prompts: list[str]) -> Tensor:
    return images[:, 0, 0, 0] * torch.nan


class Made(Reward):
    """Reward computed by a function."""

    name = "made"

    def __init__(self, function: Callable[[Tensor, list[str]], Tensor]) -> None:
        self.function = function

    def score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.function(images, prompts)


def run(
    model: Flux1,
    batch: int | BatchSize = 4,
    solver: str = "euler",
    reward: Callable[[Tensor, list[str]], Tensor] = brightness,
    seeds: Tensor = SEEDS,
    texts: list[str] = PROMPTS,
    steps: int = 2,
    decode: Callable[[Tensor], Tensor] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    overlap: bool = False,
    only_ranks: bool = False,
    with_states: bool = True,
    initial_state: SolverState | None = None,
    stop_after: int | None = None,
    shared_noise: bool = False,
) -> Candidates:
    """Samples ``seeds`` in batches, which are of a fixed size unless a `BatchSize` says otherwise."""
    batch_size = batch if isinstance(batch, BatchSize) else BatchSize(batch, True)
    prompts = EncodedPrompts(prompts_of(texts), model.encode(prompts_of(texts)))
    stage = Stage(sampler="merged", steps=steps, stop_after=stop_after).but(solver=solver, shared_noise=shared_noise)
    chunks = iter_sampled_chunks(model, model.transformer, batch_size, stage, prompts, seeds, initial_state)
    score = partial(score_images, decode or model.decode, nan_images=only_ranks)
    worker = partial(background_worker, model.device) if overlap else inline_worker
    rewards = WeightedRewards({"made": Made(reward)}, {"made": 1.0})
    return score_chunks(chunks, prompts, seeds, rewards, score, progress, worker, with_states)


SIZES = [(1, False), (4, False), (4, True), (15, True), (96, False), (96, True)]


@pytest.mark.parametrize(("batch", "fixed_batch"), SIZES)
def test_result_is_independent_of_chunks_and_padding(model: Recorder, batch: int, fixed_batch: bool) -> None:
    whole = run(model, BatchSize(15, False))
    model.seeds, model.rows, progress = [], [], []
    actual = run(model, BatchSize(batch, fixed_batch), progress=lambda done, total: progress.append((done, total)))
    assert torch.equal(actual.seeds, SEEDS)
    assert actual.x0.shape == (3, 5, 16, 32) and actual.x0.dtype == torch.float32
    assert actual.rewards.shape == (3, 5) and actual.rewards.dtype == torch.float32
    assert relative_error(actual.x0, whole.x0) < 2**-7
    torch.testing.assert_close(actual.rewards, whole.rewards, rtol=0, atol=2**-8)
    assert batch != 15 or torch.equal(actual.x0, whole.x0) and torch.equal(actual.rewards, whole.rewards)
    assert progress == [(done, 15) for done in (*range(0, 15, batch), 15)]

    chunks = [SEEDS.flatten().tolist()[first : first + batch] for first in range(0, 15, batch)]
    assert [seen[: len(chunk)] for seen, chunk in zip(model.seeds, chunks, strict=True)] == chunks
    sizes = [batch if fixed_batch else len(chunk) for chunk in chunks]
    assert [len(seen) for seen in model.seeds] == sizes
    assert model.rows == [size for size in sizes for _ in range(2)]  # two solver steps each


def test_candidate_is_sampled_from_its_prompt_and_seed(model: Recorder) -> None:
    model.transformer.float()  # so that rounding does not hide a wrong row
    pool = run(model, 4, "dpm2")
    for row, column in ((0, 0), (0, 4), (1, 2), (2, 4)):
        seeds = SEEDS[row, column].view(1, 1)
        alone = run(model, 1, "dpm2", seeds=seeds, texts=[PROMPTS[row]])
        torch.testing.assert_close(alone.x0[0, 0], pool.x0[row, column], rtol=0, atol=1e-4)
        torch.testing.assert_close(alone.rewards[0, 0], pool.rewards[row, column], rtol=0, atol=1e-4)
    wrong_prompt = run(model, 1, "dpm2", seeds=seeds, texts=[PROMPTS[0]])
    assert (wrong_prompt.x0[0, 0] - pool.x0[2, 4]).abs().max() > 1e-2


def test_reward_receives_decoded_images_with_their_prompts(model: Recorder) -> None:
    seen: list[tuple[Tensor, list[str]]] = []

    def reward(images: Tensor, prompts: list[str]) -> Tensor:
        seen.append((images, prompts))
        return brightness(images, prompts).double()

    actual = run(model, reward=reward)
    assert [len(prompts) for _, prompts in seen] == [4, 4, 4, 3]  # never the padding
    assert [prompt for _, prompts in seen for prompt in prompts] == TEXTS
    images = torch.cat([images for images, _ in seen])
    assert images.shape == (15, 3, 32, 32)
    torch.testing.assert_close(images, model.decode(actual.x0.flatten(0, 1)), rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.rewards.flatten(), brightness(images, []), rtol=0, atol=1e-6)


def test_prompts_of_equal_text_are_scored_with_their_own_metadata(model: Recorder) -> None:
    class Counting(Reward):
        def score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Tensor:
            return torch.tensor([row["n"] for row in metadata])

    prompts = [Prompt("a star", {"n": number}) for number in (1, 2)]
    assert len(set(prompts)) == 2 and len(set(identities(prompts))) == 1
    assert pickle.loads(pickle.dumps(prompts)) == prompts
    everything = EncodedPrompts(prompts, model.encode(prompts))
    encoded = everything.gather(torch.tensor([everything.prompts.index(prompt) for prompt in prompts]))
    seeds, stage = pool_seeds(0, 0, identities(prompts), 3), Stage(sampler="merged", steps=1, solver="euler")
    chunks = iter_sampled_chunks(model, model.transformer, BatchSize(4, False), stage, encoded, seeds)
    rewards, score = WeightedRewards({"n": Counting()}, {"n": 1.0}), partial(score_images, model.decode)
    actual = score_chunks(chunks, encoded, seeds, rewards, score, lambda done, total: None, inline_worker)
    assert actual.rewards.tolist() == [[1.0] * 3, [2.0] * 3]
    torch.testing.assert_close(actual.x0[0], actual.x0[1], rtol=0, atol=1e-5)  # the text and the seeds are equal


def test_latents_are_usable_by_autograd_and_have_no_graph(model: Recorder) -> None:
    model.transformer.requires_grad_(True)
    actual = run(model, 8)
    assert not actual.x0.requires_grad and not actual.x0.is_inference()
    weight = torch.ones((), requires_grad=True)
    (weight * actual.x0).sum().backward()
    assert weight.grad is not None


def test_chunks_are_yielded_one_at_a_time(model: Recorder) -> None:
    prompts = EncodedPrompts(prompts_of(PROMPTS), model.encode(prompts_of(PROMPTS)))
    stage = Stage(sampler="merged", steps=1, solver="euler")
    chunks = iter_sampled_chunks(model, model.transformer, BatchSize(6, True), stage, prompts, SEEDS)
    index, state, *_ = next(chunks)
    assert index.tolist() == list(range(6)) and len(state.x) == 6 and len(model.seeds) == 1
    assert torch.is_grad_enabled()  # also between two chunks
    rest = [(index.tolist(), len(state.x)) for index, state, *_ in chunks]
    assert rest == [(list(range(6, 12)), 6), (list(range(12, 15)), 3)]


@pytest.mark.parametrize(("position", "value"), [(0, torch.nan), (7, torch.inf), (14, -torch.inf)])
def test_warning_about_a_non_finite_reward_names_prompt_and_seed(
    model: Recorder, caplog: pytest.LogCaptureFixture, position: int, value: float
) -> None:
    whole = run(model).rewards.flatten()

    def reward(images: Tensor, prompts: list[str]) -> Tensor:
        scores = brightness(images, prompts)
        return torch.where((scores - whole[position]).abs() < 1e-6, value, scores)

    rewards = run(model, reward=reward).rewards.flatten()
    assert rewards.isnan().nonzero().flatten().tolist() == [position]
    (record,) = caplog.records
    assert f"reward made is {value}" in record.message
    assert repr(TEXTS[position]) in record.message and f"seed {SEEDS.flatten()[position]}" in record.message


def test_background_worker_gives_same_scores_as_inline_worker(model: Recorder) -> None:
    threads: list[str] = []

    def reward(images: Tensor, prompts: list[str]) -> Tensor:
        assert not torch.is_grad_enabled()
        threads.append(threading.current_thread().name)
        return brightness(images, prompts)

    plain = run(model)
    actual = run(model, reward=reward, overlap=True)
    assert torch.equal(actual.x0, plain.x0) and torch.equal(actual.rewards, plain.rewards)
    assert len(threads) == 4 and len(set(threads)) == 1 and threads[0] != threading.current_thread().name
    assert run(model, reward=nan, overlap=True).rewards.isnan().all()


def test_check_finite_names_first_non_finite_value() -> None:
    values = torch.tensor([0.0, 1.0, float("nan"), float("inf")])
    with pytest.raises(
        NonFiniteError, match=r"the loss is nan for the prompt 'c' with seed 12\. Correct the objective"
    ):
        check_finite(values, "loss", prompts_of("abcd"), torch.tensor([10, 11, 12, 13]))
    check_finite(values[:2], "loss", prompts_of("ab"), torch.tensor([10, 11]))


@pytest.mark.parametrize("overlap", [False, True])
def test_latents_that_nothing_reads_are_freed_chunk_by_chunk(model: Recorder, overlap: bool) -> None:
    decoded: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def decode(x0: Tensor) -> Tensor:
        alive.append(sum(latents() is not None for latents in decoded))
        decoded.append(weakref.ref(x0))
        return model.decode(x0)

    def run_with(with_states: bool) -> Candidates:
        decoded.clear()
        alive.clear()
        return run(model, BatchSize(3, False), decode=decode, overlap=overlap, with_states=with_states)

    whole = run_with(True)
    assert alive == [0, 1, 2, 3, 4]
    scored = run_with(False)
    assert (overlap or alive == [0] * 5) and not any(latents() is not None for latents in decoded)
    assert scored.state is None and scored.recorded_steps is None
    assert torch.equal(scored.rewards, whole.rewards) and torch.equal(scored.merits, whole.merits)


def test_shared_noise_is_that_of_the_first_seed(model: Recorder) -> None:
    shared, expected = run(model, shared_noise=True), run(model, seeds=SEEDS[:, :1].expand_as(SEEDS))
    assert torch.equal(shared.x0, expected.x0) and torch.equal(shared.seeds, SEEDS)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_kept_trajectories_resume_from_their_state(model: Recorder, solver: str) -> None:
    model.transformer.float()
    whole = run(model, 4, solver, steps=5)
    assert torch.equal(whole.state.x, whole.x0)
    pool = run(model, 4, solver, steps=5, stop_after=3)
    assert not torch.equal(pool.state.x, pool.x0)  # the noisy latents, and the image that they predict
    of_image, of_noise = (brightness(model.decode(x.flatten(0, 1)), []) for x in (pool.x0, pool.state.x))
    torch.testing.assert_close(pool.rewards.flatten(), of_image, rtol=0, atol=1e-6)
    assert (of_image - of_noise).abs().max() > 1e-3
    chosen = torch.tensor([[4, 0], [1, 2], [3, 1]])
    kept, expected = pool.take(chosen), whole.take(chosen)
    model.rows = []
    actual = run(model, BatchSize(3, False), solver, seeds=kept.seeds, steps=5, initial_state=kept.state)
    assert model.rows == [3] * 4  # the two remaining steps of two chunks
    torch.testing.assert_close(actual.x0, expected.x0, rtol=0, atol=1e-4)
    torch.testing.assert_close(actual.rewards, expected.rewards, rtol=0, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_non_finite_explored_candidate_is_never_selected(
    model: Recorder, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {2: torch.nan, 9: torch.inf}  # candidates: an image, a reward; the latter in a chunk of two prompts

    def of_prompts(images: Tensor, prompts: list[str]) -> Tensor:
        return brightness(images, prompts) + torch.tensor([float(PROMPTS.index(prompt)) for prompt in prompts])

    expected = run(model, reward=of_prompts)
    decoded = expected.x0.flatten(0, 1)

    def decode(x: Tensor) -> Tensor:
        images = model.decode(x)
        images[(x == decoded[2]).flatten(1).all(1)] = torch.nan
        return images

    def reward(images: Tensor, prompts: list[str]) -> Tensor:
        scores = of_prompts(images, prompts)
        scores[(scores - expected.rewards.flatten()[9]).abs() < 1e-6] = torch.inf
        return scores

    actual = run(model, reward=reward, overlap=overlap, decode=decode, only_ranks=True)
    rewards = actual.rewards.flatten()
    assert rewards.isnan().nonzero().flatten().tolist() == list(broken)
    others = ~rewards.isnan()
    torch.testing.assert_close(rewards[others], expected.rewards.flatten()[others], rtol=0, atol=1e-5)
    for i, record in zip(broken, caplog.records, strict=True):
        assert "1 of 4 images have no finite reward and do not count" in record.message
        assert record.message.endswith(f"with seed {SEEDS.flatten()[i]}")
    chosen = select_contrastive(actual.rewards, 4)
    assert not actual.take(chosen).rewards.isnan().any()
    with pytest.raises(NonFiniteError, match="NaN for the prompt"):
        run(model, reward=reward, overlap=overlap, decode=decode)


def test_too_few_finite_rewards_error_names_prompt() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [1.0, torch.nan, torch.inf]])
    check_finite_merits(rewards, 1, prompts_of("ab"))
    with pytest.raises(NonFiniteError, match="1 of 3 candidates .* for the prompt 'b', fewer than the 2 that are"):
        check_finite_merits(rewards, 2, prompts_of("ab"))


def test_sample_without_a_finite_reward_gets_the_means_of_its_prompt() -> None:
    scores = torch.tensor([[[1.0, 10.0], [torch.nan, torch.nan], [4.0, 30.0]], [[2.0, 3.0], [5.0, 1.0], [0.0, 0.0]]])
    rewards = WeightedRewards({name: Made(brightness) for name in "ab"}, {"a": 1.0, "b": 0.5})
    state = start(torch.arange(6.0).view(2, 3, 1))
    candidates = Candidates(SEEDS[:2, :3], state, rewards.total(scores), scores, rewards.merits(scores))
    filled = fill_missing(candidates, prompts_of("ab"))
    expected = scores.clone()
    expected[0, 1] = torch.tensor([2.5, 20.0])
    assert torch.equal(filled.scores, expected) and filled.state is state
    assert torch.equal(filled.rewards, rewards.total(expected)) and torch.equal(filled.merits, filled.rewards)
    assert group_advantages(filled.merits)[0, 1] == 0
    without = candidates._replace(merits=candidates.merits * torch.tensor([[torch.nan], [1.0]]))
    with pytest.raises(NonFiniteError, match="0 of 3 candidates have a finite reward for the prompt 'a', fewer than"):
        fill_missing(without, prompts_of("ab"))


class SmallMemory(Recorder):
    """Runs out of memory with more than three candidates."""

    def velocity(self, transformer: nn.Module, x: Tensor, sigma: Tensor, conditioning: dict[str, Tensor]) -> Tensor:
        if len(x) > 3:
            raise torch.OutOfMemoryError("three rows at most")
        return super().velocity(transformer, x, sigma, conditioning)


@pytest.mark.parametrize("fixed_batch", [False, True])
def test_batch_is_halved_permanently_after_out_of_memory(
    folder: str, model: Recorder, fixed_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    small, batch_size = load_model(folder, model_class=SmallMemory), BatchSize(8, fixed_batch)
    for each in (small, model):
        each.transformer.float()
    torch.testing.assert_close(run(small, batch_size).x0, run(model, 8).x0, rtol=0, atol=1e-4)
    assert batch_size.size == 2 and [record.message for record in caplog.records] == [
        f"out of memory: sampling continues with {size} candidates in one forward pass" for size in (4, 2)
    ]


def test_batch_is_not_halved_if_it_fits_after_emptying_cache(
    model: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emptied: list[bool] = []
    velocity = model.velocity

    def fragmented(*args: Any) -> Tensor:
        if not emptied:
            raise torch.OutOfMemoryError("other streams hold the memory")
        return velocity(*args)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(model, "velocity", fragmented)
    batch_size = BatchSize(8, False)
    run(model, batch_size)
    assert (batch_size.size, emptied, caplog.records) == (8, [True], [])


def test_batch_of_sharded_weights_is_neither_repeated_nor_halved(folder: str) -> None:
    model, batch_size = load_model(folder, model_class=SmallMemory), FixedBatchSize(8, False)
    with pytest.raises(UserError, match=r"^model.rollout_batch=8 is invalid: .* Set model.rollout_batch=4\.$"):
        run(model, batch_size)
    assert len(model.seeds) == 1 and batch_size.size == 8


def test_all_stages_score_in_one_thread_and_stream_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new thread cuDNN times convolutions again. Streams and devices are recorded, because there is no GPU."""
    device, settings, streams = torch.device("cuda", 62), [], []  # of no other test: both are kept for the process
    threads = set()

    def stream(device: torch.device) -> MagicMock:
        streams.append(device)
        return MagicMock()

    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: settings.append((threading.current_thread().name, device))
    )
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for _ in range(2):
        with background_worker(device) as submit:
            threads.add(submit(threading.current_thread).result())
    (thread,) = threads
    assert settings == [(thread.name, device)] and thread is not threading.current_thread()
    assert streams == [device]


def test_out_of_memory_with_one_candidate_raises(model: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("nothing fits")

    monkeypatch.setattr(model, "velocity", nothing_fits)
    with pytest.raises(torch.OutOfMemoryError, match="nothing fits"):
        run(model)


def test_image_without_a_score_of_a_reward_of_weight_0_counts_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def refusing(images: Tensor, prompts: list[str]) -> Tensor:
        return torch.tensor([torch.nan, 1.0])

    rewards = WeightedRewards({"bright": Made(brightness), "watched": Made(refusing)}, {"bright": 1.0, "watched": 0.0})
    images = torch.rand(2, 3, 4, 4)
    scores = score_images(lambda x0: x0, rewards, images, prompts_of("ab"), torch.arange(2))
    assert torch.equal(scores[:, 0], brightness(images, [])) and scores[:, 1].isnan().tolist() == [True, False]
    assert "1 of 2 images do not count for a reward of weight 0: " in caplog.text


def test_gather_selects_prompts_and_embeddings() -> None:
    conditioning: dict[str, Any] = {"x": torch.arange(6).view(3, 2), "y": torch.arange(3)}
    prompts, rows = EncodedPrompts(prompts_of("abc"), conditioning).gather(torch.tensor([2, 0, 2, 1]))
    assert prompts == prompts_of("cacb")
    assert rows["x"].tolist() == [[4, 5], [0, 1], [4, 5], [2, 3]] and rows["y"].tolist() == [2, 0, 2, 1]


def test_work_that_waits_behind_an_error_is_not_done() -> None:
    done: list[int] = []
    first = threading.Event()

    def fail() -> Tensor:
        first.wait()
        raise RuntimeError("no answer")

    def work(number: int) -> None:
        time.sleep(0.05)
        done.append(number)

    with pytest.raises(RuntimeError, match="no answer"), background_worker(torch.device("cpu")) as submit:
        futures = [submit(fail), *(submit(partial(work, number)) for number in range(3))]
        first.set()
        futures[0].result()
    count = len(done)
    assert count < 3 and futures[-1].cancelled() and all(future.done() for future in futures)
    with background_worker(torch.device("cpu")) as submit:  # the next stage
        assert submit(partial(len, done)).result() == count
