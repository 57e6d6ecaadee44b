"""Everything that this project wants to know of a machine with a GPU, in at most 40 minutes.

  make gpu PYTHON=python3                        # the Python that has JAX for the GPU
  python benchmarks/gpu.py [--out DIR] [--budget_mins N] [--text 'text:GLOB'] [--only STEP ...]
  python benchmarks/gpu.py --smoke               # all of it in miniature, on any machine

device        what it is, the rates of products and copies
numerics      steps, attention, packed rows and microbatches against the CPU in float32
resume        a run that was killed, against one that was left alone, bit for bit
speed ...     a training step against transformers with torch.compile, and the share of the peak
memory ...    the preflight's peak against the real one
input         what the input pipeline gives
fine-tuning   MRPC against transformers with torch.compile
shards        the text of --text, or Python's documentation, for the last step
pretraining   ELECTRA-Small for --pretraining_mins (20), or what the others leave of 40; curves

Needs no TensorFlow; without PyTorch the peers are left out. Each step is a program that leaves a
JSON in the folder; started again, with the same arguments, it goes on with what is not done. It
ends before --budget_mins are over and says what is left. On a GPU it writes
benchmarks/results/gpu.json, the table of docs/speed.md and docs/gpu.png. Exit codes: 0 all done,
143 start it again, 1 something failed or is wrong.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_report
import machine
from resumable import (
  DONE,
  FAILED,
  LEFT,
  STOPPED,
  OutOfTime,
  Step,
  StepError,
  Work,
  find_device,
  run_script,
  run_steps,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "gpu.json", ROOT / "docs" / "gpu.png"
TOTAL_MINS = 40
REPORT_SECS = 10  # that writing the results may take
SAVING_SECS = 45  # that a training gets to save before the end of the time
NEEDED = (
  *("absl", "etils", "flax", "jax", "matplotlib", "ml_collections", "numpy", "optax", "orbax"),
  *("rich", "safetensors", "sentencepiece", "tokenizers"),
)
# Of a GPU's memory for JAX where a peer takes the rest.
SHARED = {"XLA_CLIENT_MEM_FRACTION": ".45"}


@dataclasses.dataclass(frozen=True)
class Options:
  """What steps depend on, beside the machine."""

  smoke: bool
  text: str | None  # as config.data.sources
  vocab: str | None
  glue: str | None
  pretraining_mins: float  # at most
  missing: tuple[str, ...]  # packages that peers need


@dataclasses.dataclass(frozen=True)
class Shape:
  """A training step whose speed is measured."""

  config: str
  batch: int
  length: int
  mins: float
  fields: tuple[str, ...] = ()
  in_smoke: bool = False


# Both sides have fused attention where there is no dropout on its probabilities; ELECTRA-Small has
# it, as in the paper.
FUSED = ("model.attention_dropout=0.0",)
SPEED = {
  "small 128": Shape("configs/small.py", 128, 128, 2, in_smoke=True),
  "small 512": Shape("configs/small.py", 64, 512, 2),
  "base 128": Shape("configs/base.py", 128, 128, 2.5, FUSED),
  "base 512": Shape("configs/base.py", 64, 512, 2.5, FUSED),
  "modern 150m 128": Shape("configs/modern.py:150m", 128, 128, 3),
  "modern 150m 512": Shape("configs/modern.py:150m", 32, 512, 3, in_smoke=True),
  "large 128": Shape("configs/large.py", 64, 128, 3, FUSED),
  "large 512": Shape("configs/large.py", 32, 512, 3, FUSED),
}
MEMORY = {
  "small": Shape("configs/small.py", 128, 128, 5, in_smoke=True),
  "base": Shape("configs/base.py", 32, 512, 3),
}
TINY = {
  "model.num_layers": 2,
  "model.hidden_size": 64,
  "model.num_heads": 1,
  "model.ffn_size": 64,
  "model.embedding_size": 64,
}
TINY_BATCH, TINY_LENGTH = 8, 32
# XLA's fastest compilation; the rest is that of any CPU.
SMOKE_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
  " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def pairs(fields: dict) -> list[str]:
  """Returns fields as FIELD=VALUE."""
  return [f"{name}={value}" for name, value in fields.items()]


def benchmark(work: Work, name: str, script: str, *args: str, **environment: str) -> dict:
  """Runs a script of this folder and returns its JSON, without what is the same for all.

  Raises:
    StepError: it failed; not where it ran and found something wrong, which is in its JSON.
  """
  result = work.folder / "parts" / f"{name.replace(' ', '-')}.json"
  result.parent.mkdir(exist_ok=True)
  result.unlink(missing_ok=True)
  command = [sys.executable, str(ROOT / "benchmarks" / script), *args, f"--json={result}"]
  try:
    work.program(name, command, **environment)
  except StepError:
    if not (result.exists() and json.loads(result.read_text()).get("wrong")):
      raise
  found = json.loads(result.read_text())
  return {k: v for k, v in found.items() if k not in ("machine", "command")}


def peer(options: Options, found: Callable[..., dict], *args: str) -> dict:
  """Measures with a peer, or without one and says why."""
  if options.missing:
    reason = f"PyTorch's speed: {', '.join(options.missing)} not installed"
    result = found(*args)
    return result | {"could_not": [*result["could_not"], reason]}
  return found("--peer", "captured" if options.smoke else "compiled", *args)


def make_steps(options: Options) -> dict[str, Step]:
  """Returns the steps, the quick and the important first."""
  smoke = ["--smoke"] if options.smoke else []

  def named(name: str, script: str, mins: float, *args: str) -> Step:
    return Step(lambda work: benchmark(work, name, script, *args), mins)

  chosen = {k: s for k, s in SPEED.items() if s.in_smoke or not options.smoke}
  sized = {k: s for k, s in MEMORY.items() if s.in_smoke or not options.smoke}
  quick = ["--examples=2000", "--rounds=1", "--secs=0.2"] if options.smoke else ["--rounds=3"]
  return {
    "device": named("device", "device.py", 0.5, *smoke),
    "numerics": named("numerics", "numerics.py", 4.5, *smoke),
    "resume": Step(lambda work: resume(work, options), 2.5),
    **{
      f"speed {name}": Step(lambda work, name=name: speed(work, options, name), shape.mins)
      for name, shape in chosen.items()
    },
    **{
      f"memory {name}": Step(lambda work, name=name: memory(work, options, name), shape.mins)
      for name, shape in sized.items()
    },
    "input": named("input", "input_pipeline.py", 0.5, *quick),
    "fine-tuning": Step(lambda work: finetuning(work, options), 1.5),
    "shards": Step(lambda work: shards(work, options), 1, goes_on=True),
    "pretraining": Step(
      lambda work: pretraining(work, options), 1 + options.pretraining_mins, goes_on=True
    ),
  }


def resume(work: Work, options: Options) -> dict:
  """Compares a run that was killed with one that was left alone."""
  folder = work.folder / "resume"
  shutil.rmtree(folder, ignore_errors=True)
  size = (
    ["--steps=80"] if options.smoke else ["--set", "model.hidden_size=256", "model.ffn_size=1024"]
  )
  return benchmark(work, "resume", "resume.py", f"--out={folder}", *size)


def speed(work: Work, options: Options, name: str) -> dict:
  """Measures a training step, and PyTorch's."""
  s = SPEED[name]
  sizes = [f"--batch={s.batch}", f"--length={s.length}", "--rounds=5", "--steps=10"]
  fields = s.fields
  if options.smoke:
    sizes = [f"--batch={TINY_BATCH}", f"--length={TINY_LENGTH}", "--rounds=1", "--steps=1"]
    fields = (*fields, *pairs(TINY))
  changes = ["--set", *fields] if fields else []

  def measured(*args: str) -> dict:
    arguments = [f"--config={s.config}", *sizes, *changes, *args]
    return benchmark(work, f"speed {name}", "train_step.py", *arguments, **SHARED)

  return peer(options, measured)


