"""Mean and standard error of repeated measurements: the sample's standard deviation over √n."""

from collections.abc import Iterable
from statistics import fmean, stdev


def mean_and_error(values: Iterable[float | None]) -> tuple[float, float | None] | None:
    """Of what was measured; one measurement has no error, and nothing measured no mean."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return fmean(known), stdev(known) / len(known) ** 0.5 if len(known) > 1 else None
