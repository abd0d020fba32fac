"""What became of the rows that went into a packer: the books of packing."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["truncated", "split", "dropped"]

COUNTERS = (
    "rows_in",
    "rows_whole",
    "rows_truncated",
    "rows_split",
    "rows_dropped",
    "pieces",
    "tokens_in",
    "tokens_packed",
    "tokens_truncated",
    "tokens_dropped",
)


@dataclass(frozen=True, slots=True)
class PackingEvent:
    """A row that was not packed whole."""

    key: Any
    """The key under which the row was added."""

    action: Action
    reason: str
    num_tokens: int
    """Tokens of the row."""

    kept_tokens: int
    """Tokens of it that are packed."""

    pieces: int
    """Documents it was packed as; 0 when it was dropped."""


class PackingRecord:
    """Counters of every row, and an event for each one that was truncated, split or dropped.

    A row is what was added as one: a document, or a whole group. When it is added it becomes exactly one of
    whole, truncated, split or dropped. Its tokens and pieces count as packed when a window takes them, so

        rows_in == rows_whole + rows_truncated + rows_split + rows_dropped
        tokens_in == tokens_packed + tokens_truncated + tokens_dropped + tokens that the packer still holds

    Args:
        max_events: events kept until `take_events`; of more, the newest are kept and `events_lost` counts.
            The counters always count all.
    """

    def __init__(self, max_events: int = 100_000) -> None:
        self.rows_in = 0
        self.rows_whole = 0
        self.rows_truncated = 0
        self.rows_split = 0
        self.rows_dropped = 0
        self.pieces = 0
        """Units that windows took: rows and pieces of split rows."""
        self.tokens_in = 0
        self.tokens_packed = 0
        self.tokens_truncated = 0
        self.tokens_dropped = 0
        self.events_lost = 0
        self._events: deque[PackingEvent] = deque(maxlen=max_events)

    def take_events(self) -> list[PackingEvent]:
        """The events since the last call, oldest first. A long run writes them away and forgets them."""
        events = list(self._events)
        self._events.clear()
        return events

    def counts(self) -> dict[str, int]:
        """All counters by name."""
        return {name: self.__dict__[name] for name in COUNTERS}

    def admit(self, num_tokens: int) -> None:
        """Count a row that will be packed whole."""
        self.rows_in += 1
        self.rows_whole += 1
        self.tokens_in += num_tokens

    def note(self, event: PackingEvent) -> None:
        """Count a row that will not be packed whole."""
        self.rows_in += 1
        self.tokens_in += event.num_tokens
        if event.action == "truncated":
            self.rows_truncated += 1
            self.tokens_truncated += event.num_tokens - event.kept_tokens
        elif event.action == "split":
            self.rows_split += 1
        else:
            self.rows_dropped += 1
            self.tokens_dropped += event.num_tokens
        self.events_lost += len(self._events) == self._events.maxlen
        self._events.append(event)

    def pack(self, num_tokens: int) -> None:
        """Count what one window took: a row or a piece of one."""
        self.pieces += 1
        self.tokens_packed += num_tokens

    def state_dict(self) -> dict[str, Any]:
        """Counters and the events not yet taken, as plain values."""
        return {
            **self.counts(),
            "events_lost": self.events_lost,
            # not `astuple`, which would take a key that is a dataclass apart
            "events": [
                (event.key, event.action, event.reason, event.num_tokens, event.kept_tokens, event.pieces)
                for event in self._events
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for name in (*COUNTERS, "events_lost"):
            self.__dict__[name] = int(state[name])
        self._events.clear()
        self._events.extend(PackingEvent(*fields) for fields in state["events"])
