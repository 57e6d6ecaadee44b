"""Downloads networks from Hugging Face's Hub, and pushes exports to it.

Uses huggingface_hub, with its cache, its login and its variables (HF_HUB_OFFLINE, HF_TOKEN).
"""

import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from electra_jax.data import tokenizer
from electra_jax.interop import huggingface, weight_files
from electra_jax.interop.weights import ExchangeError

T = TypeVar("T")

PREFIX, FORM = "hf://", "hf://ORG/NAME or hf://ORG/NAME@REVISION"
WAITS = (1, 2, 4, 8, 16, 30)  # seconds before each retry of a request
EXPORT_FILE = "export.json"  # marks an orbax export and holds its metadata
# The files that `sources` reads: networks, their tokenizers, an orbax export.
_FILES = ["config.json", "model*.safetensors", weight_files.INDEX, "tokenizer_config.json"]
_FILES += ["added_tokens.json", "special_tokens_map.json"]
_FILES += [huggingface.ORIGINAL_TOKENIZER, *tokenizer.FILES.values()]
PATTERNS = [
  f"{place}{x}" for place in ("", *(f"{x}/" for x in huggingface.FOLDERS)) for x in _FILES
]
PATTERNS += [EXPORT_FILE, "params/*", huggingface.GENERATOR, huggingface.GENERATOR_CONFIG]
TORCH_PATTERNS = ["pytorch_model.bin*", "pytorch_model-*.bin"]  # fetched without safetensors
GIT_FILE = ".gitattributes"  # the Hub adds it to every repository
LISTED = 8  # maximum number of files in an error message


def is_name(path: str | Path | None) -> bool:
  """Returns whether a path is a name on the Hub; Path("hf://x") has one slash."""
  return str(path).startswith("hf:/")


def split(name: str | Path) -> tuple[str, str | None]:
  """Returns the repository and the revision of a name.

  >>> split("hf://google/electra-small-discriminator@main")
  ('google/electra-small-discriminator', 'main')

  Raises:
    ExchangeError: the name does not have the form `FORM`.
  """
  name = re.sub(r"^hf:/+", PREFIX, str(name))
  found = re.fullmatch(rf"{PREFIX}([\w.-]+/[\w.-]+)(?:@(.+))?", name)
  if not found:
    raise ExchangeError(f"{name}: write a network on the Hub as {FORM}")
  return found[1], found[2]


def local(path: str | Path) -> Path:
  """Returns the path or, for a name on the Hub, its cache folder, which is named by the commit.

  Fetches only files that `sources` reads, and makes no request for a commit in the cache.

  Raises:
    ExchangeError: the Hub or the cache does not have the network or its weights.
  """
  if not is_name(path):
    return Path(path)
  from huggingface_hub import HfApi, snapshot_download
  from huggingface_hub.utils import tqdm

  class Bar(tqdm):
    def __init__(self, *args, **options):
      super().__init__(*args, **{"disable": None} | options)  # None: only on a terminal

  repo, revision = split(path)
  at = _ask(repo, lambda: HfApi().resolve_revision(repo, revision=revision), revision)
  for patterns in (PATTERNS, TORCH_PATTERNS):
    options = {"revision": at, "allow_patterns": patterns, "tqdm_class": Bar}
    folder = Path(_ask(repo, lambda options=options: snapshot_download(repo, **options)))
    weights = any(folder.rglob("model*.safetensors")) or weight_files.find(folder)
    if weights or (folder / EXPORT_FILE).is_file():
      return folder
  files = _ask(repo, lambda: HfApi().list_repo_files(repo, revision=folder.name))
  raise ExchangeError(
    f"{PREFIX}{repo} has no {weight_files.WEIGHTS}, either in its root or in"
    f" {', '.join(huggingface.FOLDERS)}; its files: {_listed(files) or 'none'}"
  )


def pinned(path: str) -> str:
  """Returns a name on the Hub with its commit, after fetching it; other paths unchanged."""
  return f"{PREFIX}{split(path)[0]}@{local(path).name}" if is_name(path) else path


def origin(card: Mapping) -> str | None:
  """Returns the Hub name and commit from which a source's networks were initialised."""
  found = card.get("origin") or (card.get("config") or {}).get("init_from")
  return found if is_name(found) else None


