from solrl_lightning.callbacks.requantize import Requantize


def test_replicas_are_synchronised_before_every_exploration_and_after_a_resume(tmp_path, stand_in):
    module, trainer = stand_in.Module(), stand_in.trainer(tmp_path, [Requantize()], max_epochs=2)
    trainer.fit(module, stand_in.micro_batches())
    assert module.events == ["requantize 0", "explore", "train", "requantize 1", "explore", "train"]

    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed, trainer = stand_in.Module(), stand_in.trainer(tmp_path, [Requantize()], max_epochs=3)
    trainer.fit(resumed, stand_in.micro_batches(), ckpt_path=tmp_path / "x.ckpt")
    assert resumed.events == ["requantize 2", "explore", "train"]
