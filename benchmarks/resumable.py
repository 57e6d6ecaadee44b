"""Runs steps one by one within a time budget; started again, continues.

Each step writes a JSON file to the folder when it ends. Finished steps are not run again, failed
steps are tried again after the others, and steps stopped by the time limit start again, or continue
if they can. Needs only Python.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

DONE, FAILED, LEFT = "done", "failed", "left"
STOPPED = 143  # exit code of a program to be started again, as in the package
STARTED = time.monotonic()
# Becomes a program that the kernel kills when its parent ends. A `preexec_fn` would fork, and
# keep every lock that another thread holds.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
ROOT = Path(__file__).resolve().parent.parent
# XLA's fastest compilation, for any CPU.
SMOKE = {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
}


class StepError(RuntimeError):
  """A step failed; the message is one line."""


class OutOfTime(RuntimeError):
  """The time limit stopped a step."""


@dataclasses.dataclass(frozen=True)
class Work:
  """The folder of some steps and the end of their time."""

  folder: Path
  deadline: float  # of time.monotonic()
  environment: dict[str, str] = dataclasses.field(default_factory=dict)  # of programs

  def secs_left(self) -> float:
    return self.deadline - time.monotonic()

  def path(self, name: str) -> Path:
    return self.folder / f"{name.replace(' ', '-')}.json"

  def record(self, name: str) -> dict:
    """Returns the record of a step, {} without one."""
    with contextlib.suppress(OSError, ValueError):
      return json.loads(self.path(name).read_text("utf-8"))
    return {}

  def check_settings(self, settings: dict) -> None:
    """Compares settings with the folder's; writes them to a new folder.

    Raises:
      SystemExit: the settings differ, or the folder cannot be used.
    """
    path, settings = self.folder / "settings.json", json.loads(json.dumps(settings))
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      known = json.loads(path.read_text("utf-8")) if path.exists() else settings
      self.write(path, known)
    except (OSError, ValueError) as error:
      reason = getattr(error, "strerror", None) or error
      raise SystemExit(f"error: {self.folder} cannot be used: {reason}") from None
    if known != settings:
      names = sorted(k for k in settings if known.get(k) != settings[k])
      changed = "; ".join(f"{k} was {known.get(k)}, is {settings[k]}" for k in names)
      raise SystemExit(
        f"error: {self.folder} has results of other settings ({changed}): use another --out"
      )

  def write(self, path: Path, content: dict) -> None:
    """Writes JSON to a file in the folder, atomically."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    os.replace(draft, path)

  def program(
    self, name: str, command: Sequence[str], stop_secs: float = 0, **environment: str
  ) -> str:
    """Runs a program; returns its output, which is also in folder/logs.

    It and its children get SIGTERM `stop_secs` before the deadline, and SIGKILL at the deadline or
    when this process ends.

    Raises:
      StepError: the exit code is not 0; the message has the last line.
      OutOfTime: the deadline has passed.
    """
    log = self.folder / "logs" / f"{name.replace(' ', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a+", encoding="utf-8") as file:
      begin = file.tell()
      process = subprocess.Popen(
        [sys.executable, "-c", _END_WITH_PARENT, *command],
        stdout=file,
        stderr=file,
        env=os.environ | self.environment | environment,
        start_new_session=True,
      )
      late = False
      try:
        code = process.wait(max(0, self.secs_left() - stop_secs))
      except subprocess.TimeoutExpired:
        late, code = True, _stop(process, stop_secs)
      except BaseException:  # Ctrl-C, SIGTERM
        _stop(process, 20)
        raise
      file.seek(begin)
      output = file.read()
    if late:
      raise OutOfTime("the time was over")
    if code:
      lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
      errors = [line for line in lines if line.startswith("error: ")]
      text = (errors or lines)[-1].removeprefix("error: ")
      text = f"{text} (exit code {code}, {log})".replace(f"{self.folder}/", "")
      raise StepError(text)
    return output

  def module(self, name: str, module: str, config: str, fields: dict, *args: str, **more) -> str:
    """Runs a program of the package with a configuration and fields, as `program`."""
    changes = [f"--config.{field}={value}" for field, value in fields.items()]
    command = [sys.executable, "-m", module, f"--config={config}", *changes, *args]
    return self.program(name, command, **more)


