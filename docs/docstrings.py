"""Reads docstrings as Markdown: examples and commands become code, brackets stay brackets."""

import ast
import re
import textwrap

import griffe

SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:")


def escape(line: str) -> str:
  """Returns a line whose `[B, L]` outside of code is text and no link."""
  parts = re.split(r"(`[^`]*`)", line)
  return "".join(part if i % 2 else part.replace("[", r"\[") for i, part in enumerate(parts))


def to_markdown(text: str) -> str:
  """Returns a docstring with fences around examples and indented commands."""
  lines, fence, section = [], False, False
  for line in [*text.splitlines(), ""]:
    section = line.startswith(SECTIONS) or (section and (not line or line[0] == " "))
    starts = line.startswith(">>> ") or (line.startswith("  ") and not section)
    if starts and not fence:
      lines.append("```python" if line.startswith(">>>") else "```")
    if fence and not line:
      lines.append("```")
    fence = bool(line) and (starts or fence)
    lines.append(line if fence else escape(line))
  return "\n".join(lines[:-1])


def fields(node: ast.ClassDef, code: str) -> str:
  """Returns the fields of a class as they stand in its source, with the comments about shapes."""
  ends = [child.end_lineno for child in node.body if isinstance(child, ast.AnnAssign)]
  lines = code.splitlines()[node.body[0].end_lineno : max(ends, default=0)]
  return "\n\n```python\n" + textwrap.dedent("\n".join(lines)).strip() + "\n```" if lines else ""


class Docstrings(griffe.Extension):
  """Changes every docstring before it is parsed."""

  def on_instance(self, *, node, obj: griffe.Object, agent, **kwargs) -> None:
    """Called for each module, class, function and attribute."""
    if obj.docstring:
      obj.docstring.value = to_markdown(obj.docstring.value)
      if isinstance(node, ast.ClassDef):
        obj.docstring.value += fields(node, agent.code)
