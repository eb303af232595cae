"""Tables in Markdown."""

import _report


def test_table():
    assert _report.table("T", ["", "a b"], [["x", 1234.5], ["yy", None]]) == (
        "**T**\n\n"
        "|     | a b   |\n"
        "| --- | ----- |\n"
        "| x   | 1,234 |\n"
        "| yy  |       |\n"
    )
    cells = _report.table("", ["a"], [[0.12345], [1.2345], [0], [12.345]])
    assert [line.strip("| ") for line in cells.splitlines()[4:]] == [
        "0.123",
        "1.23",
        "0",
        "12.35",
    ]
