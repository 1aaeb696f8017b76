"""Lightning callbacks around the training loop. Installed as ``solrl_lightning.callbacks``."""
