"""Builds the documentation as a site, strictly: a warning or a broken link ends it.

  make docs          # build/site/index.html

The pages keep their places, so that the same relative links work here and in the repository: README
becomes the first page, and files that a page links to are copied beside. `api/` has a page for each
package, from the docstrings.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
PACKAGES = sorted(path.parent.name for path in (ROOT / "electra_jax").glob("*/__init__.py"))
LINK = re.compile(r"\]\(([^)#\s]+)")
GUIDES = (
  *(
    "quickstart",
    "python",
    "own-corpus",
    "continue",
    "language",
    "small-budget",
    "finetune",
    "compare",
    "clusters",
  ),
  "extend",
)
REFERENCE = (
  "objectives evidence speedrun data run healthy weights evaluate speed preflight scale promises"
  " entries".split()
)
PROJECT = ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "LOG")


def copy(path: Path) -> None:
  target = SOURCE / path.relative_to(ROOT)
  target.parent.mkdir(parents=True, exist_ok=True)
  shutil.copyfile(path, target)


def copy_pages() -> None:
  """Copies the pages, and the files that they link to."""
  pages = [ROOT / f"{name}.md" for name in ("README", *PROJECT)]
  pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")]
  for page in pages:
    copy(page)
    for link in LINK.findall(page.read_text()):
      linked = (page.parent / link).resolve()
      if "://" not in link and linked.is_file() and linked not in pages:
        copy(linked)


def has_code(path: Path) -> bool:
  return re.search(r"^(def|class) ", path.read_text(), re.MULTILINE) is not None


def write_api() -> list[dict]:
  """Writes a page for each package, and one for `encoder`; returns the navigation to them."""
  (SOURCE / "api").mkdir()
  pages = {"encoder": [ROOT / "electra_jax" / "encoder.py"]}
  pages |= {name: sorted((ROOT / "electra_jax" / name).rglob("*.py")) for name in PACKAGES}
  for page, paths in pages.items():
    files = [p.parent if p.name == "__init__.py" else p for p in paths if has_code(p)]
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    blocks = "\n".join(f"## `{name}`\n\n::: {name}\n" for name in names)
    (SOURCE / "api" / f"{page}.md").write_text(f"# electra_jax.{page}\n\n{blocks}")
  return [{page: f"api/{page}.md"} for page in pages]


def configuration(api: list[dict]) -> dict:
  options = {
    "docstring_style": "google",
    "docstring_options": {"warnings": False},
    "heading_level": 3,
    "show_root_heading": False,
    "show_root_toc_entry": False,
    "show_source": False,
    "members_order": "source",
    "separate_signature": True,
    "filters": ["!^_"],
    "extensions": [f"{ROOT / 'docs' / 'docstrings.py'}:Docstrings"],
  }
  return {
    "site_name": "electra_jax",
    "docs_dir": str(SOURCE),
    "site_dir": str(SITE),
    "use_directory_urls": False,  # opens from the disk
    "theme": {"name": "material", "font": False, "features": ["navigation.tabs", "toc.follow"]},
    "plugins": [
      "search",
      {
        "mkdocstrings": {
          "handlers": {"python": {"paths": [str(ROOT)], "options": options, "inventories": []}}
        }
      },
    ],
    "markdown_extensions": [
      "tables",
      "pymdownx.highlight",
      "pymdownx.superfences",
      {"toc": {"slugify": "@slugify", "permalink": True}},
    ],
    "validation": {"links": {"anchors": "warn", "unrecognized_links": "warn"}},
    "nav": [
      {"Start": "README.md"},
      {"Guides": [f"docs/guides/{name}.md" for name in GUIDES]},
      {"Reference": [*(f"docs/{name}.md" for name in REFERENCE), "docs/differences.md"]},
      {"API": api},
      {"Project": [f"{name}.md" for name in PROJECT]},
    ],
  }


def main() -> None:
  """Runs from the command line."""
  shutil.rmtree(SOURCE, ignore_errors=True)
  SOURCE.mkdir(parents=True)
  copy_pages()
  text = yaml.safe_dump(configuration(write_api()), sort_keys=False)
  # GitHub's anchors, which the links are written for.
  slugify = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
  path = ROOT / "build" / "mkdocs.yml"
  path.write_text(text.replace("'@slugify'", slugify))
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", path]
  # Material's notice of MkDocs 2, which is not used.
  done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
  if done.returncode:
    raise SystemExit(done.returncode)
  print(f"{sum(1 for _ in SITE.rglob('*.html'))} pages: {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
  main()