def claim(repo: str, overwrite: bool) -> None:
  """Creates a private repository to push to, unless it exists.

  Raises:
    ExchangeError: nobody is logged in, the token may not write, or the repository has files and
      `overwrite` is False.
  """
  from huggingface_hub import HfApi, errors, get_token

  if split(f"{PREFIX}{repo}")[1]:
    raise ExchangeError(f"{repo}: write the repository to push to as ORG/NAME")
  if get_token() is None:
    raise ExchangeError(f"to push to {repo}, log in to the Hub: hf auth login")

  def make() -> list[str]:
    try:  # a token may have write access but not create repositories
      HfApi().auth_check(repo, write=True)
    except errors.RepositoryNotFoundError:
      HfApi().create_repo(repo, private=True)
    return HfApi().list_repo_files(repo)

  files = [x for x in _ask(repo, make) if x != GIT_FILE]
  if files and not overwrite:
    raise ExchangeError(
      f"{PREFIX}{repo} has files ({_listed(files)}): use --overwrite to replace them all"
    )


def push(folder: Path, repo: str) -> str:
  """Replaces a repository's files with a folder's in one commit; returns its name with the commit.

  Raises:
    ExchangeError: the Hub rejects the commit, or cannot be reached.
  """
  from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

  new = {str(x.relative_to(folder)): x for x in sorted(folder.rglob("*")) if x.is_file()}

  def commit() -> str:
    old = [x for x in HfApi().list_repo_files(repo) if x not in (*new, GIT_FILE)]
    operations = [CommitOperationAdd(name, path) for name, path in new.items()]
    operations += [CommitOperationDelete(name) for name in old]
    return HfApi().create_commit(repo, operations, commit_message="Export by electra_jax").oid

  try:
    return f"{PREFIX}{repo}@{_ask(repo, commit)}"
  except ExchangeError as error:
    again = f"hf upload {repo} {folder} . --delete='*'"
    raise ExchangeError(f"{error}; {folder} is complete: to push it again, run {again}") from None


def _listed(files: list[str]) -> str:
  return ", ".join(sorted(files)[:LISTED]) + (", ..." if len(files) > LISTED else "")


def _ask(repo: str, request: Callable[[], T], revision: str | None = None) -> T:
  """Returns the result of a request to the Hub, with retries after temporary failures.

  Raises:
    ExchangeError: the request fails; the message is one line that says what to do.
  """
  from huggingface_hub import constants, errors

  name, place = f"{PREFIX}{repo}", constants.ENDPOINT
  uncached = errors.RevisionResolutionError, errors.LocalEntryNotFoundError
  # Xet transfers raise RuntimeError; invalid names and cards raise ValueError.
  known = (*uncached, errors.HTTPError, ConnectionError, RuntimeError, ValueError)
  for wait in (*WAITS, None):
    try:
      return request()
    except known as error:
      is_uncached = isinstance(error, uncached)
      cause = (is_uncached and error.__cause__) or error
      status = getattr(getattr(cause, "response", None), "status_code", None)
      is_lost = isinstance(cause, errors.HTTPError) and "Connect" not in type(cause).__name__
      if wait is None or not (is_lost if status is None else status in (408, 429) or status >= 500):
        break
      why = str(cause).partition("\n")[0]
      warnings.warn(f"{name}: {why}; trying again in {wait} s", stacklevel=1)
      time.sleep(wait)
  if isinstance(cause, errors.GatedRepoError):
    text = f"{name} is gated: ask for access at {place}/{repo}, then log in: hf auth login"
  elif isinstance(cause, errors.RepositoryNotFoundError) or status == 401:
    text = f"{name} is private or not on the Hub: check the name, or log in: hf auth login"
  elif isinstance(cause, errors.RevisionNotFoundError):
    text = f"{name} has no branch, tag or commit {revision}"
  elif status == 403:
    text = f"{name}: no write access: use another repository, or log in as its owner: hf auth login"
  elif status is not None or isinstance(cause, ValueError):
    text = f"{name}: {' '.join(str(cause).split())}"
  elif constants.HF_HUB_OFFLINE:
    text = f"{name} is not in the cache: fetch it once without HF_HUB_OFFLINE"
  else:
    cached = "not in the cache, and " if is_uncached else ""
    text = f"{name}: {cached}{place} cannot be reached: {' '.join(str(cause).split())}"
  raise ExchangeError(text)
