"""All measurements of this project on a GPU, in at most 40 minutes.

  make gpu PYTHON=python3                        # the Python that has JAX for the GPU
  python benchmarks/gpu.py [--out DIR] [--budget_mins N] [--text 'text:GLOB'] [--only STEP ...]
  python benchmarks/gpu.py --smoke               # all of it in miniature, on any machine

device        the device, and the rates of products and copies
numerics      steps, attention, packed rows and microbatches compared with the CPU in float32
resume        a killed run compared with an uninterrupted one, bit for bit
speed ...     a training step compared with transformers and torch.compile, and share of the peak
memory ...    the preflight's peak compared with the measured peak
input         the rate of the input pipeline
fine-tuning   MRPC compared with transformers and torch.compile
shards        built from --text, or from Python's documentation, for the last step
pretraining   ELECTRA-Small for --pretraining_mins (20), or the rest of the 40 minutes; curves

Needs no TensorFlow; without PyTorch, leaves out the peers. Each step is a program that writes a
JSON file to the folder; started again with the same arguments, the script continues with the
missing steps. It ends within --budget_mins and prints what is left. On a GPU it writes
benchmarks/results/gpu.json, gpu.md and gpu.png. Exit codes: 0 all done, 143 start again, 1
something failed or is wrong.
"""

import argparse
import importlib.util
import json
import shutil
import sys
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
  say,
)

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TOTAL_MINS = 40
REPORT_SECS = 10  # for writing the results
NEEDED = (
  *("absl", "etils", "flax", "jax", "matplotlib", "ml_collections", "numpy", "optax", "orbax"),
  *("rich", "safetensors", "sentencepiece", "tokenizers"),
)
Options = argparse.Namespace  # of `main`, plus `missing`: packages that peers need


class Script(NamedTuple):
  """A script of this folder."""

  file: str
  mins: float
  arguments: tuple[str, ...] = ()
  smoke: tuple[str, ...] | None = ()  # arguments with --smoke; None: left out
  against_torch: bool = False


# Both sides use fused attention without dropout on probabilities; ELECTRA-Small has this dropout,
# as in the paper.
FUSED = "model.attention_dropout=0.0"
TINY = (
  *("model.num_layers=2", "model.hidden_size=64", "model.num_heads=1"),
  *("model.ffn_size=64", "model.embedding_size=64"),
)


def speed(config: str, batch: int, length: int, mins: float, *fields: str, smoke=False) -> Script:

  def arguments(batch: int, length: int, rounds: int, steps: int, *fields: str) -> tuple[str, ...]:
    sizes = {"batch": batch, "length": length, "rounds": rounds, "steps": steps}
    options = (f"--{name}={value}" for name, value in sizes.items())
    return (f"--config={config}", *options, "--set", *fields)

  tiny = arguments(8, 32, 1, 1, *fields, *TINY) if smoke else None
  return Script("train_step.py", mins, arguments(batch, length, 5, 10, *fields), tiny, True)


def memory(config: str, batch: int, length: int, mins: float, smoke=False) -> Script:
  """Returns the comparison of the preflight's peak with the measured peak."""
  set_to = ("--set", f"train.batch_size={batch}", f"data.seq_length={length}")
  tiny = (*TINY, "train.batch_size=8", "data.seq_length=32")
  config = f"--config={config}"
  smaller = (config, "--set", *tiny) if smoke else None
  return Script("peak_memory.py", mins, (config, *set_to), smaller)


SCRIPTS = {  # quick and important scripts first
  "device": Script("device.py", 0.5, (), ("--smoke",)),
  "numerics": Script("numerics.py", 4.5, (), ("--smoke",)),
  "resume": Script(
    "resume.py", 2.5, ("--set", "model.hidden_size=256", "model.ffn_size=1024"), ("--steps=80",)
  ),
  "speed small 128": speed("configs/small.py", 128, 128, 2, smoke=True),
  "speed small 512": speed("configs/small.py", 64, 512, 2),
  "speed base 128": speed("configs/base.py", 128, 128, 2.5, FUSED),
  "speed base 512": speed("configs/base.py", 64, 512, 2.5, FUSED),
  "speed modern 150m 128": speed("configs/modern.py:150m", 128, 128, 3),
  "speed modern 150m 512": speed("configs/modern.py:150m", 32, 512, 3, smoke=True),
  "speed large 128": speed("configs/large.py", 64, 128, 3, FUSED),
  "speed large 512": speed("configs/large.py", 32, 512, 3, FUSED),
  "memory small": memory("configs/small.py", 128, 128, 5, smoke=True),
  "memory base": memory("configs/base.py", 32, 512, 3),
  "input": Script(
    "input_pipeline.py", 0.5, ("--rounds=3",), ("--examples=2000", "--rounds=1", "--secs=0.2")
  ),
  "fine-tuning": Script(
    "finetune.py", 1.5, (), ("--examples=32", "--parts=1", "--buckets=1", "--layers=1"), True
  ),
}


