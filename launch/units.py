"""Writes measured numbers for people: each with its unit, and a dash where nothing was measured."""

from collections.abc import Collection


def short(value: float) -> str:
    """Three digits that tell, never an exponent: 0.0123, 1.23, 12.3, 1,230."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.995 else f"{value:.3f}"


def fraction(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"


def memory(size_mib: float | None) -> str:
    return "–" if size_mib is None else f"{size_mib:,.0f} MiB"


def milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{short(value)} ms" if value < 1000 else f"{value / 1000:,.2f} s"


def duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def compared(measured: int | None, reference: int | None) -> str:
    """Two byte counts and, where they differ, by how much."""
    if measured is None or reference is None:
        return "unknown"
    difference = measured - reference
    return f"{measured:,} B against {reference:,} B" + (f" ({difference:+,} B)" if difference else "")


def ranges(rounds: Collection[int]) -> str:
    """{1, 2, 3, 7} as `1–3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(rounds):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def shorten(name: str, limit: int = 22) -> str:
    """The end of a long name: of `package.module:callable` that is the telling part."""
    return name if len(name) <= limit else f"…{name[1 - limit :]}"
