"""One exception for everything that is wrong in what the user wrote: its text is ready to be shown."""

from collections.abc import Iterable


class TopologyError(ValueError):
    """The input is wrong. The text has one line a mistake: the key, what was given, what is allowed."""


def raise_any(mistakes: Iterable[str]) -> None:
    """Raise one `TopologyError` with all the mistakes, if there are any."""
    if lines := list(mistakes):
        raise TopologyError("\n".join(lines))