def memory(work: Work, options: Options, name: str) -> dict:
  """Compares the preflight's peak with the real one."""
  s = MEMORY[name]
  fields = {"train.batch_size": s.batch, "data.seq_length": s.length}
  if options.smoke:
    fields = TINY | {"train.batch_size": TINY_BATCH, "data.seq_length": TINY_LENGTH}
  arguments = [f"--config={s.config}", "--set", *pairs(fields)]
  return benchmark(work, f"memory {name}", "peak_memory.py", *arguments)


def finetuning(work: Work, options: Options) -> dict:
  """Measures fine-tuning, and PyTorch's."""
  sizes = [f"--glue={options.glue}", f"--vocab={options.vocab}"] if options.glue else []
  if options.smoke:
    sizes = ["--examples=32", "--parts=1", "--buckets=1", "--layers=1"]

  def measured(*args: str) -> dict:
    return benchmark(work, "fine-tuning", "finetune.py", *sizes, *args, **SHARED)

  return peer(options, measured)


def shards(work: Work, options: Options) -> dict:
  """Builds the shards of the pretraining."""
  fields = {"data.dir": work.folder / "shards"}
  if options.text:
    fields |= {"data.sources": options.text}
  else:
    fields |= {"data.vocab_size": 8192}  # of Python's documentation, which is small
  if options.smoke:
    fields |= {"data.sources": options.text or f"text:{ROOT}/*.md", "data.vocab_size": 1000}
    fields |= {"data.holdout_frac": 0.2, "data.seq_length": TINY_LENGTH}
  if options.vocab:
    fields |= {"data.vocab": options.vocab}
  run_program(work, "shards", "electra_jax.data.build", fields)
  manifest = json.loads((work.folder / "shards" / "manifest.json").read_text())
  return {
    "vocabulary": manifest["vocab"]["size"],
    **{
      split: {k: facts[k] for k in ("examples", "tokens")}
      for split, facts in manifest["splits"].items()
    },
  }


