"""Data sources, chat templates, and lanes that any number of ranks can read and resume."""
