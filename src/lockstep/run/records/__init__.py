"""The folder of a run and what is recorded in it: `run_folder`, `trackers`, and those of `tracking_services`."""