def open_folder(
  folder: Path, compiled: Path, mins: float, settings: dict, gpu: bool = False, **environment: str
) -> tuple[Work, str, str]:
  """Returns the folder with checked settings, and the platform and description of JAX's devices.

  Args:
    compiled: the folder for compiled programs.
    mins: the time limit.
    settings: including "smoke".
    gpu: whether a GPU is needed, except for a smoke test.

  Raises:
    SystemExit: JAX does not start or has no GPU, the folder cannot be written or has different
      settings.
  """
  paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])
  environment |= {"PYTHONPATH": os.pathsep.join(paths), "JAX_COMPILATION_CACHE_DIR": str(compiled)}
  environment |= SMOKE if settings["smoke"] else {}
  work = Work(folder, time.monotonic() + 60 * mins, environment)
  code = "import jax; d = jax.devices(); print(d[0].platform, f'{len(d)} x {d[0].device_kind}')"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, env=os.environ | work.environment
  )
  lines = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
  if done.returncode:
    raise SystemExit(f"error: JAX does not start: {(lines or ['no output'])[-1]}")
  platform, _, device = lines[-1].partition(" ")
  if gpu and platform != "gpu" and not settings["smoke"]:
    raise SystemExit(f"error: JAX finds no GPU, but {device}: --smoke tries all of it anywhere")
  work.check_settings(settings | {"device": device})
  return work, platform, device


def say(text: str) -> None:
  """Prints a line with the seconds since the start."""
  print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def json_lines(path: Path) -> list[dict]:
  """Returns the objects of a file of JSON lines, [] without one, except truncated lines."""
  texts = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
  return [json.loads(text) for text in texts if text.endswith("\n")]


def run_script(main: Callable[[], int]) -> None:
  """Exits with main's code; with STOPPED after Ctrl-C and SIGTERM."""
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
  try:
    sys.exit(main())
  except KeyboardInterrupt:
    print("stopped; start it again to go on")
    sys.exit(STOPPED)
  except OSError as error:  # a step could not write its results, for example on a full disk
    sys.exit(f"error: {error.strerror}: {error.filename or 'in the folder of --out'}")


def _stop(process: subprocess.Popen, secs: float) -> int:
  """Ends a program and its children, after some seconds to save."""
  if secs:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(secs)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  return process.wait()


@dataclasses.dataclass(frozen=True)
class Step:
  """A step and its time.

  Args:
    run: returns the result, in which "could_not" is a list of lines.
    mins: estimated time; the step does not start with less time left.
    goes_on: whether it continues where it was stopped, and so may start with less time.
  """

  run: Callable[[Work], dict]
  mins: float
  goes_on: bool = False


def run_steps(steps: dict[str, Step], work: Work, say: Callable[[str], None]) -> dict[str, dict]:
  """Runs the missing steps; returns the records of all steps, in order."""
  known = {name: work.record(name) for name in steps}
  for name in sorted(steps, key=lambda name: known[name].get("status") == FAILED):
    step, record = steps[name], known[name]
    if record.get("status") == DONE:
      say(f"{name}: done before")
      continue
    if work.secs_left() < 60 * (min(step.mins, 1.5) if step.goes_on else step.mins):
      why = f"takes about {step.mins:g} minutes, {max(0, work.secs_left()) / 60:.1f} are left"
      known[name] = {"status": LEFT, "reason": why, "secs": 0.0, "result": {}} | record
      say(f"{name}: left: {why}")
      continue
    say(f"{name}: begins, about {step.mins:g} minutes")
    record = known[name] = _run(step, work, record.get("secs", 0.0))
    work.write(work.path(name), record)
    why = record["reason"] and f": {record['reason']}"
    say(f"{name}: {record['status']} after {record['secs']:.0f} s{why}")
  return known


def choose(
  steps: dict[str, Step], names: Sequence[str], groups: dict[str, list[str]] | None = None
) -> dict[str, Step]:
  """Returns the named steps or groups, in order; raises SystemExit for an unknown name."""
  groups = groups or {}
  asked = [name for x in names for name in groups.get(x, [x])]
  if unknown := [name for name in asked if name not in steps]:
    known = ", ".join([*groups, *steps])
    raise SystemExit(f"error: no step {', '.join(unknown)}; there are: {known}")
  return {name: step for name, step in steps.items() if name in asked}


def exit_code(records: dict[str, dict]) -> int:
  """Returns the exit code of a script from the records of its steps."""
  statuses = {record["status"] for record in records.values()}
  return 1 if FAILED in statuses else STOPPED if LEFT in statuses else 0


def _run(step: Step, work: Work, before: float) -> dict:
  """Runs a step and returns its record; `before` is the seconds of earlier starts."""
  start, status, result, reason = time.monotonic(), DONE, {}, ""
  try:
    result = step.run(work)
  except OutOfTime as error:
    status, reason = LEFT, str(error)
  except Exception as error:  # the other steps run anyway
    kind = "" if isinstance(error, StepError) else f"{type(error).__name__}: "
    status, reason = FAILED, f"{kind}{' '.join(str(error).split())}"
  secs = time.monotonic() - start + (before if step.goes_on else 0)
  return {"status": status, "reason": reason, "secs": secs, "result": result}
