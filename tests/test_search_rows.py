"""Rows told apart by packed numbers: what numpy says by sorting whole rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from hapmoe.search.rows import distinct_rows


@given(
    st.one_of(
        arrays(np.int64, array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9), elements=st.integers(0, 3)),
        # too large to be packed into one number
        arrays(np.int64, st.tuples(st.integers(1, 9), st.just(6)), elements=st.sampled_from([0, 1, 2**40])),
    )
)
def test_as_numpy_tells_rows_apart(rows: np.ndarray) -> None:
    expected, inverse = np.unique(rows, axis=0, return_inverse=True)
    found, which = distinct_rows(rows)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(which, inverse.ravel())
