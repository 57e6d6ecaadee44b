"""Builds the documentation as a site, strictly: a warning or a broken link ends it.

  make docs          # build/site/index.html

The pages keep their places, so that the same relative links work here and in the repository. README
becomes the home page. A linked file leads to the repository, or to a copy beside the pages if the
clone's `origin` has no address on the web. `api/` has a page for each package, from the docstrings.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
PACKAGES = sorted(path.parent.name for path in (ROOT / "electra_jax").glob("*/__init__.py"))
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?")
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
ROW = re.compile(r"^\| (.+) \| \[(.+)\]\((docs/guides/\w+\.md)\) \|\n", re.M)
GUIDES = "pretrain continue deberta finetune research notebook"
REFERENCE = {
  "Using": "python run data weights evaluate",
  "Looking": "healthy objectives evidence speed speedrun",
  "Scale": "clusters scale preflight",
  "Details": "entries differences status",
}
PROJECT = ["ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]


def navigation(api: list[dict]) -> list[dict]:
  """Returns the tabs, with the pages of each."""
  guides = [f"docs/guides/{name}.md" for name in GUIDES.split()]
  reference = [{k: [f"docs/{name}.md" for name in v.split()]} for k, v in REFERENCE.items()]
  return [
    {"Home": "README.md"},
    {"Guides": guides},
    {"Reference": reference},
    {"API": api},
    {"Project": PROJECT},
  ]


def repository(origin: str) -> str:
  """Returns the https address of a git remote, without a password; "" if it has none."""
  web = re.match(r"https?://(?:[^@/]*@)?(.+)", origin)
  ssh = re.match(r"(?:ssh://(?:[\w.-]+@)?|[\w.-]+@)([\w.-]+)(?::\d+/|[:/]/?)(.+)", origin)
  found = web or ssh
  return "https://" + "/".join(found.groups()).rstrip("/").removesuffix(".git") if found else ""


def quoted(page: str, anchor: str) -> str:
  """Returns the part of an address that shows a heading of a page in its plain copy."""
  for heading in re.findall(r"^#+ .+", page, re.M):
    if re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-") == anchor[1:]:
      return "#:~:text=" + quote(heading, safe="").replace("-", "%2D")
  return ""


def copy_pages(repo: str) -> None:
  """Copies the pages with the pages and pictures that they link to.

  Links to other files lead to the repository; without `repo` these files are copied too.
  """

  def lead(page: Path, link: re.Match) -> str:
    path, anchor = link[1], link[2] or ""
    file = (page.parent / path).resolve()
    if "://" in path or not file.is_file():
      return link[0]
    place = file.relative_to(ROOT)
    target = SOURCE / place
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".md" and file.name != "LOG.md":
      pages.append(file)
    elif file.suffix == ".ipynb" and file != page:
      pages.append(file)
      return path.removesuffix(".ipynb") + ".md"
    elif repo and file.suffix != ".png":
      return f"{repo}/blob/HEAD/{place}{anchor}"
    elif file.suffix == ".md":
      shutil.copyfile(file, target.with_suffix(".txt"))
      return path.removesuffix(".md") + ".txt" + quoted(file.read_text("utf-8"), anchor)
    else:
      shutil.copyfile(file, target)
    return link[0]

  pages = [ROOT / "README.md", *(ROOT / name for name in PROJECT), *(ROOT / "docs").rglob("*.md")]
  for page in pages:  # which grows
    target = (SOURCE / page.relative_to(ROOT)).with_suffix(".md")
    if not target.exists():
      text = from_notebook(page) if page.suffix == ".ipynb" else page.read_text("utf-8")
      text = home(text) if page == ROOT / "README.md" else text
      text = PICTURE.sub(r"[\g<0>](\1)", text)  # leads to its full size
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_text(LINK.sub(lambda link, page=page: lead(page, link), text), "utf-8")


def from_notebook(path: Path) -> str:
  """Returns the cells of a notebook as a page, with a link to the notebook."""
  cells = json.loads(path.read_text("utf-8"))["cells"]
  texts = [(cell["cell_type"] == "code", "".join(cell["source"])) for cell in cells]
  blocks = [f"```python\n{text}\n```" if code else text for code, text in texts]
  return "\n\n".join([*blocks, f"[The notebook]({path.name})"])


def home(readme: str) -> str:
  """Returns README with its first code beside its first words, and its rows on guides as cards."""
  words, code, rest = re.split(r"(^```.*?^```$)", readme, maxsplit=1, flags=re.M | re.S)
  cards = "".join(
    f"[**{name[0].upper()}{name[1:]}** {task[0].upper()}{task[1:]}]({guide}){{ .card }}\n"
    for task, name, guide in ROW.findall(rest)
  )
  top = f'<div class="hero" markdown>\n<div markdown>\n{words}\n</div>\n{code}\n</div>\n'
  cards = f'<div class="cards" markdown>\n{cards}</div>\n'
  return f"---\nhide: [navigation, toc]\n---\n{top}{cards}{ROW.sub('', rest)}"


def has_code(path: Path) -> bool:
  return re.search(r"^(def|class) ", path.read_text("utf-8"), re.MULTILINE) is not None


def write_api() -> list[dict]:
  """Writes a page for each package, and one for `encoder`; returns the navigation to them."""
  (SOURCE / "api").mkdir()
  pages = {"encoder": [ROOT / "electra_jax" / "encoder.py"]}
  pages |= {name: sorted((ROOT / "electra_jax" / name).rglob("*.py")) for name in PACKAGES}
  for page, paths in pages.items():
    files = [p.parent if p.name == "__init__.py" else p for p in paths if has_code(p)]
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    blocks = "\n".join(
      f'## `{name}` {{ data-toc-label="{name.split(".")[-1]}" }}\n\n::: {name}\n' for name in names
    )
    head = "---\nsearch: {boost: 0.001}\n---\n"  # guides are found first
    (SOURCE / "api" / f"{page}.md").write_text(f"{head}# electra_jax.{page}\n\n{blocks}", "utf-8")
  return [{page: f"api/{page}.md"} for page in pages]


def configuration(api: list[dict], repo: str) -> dict:
  options = {
    "docstring_style": "google",
    "docstring_options": {"warnings": False},
    "heading_level": 3,
    "show_root_heading": False,
    "show_root_toc_entry": False,
    "show_source": False,
    "members_order": "source",
    "separate_signature": True,
    "show_signature_annotations": True,
    "filters": ["!^_"],
    "extensions": [f"{ROOT / 'docs' / 'docstrings.py'}:Docstrings"],
  }
  # Each with a button that leads to the next.
  palette = [
    {
      "media": f"(prefers-color-scheme{media})",
      "scheme": scheme,
      "primary": primary,
      "toggle": {"icon": f"material/{icon}", "name": "Light, dark or as the system"},
    }
    for media, scheme, primary, icon in (
      ("", "default", "white", "brightness-auto"),
      (": light", "default", "white", "weather-sunny"),
      (": dark", "slate", "black", "weather-night"),
    )
  ]
  features = "navigation.tabs navigation.tabs.sticky navigation.sections navigation.footer"
  features += " navigation.top toc.follow content.code.copy search.highlight search.suggest"
  return {
    "site_name": "electra_jax",
    "docs_dir": str(SOURCE),
    "site_dir": str(SITE),
    **({"repo_url": repo, "repo_name": "/".join(repo.split("/")[3:])} if repo else {}),
    "theme": {
      "name": "material",
      "custom_dir": str(ROOT / "docs" / "theme"),
      "font": False,
      "icon": {"logo": "material/swap-horizontal-bold"},
      "palette": palette,
      "features": features.split(),
    },
    "extra_css": ["site.css"],
    "extra": {"polyfills": ["iframe-worker.js"]},
    "plugins": [
      "search",
      "offline",  # the search, from the disk
      {
        "mkdocstrings": {
          "handlers": {"python": {"paths": [str(ROOT)], "options": options, "inventories": []}}
        }
      },
    ],
    "markdown_extensions": [
      "attr_list",
      "md_in_html",
      "tables",
      "pymdownx.highlight",
      "pymdownx.superfences",
      {"toc": {"slugify": "@slugify", "permalink": True}},
    ],
    "validation": {
      "nav": {"omitted_files": "warn"},
      "links": {"anchors": "warn", "unrecognized_links": "warn"},
    },
    "not_in_nav": "benchmarks/",
    "nav": navigation(api),
  }


def main() -> None:
  """Runs from the command line."""
  shutil.rmtree(SOURCE, ignore_errors=True)
  SOURCE.mkdir(parents=True)
  git = ["git", "-C", ROOT, "remote", "get-url", "origin"]
  repo = repository(subprocess.run(git, capture_output=True, text=True).stdout.strip())
  copy_pages(repo)
  text = yaml.safe_dump(configuration(write_api(), repo), sort_keys=False)
  # GitHub's anchors, which the links are written for.
  slugify = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
  path = ROOT / "build" / "mkdocs.yml"
  path.write_text(text.replace("'@slugify'", slugify), "utf-8")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", path]
  # Material's notice of MkDocs 2, which is not used.
  done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
  if done.returncode:
    raise SystemExit(done.returncode)
  print(f"{sum(1 for _ in SITE.rglob('*.html'))} pages: {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
  main()
