import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from solrl_lightning.artifacts.lettering import wrap
from solrl_lightning.artifacts.loggers import TensorBoard, Tracker
from solrl_lightning.artifacts.pictures import Row, draw_grid, to_cell
from solrl_lightning.callbacks import sample_grid
from solrl_lightning.callbacks.sample_grid import SampleGrid


def grid(every=1, seeds=2):
    return SampleGrid(every=every, prompts=2, seeds_per_prompt=seeds, steps=4, seed=0)


def files(tmp_path):
    return sorted(path.name for path in tmp_path.glob("samples/*"))


def test_pictures_are_written_every_few_iterations_and_at_the_end_also_after_a_resume(tmp_path, fit, stand_in):
    module, resumed = stand_in.StandIn(), stand_in.StandIn()
    trainer = fit(grid(every=2), module=module, iterations=3)
    assert files(tmp_path) == ["grid_000002.png", "grid_000003.png", "pool_000002.png", "pool_000003.png"]
    assert module.sampled == ["base", "ema", "ema"]
    assert trainer.fit_loop.stopwatch.seconds["grid"] > 0
    fit(grid(every=2), module=resumed, iterations=4, resumed=trainer)
    assert resumed.sampled == ["base", "ema"] and "grid_000004.png" in files(tmp_path)


def test_first_grid_has_the_base_on_the_left_and_the_average_on_the_right(tmp_path, fit):
    fit(grid())
    with Image.open(tmp_path / "samples" / "grid_000001.png") as picture:
        colours = dict((colour, count) for count, colour in picture.getcolors(1 << 16))
        # 2 prompts x 2 seeds, 16 pixels enlarged 8 times; brightness 0.2 and 0.8.
        assert min(colours[(51, 51, 51)], colours[(204, 204, 204)]) >= 4 * 128 * 128
        assert picture.size[0] == 10 + 128 + 4 + 128 + 20 + 128 + 4 + 128 + 10
        middle = picture.size[0] // 2
        assert picture.crop((0, 0, middle, picture.size[1])).getpixel((20, 150)) == (51, 51, 51)


def test_second_grid_shows_the_images_that_were_scored(tmp_path, fit, monkeypatch):
    drawn = {}

    def noted(title, headings, rows):
        drawn.update({row.caption: row.labels for row in rows})
        return draw_grid(title, headings, rows)

    monkeypatch.setattr(sample_grid, "draw_grid", noted)
    rewards = fit(grid()).fit_loop.rollouts.rewards[0].sort(descending=True).values
    with Image.open(tmp_path / "samples" / "pool_000001.png") as picture:
        colours = {colour for count, colour in picture.getcolors(1 << 16) if count >= 128 * 128}
    greys = {round(float(reward) * 255) for reward in rewards}
    assert {(grey, grey, grey) for grey in greys} <= colours
    labels = [f"{reward:.3f}" for reward in rewards.tolist()]
    assert (drawn["best"], drawn["worst"]) == (labels[:2], labels[-2:])
    fit(grid(seeds=8))  # more than half of the samples: none is in both rows
    assert (drawn["best"], drawn["worst"]) == (labels[: len(labels) // 2], labels[len(labels) // 2 :])


def test_rank_without_prompts_draws_no_pool_and_every_zero_nothing(tmp_path, fit, stand_in):
    fit(grid(every=0))
    assert files(tmp_path) == []
    fit(grid(), roll_out=stand_in.RollOut(prompts=()))
    assert files(tmp_path) == ["grid_000001.png"]


def test_tensorboard_shows_the_pictures(tmp_path, fit):
    fit(grid(), iterations=2, logger=Tracker("tensorboard", TensorBoard(tmp_path, name="", version="tensorboard")))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in ("grid", "pool"):
        assert [event.step for event in events.Images(f"samples/{name}")] == [1, 2]


def test_small_images_are_enlarged_by_an_integer_factor_and_large_ones_shrunk():
    for size, expected in {(48, 48): (144, 144), (256, 256): (256, 256), (1024, 512): (256, 512)}.items():
        assert to_cell(torch.rand(3, *size)).size == expected


def test_letters_that_are_not_ascii_are_drawn():
    def drawn(caption):
        return draw_grid("title", ["heading"], [Row(caption, [torch.zeros(1, 3, 16, 16)])]).tobytes()

    nothing = drawn("\uffff"), drawn("")  # \uffff has no glyph in any font
    assert all(drawn(letter) not in nothing for letter in "éжλ„")


def test_text_of_any_length_and_script_is_cut_at_the_edge_of_the_picture():
    captions = ["word " * 200, "x" * 900, "é 赤い円 🟥", ""]
    rows = [Row(caption, [torch.rand(1, 3, 16, 16)], ["0.500"]) for caption in captions]
    assert draw_grid("t" * 500, ["h" * 500], rows).width == 420
    title = "4 best and 4 worst of 24, iteration 100"
    assert wrap(title, 420 - 2 * 10, 16) == [title]
    one, other = (f"Same held-out prompts, same noise; {reward} below" for reward in ("shapes", "colour"))
    assert draw_grid(one, ["h"], rows).tobytes() != draw_grid(other, ["h"], rows).tobytes(), "a title has two lines"
    assert wrap("word " * 200, 100, 13) == ["word word…"]
    assert wrap("", 100, 13) == []
