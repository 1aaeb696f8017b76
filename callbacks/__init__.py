"""Lightning callbacks: what watches, records and refreshes around the loop; installed as ``solrl_lightning.callbacks``."""
