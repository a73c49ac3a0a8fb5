"""Standard errors of metrics: their names in results and logs, and their text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

# The standard error of metric X is X + this.
STANDARD_ERROR = "_se"


def with_errors(metrics: Mapping[str, float]) -> Iterator[tuple[str, float, float | None]]:
    """Yield name, value and standard error of every metric; None for a metric without standard error.

    >>> list(with_errors({"loss": 0.5, "HR@10": 0.07, "HR@10_se": 0.026}))
    [('loss', 0.5, None), ('HR@10', 0.07, 0.026)]
    """
    for name, value in metrics.items():
        if not (name.endswith(STANDARD_ERROR) and name.removesuffix(STANDARD_ERROR) in metrics):
            error = metrics.get(name + STANDARD_ERROR)
            yield name, value, None if error is None or math.isnan(error) else error


def shown_with_error(value: float, error: float | None, pattern: str = "{:.4f}") -> str:
    """The text of a metric with its standard error.

    >>> shown_with_error(0.07, 0.0262), shown_with_error(0.07, None)
    ('0.0700 ± 0.0262', '0.0700')
    """
    shown = pattern.format(value)
    return shown if error is None else f"{shown} ± {pattern.replace('+', '').format(error)}"


def error_of_mean(total: float, squares: float, count: float) -> float:
    """Standard error of the mean of independent values: √((mean of squares − mean²) ÷ count); NaN for no values.

    `total` is the sum of the values, `squares` the sum of their squares. For values of 0 and 1, such as the hits of
    HR@K, the result is √(p(1 − p) ÷ n).

    >>> error_of_mean(7, 7, 100) == (0.07 * 0.93 / 100) ** 0.5, error_of_mean(0.1 * 3, 0.01 * 3, 3)  # equal values
    (True, 0.0)
    """
    return math.sqrt(max(0.0, squares / count - (total / count) ** 2) / count) if count else math.nan
