"""Plans as Markdown, and as the terminal shows them."""

import markdown
import pytest

from keras_sparsity.board import written_plan

# Names that Keras gives to a layer.
NAMES = ["plain", "a|b", "|", "|a|", "a\\", "a\\|b", "a\nb", "[b]a[/b]"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_one_cell(name, capsys):
    text = written_plan.as_table(["layer", "size"], [[name, "3 kB"]], "About.")
    written_plan.print_markdown(text)
    _, head, _, row, *_ = capsys.readouterr().out.splitlines()
    shown = name.replace("\n", " ")
    assert row.startswith(f"  {shown} ")
    # Columns stand below each other.
    assert row.index("3 kB") == head.index("size")
    # As TensorBoard shows it.
    html = markdown.markdown(text, extensions=["markdown.extensions.tables"])
    assert html.count("<td>") == 2 and "<td>3 kB</td>" in html