def measure(work: Work, o: Options, name: str) -> dict:
  """Runs a script and returns its JSON, without the fields common to all.

  Raises:
    StepError: the script failed; something "wrong" in its JSON is not a failure.
  """
  script, environment = SCRIPTS[name], {}
  arguments = [*(script.smoke if o.smoke else script.arguments)]
  if name == "resume":
    folder = work.folder / "resume"
    shutil.rmtree(folder, ignore_errors=True)
    arguments.append(f"--out={folder}")
  if name == "fine-tuning" and o.glue and not o.smoke:
    arguments += [f"--glue={o.glue}", f"--vocab={o.vocab}"]
  if script.against_torch:
    environment = {"XLA_CLIENT_MEM_FRACTION": ".45"}  # the peer takes the rest
    arguments += [] if o.missing else ["--peer", "captured" if o.smoke else "compiled"]
  result = work.folder / "parts" / f"{name.replace(' ', '-')}.json"
  result.parent.mkdir(exist_ok=True)
  result.unlink(missing_ok=True)
  command = [sys.executable, str(ROOT / "benchmarks" / script.file), *arguments]
  try:
    work.program(name, [*command, f"--json={result}"], **environment)
  except StepError:
    if not (result.exists() and json.loads(result.read_text("utf-8")).get("wrong")):
      raise
  found = json.loads(result.read_text("utf-8"))
  if script.against_torch and o.missing:
    found["could_not"].append(f"PyTorch's speed: {', '.join(o.missing)} not installed")
  return {k: v for k, v in found.items() if k not in ("machine", "command")}


def make_steps(o: Options) -> dict[str, Step]:
  measured = {
    name: Step(partial(measure, o=o, name=name), script.mins)
    for name, script in SCRIPTS.items()
    if not o.smoke or script.smoke is not None
  }
  return measured | {
    "shards": Step(partial(shards, o=o), 1, goes_on=True),
    "pretraining": Step(partial(pretraining, o=o), 1 + o.pretraining_mins, goes_on=True),
  }


def shards(work: Work, o: Options) -> dict:
  # Python's documentation is small.
  fields = {"data.sources": o.text} if o.text else {"data.vocab_size": 8192}
  if o.smoke:
    fields |= {"data.sources": o.text or f"text:{ROOT}/*.md", "data.vocab_size": 1000}
    fields |= {"data.holdout_frac": 0.2, "data.seq_length": 32}
  fields |= {"data.vocab": o.vocab} if o.vocab else {}
  fields |= {"data.dir": work.folder / "shards"}
  work.module("shards", "electra_jax.data.build", "configs/small.py", fields)
  manifest = json.loads((work.folder / "shards" / "manifest.json").read_text("utf-8"))
  return {
    "vocabulary": manifest["vocab"]["size"],
    **{
      split: {k: facts[k] for k in ("examples", "tokens")}
      for split, facts in manifest["splits"].items()
    },
  }


def pretraining(work: Work, o: Options) -> dict:
  """Trains ELECTRA-Small for some minutes, as the speedrun, or resumes; copies its curves."""
  plan = work.folder / "pretraining-plan.json"
  if not plan.exists():  # once, by what the others leave
    spent = sum(work.record(name).get("secs", 0) for name in make_steps(o)) / 60
    # Three minutes at least: compilation and a decay are in them.
    minutes = min(o.pretraining_mins, max(3, TOTAL_MINS - 1 - spent))
    work.write(plan, {"minutes": minutes})
  own = {"arm": "small", "seed": 0, "shards": str(work.folder / "shards"), "smoke": o.smoke}
  try:
    return speedrun.train(work, Options(**own, **json.loads(plan.read_text("utf-8"))))
  finally:
    curves = work.folder / "run" / "curves.png"
    if curves.exists():
      shutil.copyfile(curves, work.folder / "curves.png")


def collect(device: str, records: dict[str, dict]) -> dict:

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
  --budget_mins       time limit
  --text              sources to train on, as config.data.sources (python-docs)
  --vocab             vocabulary file (one is trained); BERT's, with --glue
  --glue              folder with GLUE's folders (random tokens)
  --pretraining_mins  time limit for ELECTRA-Small
  --only              steps to run
  --smoke             in miniature, on the CPU; changes no file
  """
  if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(f"error: {sys.executable} lacks {', '.join(absent)}: install them with pip")
  out = Path(out or f"runs/gpu{'-smoke' * smoke}").absolute()
  settings = {
    "smoke": smoke, "text": text, "vocab": vocab, "glue": glue,
    "pretraining_mins": pretraining_mins,
  }  # fmt: skip
  o = Options(**settings)
  o.missing = [x for x in ("torch", "transformers") if importlib.util.find_spec(x) is None]
  steps = make_steps(o)
  chosen = choose(steps, only or list(steps))
  caches = {f"{name.upper()}_CACHE_DIR": str(out / name) for name in ("torchinductor", "triton")}
  mins = budget_mins - REPORT_SECS / 60
  work, platform, device = open_folder(out, out / "compiled", mins, settings, gpu=True, **caches)
  found = run_steps(chosen, work, say)
  empty = {"status": LEFT, "reason": "not begun", "secs": 0.0, "result": {}}
  records = {name: empty | (found.get(name) or work.record(name)) for name in steps}
  content = collect(device, records)
  work.write(work.folder / "gpu.json", content)
  print(report := gpu_report.markdown(content))
  if platform == "gpu" and not smoke:
    machine.save(str(RESULTS), content)
    if (work.folder / "curves.png").exists():
      shutil.copyfile(work.folder / "curves.png", RESULTS.with_suffix(".png"))
    RESULTS.with_suffix(".md").write_text(report, "utf-8")
  return 1 if content["failed"] or content["wrong"] else exit_code(found)


if __name__ == "__main__":
  run_script(partial(machine.start, main))
