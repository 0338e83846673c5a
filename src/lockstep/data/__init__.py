"""Data sets, sharding, augmentation and loaders. A newcomer starts at `catalog.py`; users' own loops at `loaders.py`."""