def run_program(work: Work, name: str, module: str, fields: dict, *args: str, **kwargs) -> str:
  """Runs a program of the package with configs/small.py and fields of it."""
  changes = [f"--config.{pair}" for pair in pairs(fields)]
  command = [sys.executable, "-m", module, "--config=configs/small.py", *changes, *args]
  return work.program(name, command, **kwargs)


def pretraining_steps(work: Work, options: Options) -> int:
  """Returns the steps of the pretraining, decided once, by the time of one and what is left."""
  plan = work.folder / "pretraining-plan.json"
  if plan.exists():
    return json.loads(plan.read_text())["steps"]
  if options.smoke:
    return 20
  known = work.record("speed small 128")
  if known.get("status") != DONE:
    arguments = ["--config=configs/small.py", "--batch=128", "--length=128", "--steps=10"]
    known = {"result": benchmark(work, "pretraining pace", "train_step.py", *arguments)}
  secs = known["result"]["results"]["electra_jax"]["secs_per_step_median"]
  spent = sum(work.record(name).get("secs", 0) for name in make_steps(options)) / 60
  mins = max(1, min(options.pretraining_mins, TOTAL_MINS - 1 - spent))
  steps = int(0.95 * 60 * mins / secs)  # evaluations, saves, compilation
  work.write(plan, {"steps": steps, "mins": mins, "secs_per_step": secs})
  return steps


