"""Starting the workers of a job."""
