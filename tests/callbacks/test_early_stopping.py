from lightning.pytorch import callbacks

from solrl_lightning.callbacks.early_stopping import EarlyStopping


def test_resumed_run_has_the_patience_of_its_options():
    before, after = EarlyStopping("eval/shapes", patience=1), EarlyStopping("eval/shapes", patience=3)
    before.wait_count = 1
    assert before.state_key == callbacks.EarlyStopping("eval/shapes").state_key  # of the checkpoints of older versions
    after.load_state_dict(before.state_dict())
    assert (after.patience, after.wait_count) == (3, 1)
