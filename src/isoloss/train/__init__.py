"""The trainer: recipes, the loop, checkpoints, trackers and progress."""
