"""A small Hugging Face Hub on loopback: repositories, revisions, tokens, and faults on request.

Statuses and headers are the Hub's: X-Error-Code, X-Repo-Commit, X-Linked-Etag.
"""

import base64
import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKENS = {"hf_me": ("me", "lab"), "hf_other": ("other",)}  # {token: names it may write for}
ATTRIBUTES = {".gitattributes": b"*.safetensors filter=lfs\n"}


@dataclasses.dataclass
class Repo:
  """A repository; only its owner sees a private one or has the files of a gated one."""

  private: bool = True
  gated: bool = False
  commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
  refs: dict[str, str] = dataclasses.field(default_factory=dict)  # {branch or tag: commit}

  def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
    """Adds a commit with all files of the repository, and moves the branch to it."""
    text = repr((len(self.commits), sorted(files.items())))
    sha = hashlib.sha1(text.encode()).hexdigest()
    self.commits[sha], self.refs[branch] = files, sha
    return sha

  @property
  def files(self) -> dict[str, bytes]:
    """The files of the main branch."""
    return self.commits[self.refs["main"]]


class Answers(BaseHTTPRequestHandler):
  """Answers with bytes, or with what is made JSON; keeps connections open."""

  protocol_version = "HTTP/1.1"

  def log_message(self, *args) -> None:
    pass

  def answer(self, status: int, body=b"", **headers: str) -> None:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    self.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
      self.send_header(name.replace("_", "-"), value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)


class Hub(ThreadingHTTPServer):
  """The server; `requests` lists "METHOD path" of what it was asked."""

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.repos: dict[str, Repo] = {}
    self.objects: dict[str, bytes] = {}  # of LFS
    self.requests: list[str] = []
    # (number of the request from 1, "METHOD path") -> a status to answer, 0 to hang up, or None
    self.fault: Callable[[int, str], int | None] = lambda number, request: None
    threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

  @property
  def url(self) -> str:
    """For HF_ENDPOINT."""
    return f"http://127.0.0.1:{self.server_port}"

  def put(self, name: str, folder: Path, private: bool = False, gated: bool = False) -> str:
    """Commits a local folder to a repository, which is made; returns the commit."""
    repo = self.repos.setdefault(name, Repo(private, gated))
    found = {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}
    return repo.commit(ATTRIBUTES | found)


