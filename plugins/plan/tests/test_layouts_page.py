"""The page layouts.md says what the engines' checks accept."""

import pytest

from plugins.plan.tests.layouts_page import table, table_of_the_page


@pytest.mark.seconds
def test_the_table_is_what_the_checks_accept() -> None:
    assert table_of_the_page() == [*table()]
