"""docs/reliability.md is what the battery's file says."""

from __future__ import annotations

import battery


def test_the_page_is_what_the_file_says() -> None:
    assert battery.PAGE.read_text() == battery.page(battery.results())
