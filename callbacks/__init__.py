"""Lightning callbacks that watch, record and refresh around the loop; installed as ``solrl_lightning.callbacks``."""
