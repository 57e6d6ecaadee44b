"""Contestants that take turns, and PyTorch peers in separate processes."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

# How a peer is run: its name in the results, and the backend of torch.compile, None without it.
PEERS = {
  "eager": ("transformers + PyTorch", None),
  "compiled": ("transformers + torch.compile", "inductor"),
  # For tests: torch.compile without code generation, which takes minutes.
  "captured": ("transformers + torch.compile, not generated", "aot_eager"),
}
Kinds = list[Literal["eager", "compiled", "captured"]] | None  # of a script's --peer


def chosen(kinds: Kinds) -> list[tuple[str, str | None]]:
  """Returns name and backend of each peer in --peer; without a value, of the eager peer."""
  return [] if kinds is None else [PEERS[kind] for kind in kinds or ["eager"]]


class PeerError(RuntimeError):
  """A peer failed; the message is one line."""


class InItsOwnProcess:
  """A peer that runs in another process.

  In a shared process, the threads of one peer would spin on the cores of the other. The process
  starts at once; call `wait` before the first `run`.

  Args:
    name: in the results.
    make: makes the peer: an object with `compile_secs` and `run(*args)`.
    args: of `make`, pickled, too.
  """

  def __init__(self, name: str, make: Callable, *args):
    self.name = name
    context = multiprocessing.get_context("spawn")
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(target=_serve, args=(theirs, make, *args), daemon=True)
    self._process.start()
    theirs.close()  # so that the pipe ends with the process

  def wait(self) -> None:
    """Waits for the first step, which compiles. Raises PeerError if the peer failed."""
    self.compile_secs = self._answer()

  def run(self, *args) -> None:
    """Runs the peer. Raises PeerError if it fails."""
    with contextlib.suppress(BrokenPipeError):  # its last answer says why
      self._pipe.send(args)
    self._answer()

  def stop(self) -> None:
    self._pipe.close()
    self._process.join(10)

  def _answer(self) -> float | None:
    try:
      failed, answer = self._pipe.recv()
    except (EOFError, ConnectionError):
      self._process.join()
      failed, answer = True, f"its process ended with {self._process.exitcode}"
    if failed:
      raise PeerError(f"{self.name}: {answer}")
    return answer


def _serve(pipe, make: Callable, *args) -> None:
  try:
    peer = make(*args)
    pipe.send((False, peer.compile_secs))
    while True:
      peer.run(*pipe.recv())
      pipe.send((False, None))
  except EOFError:  # the other process has ended
    pass
  except Exception as error:  # whatever PyTorch raises: out of memory, no compiler ...
    text = " ".join(str(error).split())
    pipe.send((True, f"{type(error).__name__}: {text[:300]}"))


def wait_for(started: list[InItsOwnProcess]) -> tuple[list[InItsOwnProcess], list[str]]:
  """Waits for the peers' first steps; returns the usable peers, and why the others failed."""
  ready, could_not = [], []
  for peer in started:
    try:
      peer.wait()
      ready.append(peer)
    except PeerError as error:
      could_not.append(str(error))
  return ready, could_not


def stop(started: list[InItsOwnProcess]) -> None:
  """Ends the processes of peers."""
  for peer in started:
    peer.stop()


def secs(action: Callable[[], object]) -> float:
  """Returns the seconds of an action."""
  start = time.perf_counter()
  action()
  return time.perf_counter() - start


class Action(NamedTuple):
  """A contestant that is a function."""

  name: str
  run: Callable


class TorchLoop:
  """A base of PyTorch training loops: AdamW, clipping, and bfloat16 on a GPU."""

  def __init__(self):
    import torch

    self.torch = torch
    self.device = "cuda" if torch.cuda.is_available() else "cpu"

  def make_optimizer(self, weights: Iterable, rate: float, decay: float) -> None:
    """Sets AdamW, fused on a GPU."""
    self.weights = list(weights)
    fused = self.device == "cuda"
    self.tx = self.torch.optim.AdamW(self.weights, rate, weight_decay=decay, fused=fused)

  def compiled(self, function: Callable, backend: str | None) -> Callable:
    """Returns a function compiled with a backend, or unchanged without a backend."""
    return self.torch.compile(function, backend=backend, dynamic=False) if backend else function

  def autocast(self):
    return self.torch.autocast(self.device, self.torch.bfloat16, enabled=self.device == "cuda")

  def update(self) -> None:
    self.torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
    self.tx.step()

  def finish(self) -> None:
    if self.device == "cuda":
      self.torch.cuda.synchronize()


def compare(
  ours: list, others: list[InItsOwnProcess], rounds: list[tuple]
) -> tuple[list, dict[str, list[float]], list[str]]:
  """Lets contestants take turns and ends the peers' processes.

  Returns the contestants with times, their seconds, and why others failed.
  """
  ready, failed = wait_for(others)
  times, gave_up = take_turns([*ours, *ready], rounds)
  stop(ready)
  return [c for c in (*ours, *ready) if c.name in times], times, failed + gave_up


def take_turns(contestants: list, rounds: list[tuple]) -> tuple[dict[str, list[float]], list[str]]:
  """Runs each contestant in each round; returns their seconds, and why others gave up.

  Contestants take turns, because a shared machine's speed drifts.

  Args:
    contestants: have a name and `run(*args)`; one that raises PeerError is left out.
    rounds: the arguments of each.
  """
  times: dict[str, list[float]] = {c.name: [] for c in contestants}
  could_not = []
  for args in rounds:
    for c in [c for c in contestants if c.name in times]:
      try:
        times[c.name].append(secs(lambda c=c, args=args: c.run(*args)))
      except PeerError as error:
        del times[c.name]
        could_not.append(str(error))
  return times, could_not
