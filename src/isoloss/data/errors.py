"""What is wrong with data, with its place."""


class DataError(ValueError):
    """Data that cannot be used; the message names file, line, field, and what to do."""


class RowError(ValueError):
    """What is wrong with one row; whoever knows its place makes a `DataError` of it."""
