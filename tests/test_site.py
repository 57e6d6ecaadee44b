"""docs/site.py: every page has its place, and links lead to the repository or to a copy."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)

README = """# A name

Words.

```
code
```

![curve](docs/curve.png) [run](docs/run.md#now) [log](LOG.md#2026-01-02-a-run-one-two)
[rows](results/rows.json) [table](results/table.md) [notebook](docs/n.ipynb) [web](https://x.org/a)

| to | read |
|---|---|
| pretrain | [your text](docs/guides/text.md) |
| look | [run](docs/run.md) |
"""
FILES = {
  "LOG.md": "# Log\n\n## 2026-01-02 A `run`: one, two\n",
  "docs/run.md": "# Run\n\n[a row](../results/rows.json)\n",
  "docs/guides/text.md": "# Text\n",
  "docs/n.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": ["a = 1\n", "a"]}]}),
  "docs/curve.png": "",
  "results/rows.json": "{}",
  "results/table.md": "# Table\n",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
  for name, text in {"README.md": README, **FILES}.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  for name, value in {"ROOT": tmp_path, "SOURCE": tmp_path / "build", "PROJECT": []}.items():
    monkeypatch.setattr(site, name, value)
  return tmp_path / "build"


def links(page: Path) -> list[str]:
  return re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))


def copies(project: Path) -> set[str]:
  return {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}


PAGES = {"README.md", "docs/run.md", "docs/guides/text.md", "docs/n.md", "results/table.md"}


def test_without_a_repository_files_lie_beside_the_pages(project):
  site.copy_pages("")
  log = "LOG.txt#:~:text=%23%23%202026%2D01%2D02%20A%20%60run%60%3A%20one%2C%20two"
  assert links(project / "README.md")[3:9] == [
    *("docs/run.md#now", log, "results/rows.json"),
    *("results/table.md", "docs/n.md", "https://x.org/a"),
  ]
  assert copies(project) == PAGES | {
    *("LOG.txt", "results/rows.json", "docs/n.ipynb", "docs/curve.png")
  }
  assert (
    project / "docs/n.md"
  ).read_text() == "```python\na = 1\na\n```\n\n[The notebook](n.ipynb)"


def test_with_a_repository_files_are_there_and_pages_and_pictures_here(project):
  site.copy_pages("https://host/me/it")
  place = "https://host/me/it/blob/HEAD/"
  assert links(project / "README.md")[3:9] == [
    *("docs/run.md#now", f"{place}LOG.md#2026-01-02-a-run-one-two", f"{place}results/rows.json"),
    *("results/table.md", "docs/n.md", "https://x.org/a"),
  ]
  assert links(project / "docs/run.md") == [f"{place}results/rows.json"]
  assert copies(project) == PAGES | {"docs/curve.png"}


def test_rows_on_guides_are_cards_of_the_home_page_and_pictures_open(project):
  site.copy_pages("")
  text = (project / "README.md").read_text()
  card = "[**Your text** Pretrain](docs/guides/text.md){ .card }"
  assert text.index("Words.") < text.index("```\ncode\n```") < text.index(card)
  assert "[your text]" not in text and "| look | [run](docs/run.md) |" in text
  assert "[![curve](docs/curve.png)](docs/curve.png)" in text


@pytest.mark.parametrize(
  ("origin", "address"),
  [
    ("https://github.com/me/it.git", "https://github.com/me/it"),
    ("http://me:secret@host:8080/me/it/", "https://host:8080/me/it"),
    ("git@github.com:me/it.git", "https://github.com/me/it"),
    ("ssh://git@host:2222/me/it.git", "https://host/me/it"),
    ("ssh://host/group/me/it", "https://host/group/me/it"),
    *(("/srv/git/it.git", ""), ("file:///srv/it", ""), ("../it", ""), ("", "")),
  ],
)
def test_a_remote_has_an_https_address(origin, address):
  assert site.repository(origin) == address


def test_every_page_has_its_place_in_the_navigation():
  text = json.dumps(site.navigation([]))
  pages = re.findall(r'"([\w./-]+\.md)"', text)
  there = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
  notebooks = ["docs/guides/notebook.md"]  # written from the notebook
  assert sorted(pages) == sorted(["README.md", *site.PROJECT, *there, *notebooks])
  cards = [guide for _, _, guide in site.ROW.findall((ROOT / "README.md").read_text())]
  assert cards == [page for page in pages if "/guides/" in page and page not in notebooks]
