"""The training loop, the LightningModule and what samples for them."""
