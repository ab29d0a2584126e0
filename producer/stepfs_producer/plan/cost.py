"""The cost of a row for a rank: Σ a·l + b·l² over its documents of l tokens, as attention under a document mask does.

Integers only. A cost that could lose exactness anywhere (a sum in int64, a comparison elsewhere in 53 bits) stops the
plan: a rounded cost may order two rows otherwise on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs_producer.plan.arrays import Integers

Columns = Mapping[str, Integers]
EXACT_MAX: Final = 1 << 53
TOKENS: Final = "tokens"  # as a load: the cost without the prices of rows
_INT64_MAX: Final = (1 << 63) - 1
_LINEAR_PER_HIDDEN: Final = 6


@dataclass(frozen=True, slots=True)
class CostModel:
    """`linear` per token and `quadratic` per token²; or `call`, given columns of samples, returns one int64 each.

    The columns are `tokens`, `source` (index in order of names), `record` and `first` (token), and by name the rows that
    samples have in the plan's columns. `prices`: of such a row, in addition.
    """

    linear: int = 1
    quadratic: int = 0
    call: Callable[[Columns], Any] | None = None
    prices: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert self.call is not None or (min(self.linear, self.quadratic) >= 0 < self.linear + self.quadratic)

    @classmethod
    def of_hidden_size(cls, hidden_size: int) -> CostModel:
        """A transformer's: projections 6·hidden_size per token beside attention's 1 per token²."""
        return cls(_LINEAR_PER_HIDDEN * hidden_size, 1)

    def of_samples(self, columns: Columns, address: Callable[[int], str] = str) -> Integers:
        """One cost per sample. `UsageError` names the first sample (by `address`) whose cost is none."""
        costs = self.of_tokens(columns, address)
        for name, price in self.prices:
            heaviest = int(costs.max(initial=0)) + price * int(columns[name].max(initial=0))
            if heaviest > _INT64_MAX:
                raise UsageError(
                    f"the {name} of a sample overflow the cost; divide the prices of the cost by {_divisor(heaviest)}"
                )
            costs = costs + price * columns[name]
        return costs

    def of_tokens(self, columns: Columns, address: Callable[[int], str] = str) -> Integers:
        """The same, without the prices of rows."""
        tokens = columns["tokens"]
        if self.call is not None:
            return _checked(_called(self.call, columns), len(tokens), address)
        longest = int(tokens.max(initial=0))
        if self.linear * longest + self.quadratic * longest**2 > _INT64_MAX:
            raise UsageError(
                f"a document of {longest} tokens overflows the cost; divide its coefficients by "
                f"{_divisor(self.linear * longest + self.quadratic * longest**2)}"
            )
        return self.linear * tokens + self.quadratic * tokens * tokens


def row_costs(costs: Integers, row: Integers, rows: int) -> Integers:
    """The cost of each row from those of its samples; `UsageError` if the plan could not compare them exactly."""
    heaviest = int(costs.max(initial=0)) * int(np.bincount(row).max(initial=0))  # bounds every row's total
    if heaviest > _INT64_MAX:
        raise UsageError(f"the costs overflow; divide them by {_divisor(heaviest)}")
    totals = np.zeros(rows, np.int64)
    np.add.at(totals, row, costs)
    bound = rows * int(totals.max(initial=0))
    if bound > EXACT_MAX:
        raise UsageError(f"{rows} rows as costly as the heaviest exceed 2**53; divide the cost by {_divisor(bound)}")
    return totals


def _divisor(bound: int) -> int:
    return -(-bound // EXACT_MAX)


def _called(call: Callable[[Columns], Any], columns: Columns) -> NDArray[Any]:
    name = getattr(call, "__qualname__", repr(call))
    try:
        return np.asarray(call(columns))
    except Exception as error:  # a user's code raises anything
        raise UsageError(f"the cost function {name} raised {type(error).__name__}: {error}; correct it") from error


def _checked(costs: NDArray[Any], samples: int, address: Callable[[int], str]) -> Integers:
    if costs.shape != (samples,):
        raise UsageError(f"the cost function returned shape {costs.shape} for {samples} samples; return one cost each")
    if costs.dtype.kind not in "iu":
        wrong = np.flatnonzero(np.isnan(costs)) if costs.dtype.kind == "f" else np.zeros(0, np.int64)
        where = f" (NaN for sample {address(int(wrong[0]))})" if len(wrong) else ""
        raise UsageError(f"the cost function returned {costs.dtype}{where}; round the costs and return int64")
    wrong = np.flatnonzero((costs < 0) | (costs > EXACT_MAX))
    if len(wrong):
        first = int(wrong[0])
        raise UsageError(f"the cost of sample {address(first)} is {costs[first]}; return costs from 0 to 2**53")
    return costs.astype(np.int64)
