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
import importlib.util
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gpu_report
import machine
import speedrun
from resumable import (
  FAILED,
  LEFT,
  ROOT,
  Step,
  StepError,
  Work,
  choose,
  exit_code,
  open_folder,
  run_script,
  run_steps,
)

RESULTS, PICTURE = ROOT / "benchmarks" / "results" / "gpu.json", ROOT / "docs" / "gpu.png"
TOTAL_MINS = 40
REPORT_SECS = 10  # that writing the results may take
NEEDED = (
  *("absl", "etils", "flax", "jax", "matplotlib", "ml_collections", "numpy", "optax", "orbax"),
  *("rich", "safetensors", "sentencepiece", "tokenizers"),
)
# Of a GPU's memory for JAX where a peer takes the rest.
SHARED = {"XLA_CLIENT_MEM_FRACTION": ".45"}


Options = argparse.Namespace  # of `main`, and `missing`: the packages that peers need


class Shape(NamedTuple):
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


def against_torch(work: Work, o: Options, name: str, script: str, *args: str) -> dict:
  """Measures with a peer, or without one and says why."""
  kind = ["--peer", "captured" if o.smoke else "compiled"]
  found = benchmark(work, name, script, *args, *([] if o.missing else kind), **SHARED)
  if o.missing:
    found["could_not"].append(f"PyTorch's speed: {', '.join(o.missing)} not installed")
  return found


def make_steps(o: Options) -> dict[str, Step]:
  """Returns the steps, the quick and the important first."""
  smoke = ["--smoke"] if o.smoke else []

  def named(name: str, script: str, mins: float, *args: str) -> Step:
    return Step(lambda work: benchmark(work, name, script, *args), mins)

  def of_shapes(kind: str, run, shapes: dict[str, Shape]) -> dict[str, Step]:
    return {
      f"{kind} {name}": Step(partial(run, o=o, name=f"{kind} {name}", shape=shape), shape.mins)
      for name, shape in shapes.items()
      if shape.in_smoke or not o.smoke
    }

  quick = ["--examples=2000", "--rounds=1", "--secs=0.2"] if o.smoke else ["--rounds=3"]
  return {
    "device": named("device", "device.py", 0.5, *smoke),
    "numerics": named("numerics", "numerics.py", 4.5, *smoke),
    "resume": Step(partial(resume, o=o), 2.5),
    **of_shapes("speed", speed, SPEED),
    **of_shapes("memory", memory, MEMORY),
    "input": named("input", "input_pipeline.py", 0.5, *quick),
    "fine-tuning": Step(partial(finetuning, o=o), 1.5),
    "shards": Step(partial(shards, o=o), 1, goes_on=True),
    "pretraining": Step(partial(pretraining, o=o), 1 + o.pretraining_mins, goes_on=True),
  }


def resume(work: Work, o: Options) -> dict:
  """Compares a run that was killed with one that was left alone."""
  folder = work.folder / "resume"
  shutil.rmtree(folder, ignore_errors=True)
  size = ["--steps=80"] if o.smoke else ["--set", "model.hidden_size=256", "model.ffn_size=1024"]
  return benchmark(work, "resume", "resume.py", f"--out={folder}", *size)


def speed(work: Work, o: Options, name: str, shape: Shape) -> dict:
  """Measures a training step, and PyTorch's."""
  sizes = [f"--batch={shape.batch}", f"--length={shape.length}", "--rounds=5", "--steps=10"]
  fields = shape.fields
  if o.smoke:
    sizes = [f"--batch={TINY_BATCH}", f"--length={TINY_LENGTH}", "--rounds=1", "--steps=1"]
    fields = (*fields, *pairs(TINY))
  arguments = [f"--config={shape.config}", *sizes, "--set", *fields]
  return against_torch(work, o, name, "train_step.py", *arguments)


def memory(work: Work, o: Options, name: str, shape: Shape) -> dict:
  """Compares the preflight's peak with the real one."""
  fields = {"train.batch_size": shape.batch, "data.seq_length": shape.length}
  if o.smoke:
    fields = TINY | {"train.batch_size": TINY_BATCH, "data.seq_length": TINY_LENGTH}
  arguments = [f"--config={shape.config}", "--set", *pairs(fields)]
  return benchmark(work, name, "peak_memory.py", *arguments)


def finetuning(work: Work, o: Options) -> dict:
  """Measures fine-tuning, and PyTorch's."""
  sizes = [f"--glue={o.glue}", f"--vocab={o.vocab}"] if o.glue else []
  if o.smoke:
    sizes = ["--examples=32", "--parts=1", "--buckets=1", "--layers=1"]
  return against_torch(work, o, "fine-tuning", "finetune.py", *sizes)


