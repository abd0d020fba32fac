"""What is wrong with data, with its place."""


class DataError(ValueError):
    """Data that cannot be used; the message names file, line, field, and what to do."""


class RowError(ValueError):
    """What is wrong with one row; whoever knows its place makes a `DataError` of it.

    Args:
        message: what was expected, what came, what to do.
        column: where in its line the row goes wrong, from 1; None: not in one place.
    """

    def __init__(self, message: str, column: int | None = None) -> None:
        super().__init__(message)
        self.column = column

    def at(self, place: str) -> str:
        """The message behind the place of the row."""
        return f"{place}: {self}" if self.column is None else f"{place}:{self.column}: {self}"
