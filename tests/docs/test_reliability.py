"""docs/reliability.md is what the battery's files say."""

from __future__ import annotations

import battery


def test_the_page_is_what_the_files_say() -> None:
    assert battery.PAGE.read_text() == battery.page(battery.results(), battery.results(busy=True))
