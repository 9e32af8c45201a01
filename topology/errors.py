"""One exception for everything that is wrong in what the user wrote: its text is ready to be shown."""


class TopologyError(ValueError):
    """The input is wrong. The text has one line a mistake: the key, what was given, what is allowed."""