def shards(work: Work, o: Options) -> dict:
  """Builds the shards of the pretraining."""
  # Python's documentation is small.
  fields = {"data.sources": o.text} if o.text else {"data.vocab_size": 8192}
  if o.smoke:
    fields |= {"data.sources": o.text or f"text:{ROOT}/*.md", "data.vocab_size": 1000}
    fields |= {"data.holdout_frac": 0.2, "data.seq_length": TINY_LENGTH}
  fields |= {"data.vocab": o.vocab} if o.vocab else {}
  fields |= {"data.dir": work.folder / "shards"}
  work.module("shards", "electra_jax.data.build", "configs/small.py", fields)
  manifest = json.loads((work.folder / "shards" / "manifest.json").read_text())
  return {
    "vocabulary": manifest["vocab"]["size"],
    **{
      split: {k: facts[k] for k in ("examples", "tokens")}
      for split, facts in manifest["splits"].items()
    },
  }


def pretraining(work: Work, o: Options) -> dict:
  """Trains ELECTRA-Small by the clock, as the speedrun does, or goes on; copies its curves."""
  plan = work.folder / "pretraining-plan.json"
  if not plan.exists():  # once, by what the others leave
    spent = sum(work.record(name).get("secs", 0) for name in make_steps(o)) / 60
    minutes = max(1, min(o.pretraining_mins, TOTAL_MINS - 1 - spent))
    work.write(plan, {"minutes": minutes})
  own = {"arm": "small", "seed": 0, "shards": str(work.folder / "shards"), "smoke": o.smoke}
  try:
    return speedrun.train(work, Options(**own, **json.loads(plan.read_text())))
  finally:
    curves = work.folder / "run" / "curves.png"
    if curves.exists():
      shutil.copyfile(curves, work.folder / "curves.png")


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


def open_gpu(o: Options) -> tuple[Work, str, str]:
  """Returns the folder with its settings checked, the platform and the devices.

  Raises:
    SystemExit: packages or a GPU are missing, the folder cannot be written or is another run's.
  """
  if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"error: {sys.executable} lacks {', '.join(absent)}: install them with pip")
  out = Path(o.out or f"runs/gpu{'-smoke' * o.smoke}").absolute()
  caches = {f"{name.upper()}_CACHE_DIR": str(out / name) for name in ("torchinductor", "triton")}
  mins = o.budget_mins - REPORT_SECS / 60
  names = ("smoke", "text", "vocab", "glue", "pretraining_mins")
  settings = {name: getattr(o, name) for name in names}
  work, platform, device = open_folder(out, out / "compiled", mins, settings, o.smoke, **caches)
  if platform != "gpu" and not o.smoke:
    raise SystemExit(f"error: JAX finds no GPU, but {device}: --smoke tries all of it anywhere")
  return work, platform, device


def main(
  out: Path | None = None,
  budget_mins: float = TOTAL_MINS,
  text: str | None = None,
  vocab: str | None = None,
  glue: str | None = None,
  pretraining_mins: float = 20,
  only: list[str] = (),
  smoke: bool = False,
) -> int:
  """
  --out               folder (runs/gpu, or runs/gpu-smoke)
  --budget_mins       to end before
  --text              sources to train on, as config.data.sources (python-docs)
  --vocab             vocabulary file (one is trained); BERT's, with --glue
  --glue              folder with GLUE's folders (random tokens)
  --pretraining_mins  of ELECTRA-Small, at most
  --only              these steps
  --smoke             in miniature, on the CPU; changes no file
  """
  o = Options(**locals())
  started = time.monotonic()
  o.missing = [x for x in ("torch", "transformers") if importlib.util.find_spec(x) is None]
  steps = make_steps(o)
  chosen = choose(steps, only or list(steps))
  work, platform, device = open_gpu(o)

  def say(line: str) -> None:
    print(f"[{(time.monotonic() - started) / 60:5.1f} min] {line}", flush=True)

  found = run_steps(chosen, work, say)
  empty = {"status": LEFT, "reason": "not begun", "secs": 0.0, "result": {}}
  content = collect(
    device, {name: empty | (found.get(name) or work.record(name)) for name in steps}
  )
  work.write(work.folder / "gpu.json", content)
  print(report := gpu_report.markdown(content))
  if platform == "gpu" and not smoke:
    machine.save(str(RESULTS), content)
    if (work.folder / "curves.png").exists():
      shutil.copyfile(work.folder / "curves.png", PICTURE)
    machine.write_between(ROOT / "docs" / "speed.md", "gpu", report)
  return 1 if content["failed"] or content["wrong"] else exit_code(found)


if __name__ == "__main__":
  run_script(partial(machine.start, main))
