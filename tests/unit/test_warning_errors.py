"""Filters that turn warnings into errors are set aside while ddip's processes start."""

from __future__ import annotations

import warnings

from ddip.protocol import warning_errors


def test_the_filters_come_back_in_their_order_below_added_ones() -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("error", "mine")
        before = [*warnings.filters]
        warning_errors.set_aside()
        assert [entry[0] for entry in warnings.filters] == ["ignore"]
        warnings.filterwarnings("ignore", "of a library")
        warning_errors.give_back()
        assert warnings.filters[1:] == before and warnings.filters[0][0] == "ignore"
