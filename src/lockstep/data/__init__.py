"""Data sets, sharding, augmentation and loaders; start at `catalog.py`, or at `loaders.py` for a loop of your own."""