class _Handler(Answers):
  server: Hub

  def refuse(self, status: int, message: str, code: str = "") -> None:
    self.answer(status, {"error": message}, X_Error_Message=message, X_Error_Code=code)

  def handle_any(self) -> None:
    length = int(self.headers.get("Content-Length") or 0)
    self.body = self.rfile.read(length)
    path = urlsplit(self.path).path
    request = f"{self.command} {path}"
    self.server.requests.append(request)
    fault = self.server.fault(len(self.server.requests), request)
    if fault == 0:
      self.close_connection = True
      return self.connection.close()
    if fault:
      return self.refuse(fault, "Try again later")
    token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
    if token and token not in TOKENS:
      return self.refuse(401, "Invalid credentials in Authorization header")
    self.owned = TOKENS.get(token, ())
    for pattern, method in ROUTES.items():
      if found := re.fullmatch(pattern, request):
        return getattr(self, method)(*map(unquote, found.groups()))
    return self.refuse(404, f"no such route: {request}")

  do_GET = do_HEAD = do_POST = do_PUT = handle_any

  def open(self, name: str, revision: str = "main") -> tuple[Repo, str] | None:
    """Returns a repository and a commit, or answers as the Hub does and returns None."""
    repo, is_mine = self.server.repos.get(name), name.split("/")[0] in self.owned
    if repo is None or (repo.private and not is_mine):
      if self.owned:
        return self.refuse(404, "Repository not found", "RepoNotFound")
      return self.refuse(401, "Invalid username or password.")
    commit = repo.refs.get(revision, revision)
    if commit not in repo.commits:
      return self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return repo, commit

  def model(self, name: str, revision: str = "main") -> None:
    if found := self.open(name, revision):
      repo, commit = found
      files = [{"rfilename": x} for x in repo.commits[commit]]
      content = {"id": name, "sha": commit, "private": repo.private, "siblings": files}
      self.answer(200, content, Content_Type="application/json")

  def tree(self, name: str, revision: str) -> None:
    if found := self.open(name, revision):
      entries = []
      for path, content in found[0].commits[found[1]].items():
        entry = {"type": "file", "path": path, "size": len(content), "oid": _git(content)}
        if path.endswith(".safetensors"):
          entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
      self.answer(200, entries, Content_Type="application/json")

  def resolve(self, name: str, revision: str, path: str) -> None:
    if not (found := self.open(name, revision)):
      return None
    repo, commit = found
    if repo.gated and name.split("/")[0] not in self.owned:
      status = 403 if self.owned else 401
      return self.refuse(status, f"Access to model {name} is restricted.", "GatedRepo")
    content = repo.commits[commit].get(path)
    if content is None:
      return self.refuse(404, "Entry not found", "EntryNotFound")
    headers = {"X_Repo_Commit": commit}
    if not path.endswith(".safetensors"):
      return self.answer(200, content, ETag=f'"{_git(content)}"', **headers)
    oid = _sha256(content)
    self.server.objects[oid] = content
    linked = {"X_Linked_Etag": f'"{oid}"', "X_Linked_Size": str(len(content))}
    elsewhere = self.server.url.replace("127.0.0.1", "localhost")  # as a CDN: another host
    return self.answer(302, Location=f"{elsewhere}/lfs/{oid}", **headers, **linked)

  def get_object(self, oid: str) -> None:
    content = self.server.objects[oid]
    start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
    content = content[int(start[1]) :] if start else content
    self.answer(206 if start else 200, content, ETag=f'"{oid}"')

  def put_object(self, oid: str) -> None:
    assert _sha256(self.body) == oid
    self.server.objects[oid] = self.body
    self.answer(200)

  def create(self) -> None:
    asked = json.loads(self.body)
    if not self.owned:
      return self.refuse(401, "Invalid username or password.")
    owner = asked["organization"] or self.owned[0]
    name = f"{owner}/{asked['name']}"
    if owner not in self.owned:
      return self.refuse(403, f'You don\'t have the rights to create a model under "{owner}"')
    if name in self.server.repos:
      error = {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
      return self.answer(409, error)
    self.server.repos[name] = Repo(asked.get("visibility") == "private")
    self.server.repos[name].commit(ATTRIBUTES)
    return self.answer(200, {"url": f"{self.server.url}/{name}"})

  def validate(self) -> None:
    lines = json.loads(self.body)["content"].split("---\n")[1].splitlines()
    wrong = [x for x in lines if not re.fullmatch(r"[a-z_]+: [\w\[\], ./-]+", x)]
    self.answer(400 if wrong else 200, {"errors": [{"message": x} for x in wrong]})

  def preupload(self, name: str, revision: str) -> None:
    if self.writable(name):
      files = [
        {
          "path": x["path"],
          "uploadMode": "lfs" if x["path"].endswith(".safetensors") else "regular",
          "shouldIgnore": False,
        }
        for x in json.loads(self.body)["files"]
      ]
      self.answer(200, {"files": files})

  def batch(self, name: str) -> None:
    objects = [
      {**x, "actions": {"upload": {"href": f"{self.server.url}/lfs/{x['oid']}"}}}
      for x in json.loads(self.body)["objects"]
    ]
    self.answer(200, {"transfer": "basic", "objects": objects})

  def may_write(self, name: str) -> None:
    if self.writable(name):
      self.answer(200)

  def writable(self, name: str) -> Repo | None:
    found = self.open(name)
    if found and name.split("/")[0] not in self.owned:
      return self.refuse(403, "You have read access but not the required permissions")
    return found and found[0]

  def commit(self, name: str, branch: str) -> None:
    if not (repo := self.writable(name)):
      return
    files = dict(repo.files)
    for line in self.body.decode().splitlines():
      key, value = (entry := json.loads(line))["key"], entry["value"]
      if key == "file":
        files[value["path"]] = base64.b64decode(value["content"])
      elif key == "lfsFile":
        files[value["path"]] = self.server.objects[value["oid"]]
      elif key == "deletedFile":
        del files[value["path"]]
    sha = repo.commit(files, branch)
    self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})


ROUTES = {
  "GET /api/models/([^/]+/[^/]+)": "model",
  "GET /api/models/([^/]+/[^/]+)/auth-check/write": "may_write",
  "GET /api/models/([^/]+/[^/]+)/revision/(.+)": "model",
  "GET /api/models/([^/]+/[^/]+)/tree/([^/]+)": "tree",
  "(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)": "resolve",
  "(?:GET|HEAD) /lfs/(.+)": "get_object",
  "PUT /lfs/(.+)": "put_object",
  "POST /api/repos/create": "create",
  "POST /api/validate-yaml": "validate",
  "POST /api/models/([^/]+/[^/]+)/preupload/(.+)": "preupload",
  "POST /api/models/([^/]+/[^/]+)/commit/(.+)": "commit",
  r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": "batch",
}


def _git(content: bytes) -> str:
  return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()