def pretraining(work: Work, options: Options) -> dict:
  """Trains ELECTRA-Small, or goes on."""
  run, steps = work.folder / "pretraining", pretraining_steps(work, options)
  fields = {
    "data.dir": work.folder / "shards",
    "train.steps": steps,
    "optimizer.warmup_steps": min(10_000, steps // 10),
    "eval.every_steps": max(1, steps // 20),
    "checkpoint.every_steps": max(5, steps // 50),
    "checkpoint.keep": 2,
    "log.every_steps": max(1, min(100, steps // 20)),
    "log.trackers": "",
  }
  if options.smoke:
    fields |= TINY | {"train.batch_size": TINY_BATCH, "data.seq_length": TINY_LENGTH}
  arguments = ["pretraining", "electra_jax.train", fields, f"--workdir={run}"]
  try:
    run_program(work, *arguments, stop_secs=SAVING_SECS)
  except OutOfTime:
    found = learned(work, run, steps)
    at = f"at step {found.get('step', 0):,} of {steps:,}, goes on at the next start"
    raise OutOfTime(at, found) from None
  return learned(work, run, steps)


def learned(work: Work, run: Path, steps: int) -> dict:
  """Returns what a training has come to, and copies its curves beside the results."""
  history = run / "metrics.jsonl"
  texts = history.read_text().splitlines(keepends=True) if history.exists() else []
  lines = [json.loads(text) for text in texts if text.endswith("\n")]
  if (run / "curves.png").exists():
    shutil.copyfile(run / "curves.png", work.folder / "curves.png")
  trained = [x for x in lines if x["split"] == "train"]
  heldout = [x for x in lines if x["split"] == "heldout"]
  if not trained or not heldout:
    return {}
  log = (work.folder / "logs" / "pretraining.log").read_text()
  return {
    "step": trained[-1]["step"],
    "steps": steps,
    **{k: statistics.median(x[k] or 0 for x in trained) for k in ("tokens_per_sec", "mfu")},
    "heldout_first": heldout[0],
    "heldout_last": heldout[-1],
    "time_of_each_start": re.findall(r" time: +(.*)$", log, re.MULTILINE),
  }


def open_folder(args: argparse.Namespace) -> tuple[Work, str, Options]:
  """Returns the folder with its settings checked, the platform and the options.

  Raises:
    SystemExit: packages or a GPU are missing, the folder cannot be written or is another run's.
  """
  if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"error: {sys.executable} lacks {', '.join(absent)}: install them with pip")
  out = args.out.absolute()
  python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
  environment = {
    "PYTHONPATH": python_path,
    "JAX_COMPILATION_CACHE_DIR": str(out / "compiled"),
    "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
    "TRITON_CACHE_DIR": str(out / "triton"),
    **({"XLA_FLAGS": SMOKE_FLAGS, "JAX_PLATFORMS": "cpu"} if args.smoke else {}),
  }
  end = time.monotonic() + 60 * args.budget_mins - REPORT_SECS
  work = Work(out, end, environment)
  platform, device = find_device(work)
  if platform != "gpu" and not args.smoke:
    raise SystemExit(f"error: JAX finds no GPU, but {device}: --smoke tries all of it anywhere")
  missing = tuple(x for x in ("torch", "transformers") if importlib.util.find_spec(x) is None)
  options = Options(args.smoke, args.text, args.vocab, args.glue, args.pretraining_mins, missing)
  settings = {k: v for k, v in vars(options).items() if k != "missing"} | {"device": device}
  work.check_settings(settings)
  return work, platform, options


def collect(device: str, records: dict[str, dict]) -> dict:
  """Returns the content of gpu.json."""

  def lines(field: str) -> list[str]:
    found = ((name, r["result"].get(field, [])) for name, r in records.items())
    return [f"{name}: {line}" for name, several in found for line in several]

  def with_status(status: str) -> list[str]:
    return [f"{name}: {r['reason']}" for name, r in records.items() if r["status"] == status]

  return {
    "device": device,
    "minutes": sum(r["secs"] for r in records.values()) / 60,
    "could_not": lines("could_not"),
    "wrong": lines("wrong"),
    "failed": with_status(FAILED),
    "left": with_status(LEFT),
    "steps": records,
  }


def publish(content: dict, work: Work, report: str, args: argparse.Namespace) -> None:
  """Writes the results, the table of docs/speed.md and the picture, of a real GPU."""
  machine.save(str(RESULTS), content, hide=[args.text, args.vocab, args.glue, args.out])
  if (work.folder / "curves.png").exists():
    shutil.copyfile(work.folder / "curves.png", PICTURE)
  machine.write_between(ROOT / "docs" / "speed.md", "gpu", report)


def main() -> int:
  """Runs the steps and reports."""
  p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  p.add_argument("--out", type=Path, help="folder (runs/gpu, or runs/gpu-smoke)")
  p.add_argument("--budget_mins", type=float, default=TOTAL_MINS, help="to end before")
  p.add_argument("--text", help="sources to train on, as config.data.sources (python-docs)")
  p.add_argument("--vocab", help="vocabulary file (one is trained); BERT's, with --glue")
  p.add_argument("--glue", help="folder with GLUE's folders (random tokens)")
  p.add_argument("--pretraining_mins", type=float, default=20, help="of ELECTRA-Small, at most")
  p.add_argument("--only", nargs="*", metavar="STEP", help="these steps")
  p.add_argument("--smoke", action="store_true", help="in miniature, on the CPU; changes no file")
  args = p.parse_args()
  args.out = args.out or Path("runs/gpu-smoke" if args.smoke else "runs/gpu")
  started = time.monotonic()
  work, platform, options = open_folder(args)
  steps = make_steps(options)
  if unknown := set(args.only or ()) - steps.keys():
    p.error(f"no step {', '.join(sorted(unknown))}; there are: {', '.join(steps)}")

  def say(text: str) -> None:
    print(f"[{(time.monotonic() - started) / 60:5.1f} min] {text}", flush=True)

  chosen = {name: steps[name] for name in steps if not args.only or name in args.only}
  found = run_steps(chosen, work, say)
  empty = {"status": LEFT, "reason": "not begun", "secs": 0.0, "result": {}}
  device = json.loads((work.folder / "settings.json").read_text())["device"]
  content = collect(
    device, {name: empty | (found.get(name) or work.record(name)) for name in steps}
  )
  work.write(work.folder / "gpu.json", content)
  report = gpu_report.markdown(content)
  print(report)
  if platform == "gpu" and not options.smoke:
    publish(content, work, report, args)
  if content["failed"] or content["wrong"]:
    return 1
  return STOPPED if any(r["status"] == LEFT for r in found.values()) else 0


if __name__ == "__main__":
  run_script(main)
