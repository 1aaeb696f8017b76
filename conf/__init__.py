"""The configuration tree, which is also the manual; installed as ``solrl_lightning.conf``."""
