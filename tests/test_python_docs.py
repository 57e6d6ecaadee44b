"""The source python-docs: prose of docstrings, each sentence once."""

from electra_jax.data import python_docs

MODULE = (
  '''"""Adds two numbers, which is more than many a module can say.

Parameters
----------
a : int
    The first of the two numbers that are to be added together.
"""

def add(a, b):
  """Returns the `sum` of two numbers, as :func:`operator.add` does it.

    >>> add(1, 2)
    3

  Args:
    a: The first of the two numbers that this function adds for you.
  """
  code = """this string is no documentation at all, whatever its length may be"""

class Adder:
  """Adds two numbers, which is more than many a module can say."""
'''
  + "#" * 200
)

PROSE = [
  "Adds two numbers, which is more than many a module can say.",
  "The first of the two numbers that are to be added together.",
  "Returns the sum of two numbers, as operator.add does it.",
  "The first of the two numbers that this function adds for you.",
]


def test_docs_are_prose_without_code_headings_and_repetitions(tmp_path, monkeypatch):
  (tmp_path / "a.py").write_text(MODULE)
  (tmp_path / "b.py").write_text("print 'this is no Python 3' " + MODULE)
  (tmp_path / "c.py").write_text(MODULE.replace("two", "three").replace("Adder", "Other"))
  paths = [str(tmp_path / name) for name in ("a.py", "b.py", "c.py", "missing.py")]
  monkeypatch.setattr(python_docs, "modules", lambda: paths)
  expected = ["\n".join(PROSE), "\n".join(PROSE).replace("two", "three")]
  assert list(python_docs.harvest()) == expected
  monkeypatch.setattr(python_docs, "BATCH_FILES", 1)
  assert list(python_docs.harvest(workers=2)) == expected


def test_half_a_character_in_a_docstring_is_a_question_mark(tmp_path, monkeypatch):
  path = tmp_path / "a.py"
  path.write_text(MODULE.replace("more than many a module", "more \\ud800 than many a module"))
  monkeypatch.setattr(python_docs, "modules", lambda: [str(path)])
  (document,) = python_docs.harvest()
  assert "more ? than many a module" in document.encode("utf-8").decode()


def test_this_python_has_modules_in_a_fixed_order():
  found = python_docs.modules()
  assert len(found) > 1000 and found == python_docs.modules()
  assert not any("/tests/" in path for path in found)


def test_the_language_reference_is_part_of_the_docs():
  (topics,) = (path for path in python_docs.modules() if path.endswith("pydoc_data/topics.py"))
  (paragraphs,) = python_docs.clean_files([topics])
  assert sum(map(len, paragraphs)) > 100_000
