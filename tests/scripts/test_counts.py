"""scripts/counts.py counts what it says."""

import ast
import pathlib
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def package(counts, tmp_path):
    """`package({path: text})`: a package of these files."""

    def make(files):
        for path, text in files.items():
            path = tmp_path / "keras_sparsity" / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return counts.Package(tmp_path)

    return make


def test_lines_of_code_have_no_comments_blanks_and_docstrings(counts):
    text = textwrap.dedent(
        '''
        """Of the module.

        More.
        """

        # A comment.
        def f():
            """One line."""
            return 1  # counts
        '''
    )
    module = counts.Module("a.py", text, ast.parse(text))
    assert counts.code_lines(module) == 2
    (function,) = (n for n in module.tree.body if hasattr(n, "name"))
    assert counts.length(function) == 2


@pytest.mark.parametrize(
    "code,kind,shown",
    [
        ("collectives.current()", "ambient", None),
        ("tf.distribute.get_strategy()", "ambient", None),
        ("architectures.of(strategy)", "ambient", None),
        ("table.architecture == 'ps'", "kinds", None),
        ("name in ('ps', 'allgather')", "kinds", None),
        ("1 if options.merges else 2", "kinds", "options.merges"),
    ],
)
def test_counts_each_place(counts, package, code, kind, shown):
    found = counts.static_counts(package({"a.py": code}))
    assert found[kind] == [f"a.py:1: {shown or code}"]
    assert not found["ambient" if kind == "kinds" else "kinds"]


def test_classes_of_placements_count_as_kinds(counts, package):
    found = counts.static_counts(
        package(
            {
                "placement/owned.py": "class Owned(base.Placement): pass",
                "a.py": "isinstance(x, owned.Owned), isinstance(x, str)",
            }
        )
    )
    assert found["kinds"] == ["a.py:1: isinstance(x, owned.Owned)"]


def test_the_function_that_chooses_may_compare(counts, package):
    found = counts.static_counts(package({"placement/choice.py": "x == 'ps'"}))
    assert not found["kinds"]


COMPLETE = '''
def f(rows):
    """Does it.

    Args:
        rows: of shape `(num_rows, dim)`.

    Raises:
        ValueError: never.

    Example:

    >>> f(1)

    References:
        EuroSys 3.1.
    """
'''


@pytest.mark.parametrize(
    "removed,lacks",
    [
        ("nothing", []),
        ("Raises:", ["Raises"]),
        (">>> f(1)", ["Example"]),
        ("References:", ["References"]),
        ("rows: of", ["Args"]),
    ],
)
def test_what_a_docstring_lacks(counts, package, removed, lacks):
    made = package(
        {
            "__init__.py": "from keras_sparsity.a import f\n__all__ = ['f']",
            "a.py": COMPLETE.replace(removed, ""),
        }
    )
    (public,) = counts.public_names(made)
    assert public.name == "ks.f"
    assert public.lacks() == lacks


def test_finds_every_public_name(counts):
    import keras_sparsity

    def names(value, prefix):
        for name in getattr(value, "__all__", []):
            inner = getattr(value, name)
            if hasattr(inner, "__all__"):
                yield from names(inner, f"{prefix}.{name}")
            else:
                yield f"{prefix}.{name}"

    found = counts.public_names(counts.Package(ROOT))
    assert [each.name for each in found] == list(names(keras_sparsity, "ks"))
