"""Wrong input, as typed: one line that says what is wrong, and the exit code.

Each row is a command after `python -m electra_jax.`, its exit code (2 for the command line, 1 for
what it names) and a part of the line. They run in a folder with what an earlier version wrote
(`golden/version_0_1`: data, run, finetuned) and the files that `place` adds.
"""

import gc
import hashlib
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from electra_jax.config import compare
from electra_jax.config.files import load

GOLDEN = Path(__file__).parent / "golden" / "version_0_1"
FIELDS = "--config.data.dir=data --config.data.seq_length=16"
TRAIN = f"train --config=configs/quickstart.py {FIELDS} --workdir=new"
WAS = "train --config=was.py"
AGAIN, TORN = f"{WAS} --workdir=run", f"{WAS} --workdir=torn"
ALLOW = "--config.allow_config_change"
BUILD = "data.build --config=configs/quickstart.py --config.data.dir=built"
TEXT = f"{BUILD} --config.data.sources=text:own/train.tsv"
TUNE = "finetune --config=configs/finetune/own.py --config.init=finetuned --workdir=tuned"
OWN = f"{TUNE} --config.data.dir=own"
HERE = "preflight --config=configs/base.py --topology=here"
INDEX = "finetune --predict own/index.tsv --model=finetuned --out=out.tsv"
TAGS = f"{TUNE} --config.kind=tagging --config.data.dev=own/a.tags"

ROWS = [
  # Command lines.
  ("train", 2, "--config=FILE and --workdir=DIR are needed"),
  ("train --config=configs/base.py", 2, "--config=FILE and --workdir=DIR are needed"),
  ("train --config=configs/base.py --workdir=", 2, "--config=FILE and --workdir=DIR are needed"),
  ("train --config=configs/bass.py --workdir=new", 1, "did you mean configs/base.py?"),
  ("train --config=own/train.tsv --workdir=new", 1, "not a configuration file: its name must end"),
  ("train --config=broken.py --workdir=new", 1, "broken.py is not a configuration: SyntaxError"),
  ("train --config=empty.py --workdir=new", 1, "empty.py is not a configuration file: it has no"),
  ("train --config=divides.py --workdir=new", 1, "divides.py: division by zero"),
  ("train --config=itself.py --workdir=new", 1, "maximum recursion depth exceeded"),
  ("train --config=argument.py --workdir=new", 1, "missing 1 required positional argument"),
  ("train --config=other.py --workdir=new", 1, "learning_rat\" does not exist"),
  ("train --config=sized.py:99m --workdir=new", 1, "error: sizes are 17m and 32m"),
  (f"{TRAIN} --config=configs/base.py", 2, "given twice: configs/quickstart.py and configs/ba"),
  ("train --config=configs/finetune/own.py --workdir=new", 1, "own.py is for another program: it "),
  ("flops --config=configs/small.py --match=configs/finetune/own.py", 1, "configs/base.py lacks"),
  ("finetune --config=configs/small.py --workdir=tuned", 1, "which configs/finetune/base.py lacks"),
  (f"{TRAIN} --wrokdir=x", 2, "unknown option --wrokdir; did you mean --workdir"),
  (f"{TRAIN} --confg.train.steps=1", 2, "unknown option --confg.train.steps; did you mean"),
  (f"{TRAIN} more", 2, "'more' is not an option"),
  (f"{TRAIN} --import=no_such_module", 1, "--import=no_such_module: ModuleNotFoundError: No modul"),
  (f"{TRAIN} --import=missing.py", 1, "--import=missing.py: FileNotFoundError: "),
  (f"{TRAIN} --import=wrong.py", 1, "--import=wrong.py: NameError: name 'x' is not defined"),
  (f"{TRAIN} --config.train.step=5", 1, "did you mean config.train.steps?"),
  (f"{TRAIN} --config.objective.rtd_weight=5", 1, "was renamed to config.objective.discriminator_"),
  (f"{TRAIN} --config.optimizer.decoupled=1", 1, "renamed to config.optimizer.separate_optimizers"),
  (f"{TRAIN} --config.steps=1", 1, "unknown field config.steps; did you mean config.train.steps"),
  (f"{TRAIN} --config.log.tensorboard=true", 1, "tensorboard was renamed to config.log"),
  (f"{TRAIN} --config.train=5", 1, "config.train is a group of fields"),
  (f"{TRAIN} --config.train.steps=many", 2, "flag --config.train.steps=many: "),
  (f"{TRAIN} --config.train.steps=None", 2, "train.steps=None: the field needs a value"),
  (f"{TRAIN} --config.model.biases=perhaps", 2, "model.biases=perhaps"),
  (f"{TRAIN} --config.model.dtype=float16", 1, "must be one of auto, float32, bfloat16, got 'floa"),
  # Values.
  (f"{TRAIN} --config.train.steps=0", 1, "config.train.steps must be above 0, got 0"),
  (f"{TRAIN} --config.train.steps=2147483648", 1, "steps must be below 2**31, got 2147483648"),
  (f"{TRAIN} --config.train.batch_size=33", 1, "33 is not divisible by 8 devices"),
  (f"{TRAIN} --config.data.seq_length=65", 1, "seq_length 65 is above config.model.max_positions "),
  (f"{TRAIN} --config.data.seq_length=12", 1, "shards have 16 tokens, but data.seq_length is 12"),
  (f"{TRAIN} --config.objective.temperature=0", 1, "temperature must be above 0, got 0"),
  (f"{TRAIN} --config.optimizer.separate_optimizers=false", 1, "needs optimizer.separate_optimize"),
  (f"{TRAIN} --config.model.attention=cudnn", 1, "cudnn needs a GPU"),
  # Data and folders.
  (f"{TRAIN} --config.data.dir=nowhere", 1, "nowhere/manifest.json is missing: build the shards"),
  (f"{TRAIN} --config.data.dir=ftp://host/x", 1, "the scheme must be one of s3://, gs://, h"),
  (f"{TRAIN} --config.data.dir=short", 1, "bytes, but the manifest says"),
  (f"{TRAIN} --config.data.dir=reworded", 1, "but the vocabulary of the shards has"),
  (f"{TRAIN} --config.data.dir=notes", 1, "is not a manifest of shards"),
  (f"{TRAIN} --config.data.dir=many", 1, "manifest.json is damaged: 'many' is not of type int"),
  (f"{TRAIN} --verify --config.data.dir=flipped", 1, "is damaged: SHA-256"),
  (f"{TRAIN} --config.train.batch_size=16000", 1, "sequences are too few for a batch of 16,000"),
  (f"{TRAIN} --workdir=gs://bucket/run", 1, "pip install 'electra_jax[buckets]'"),
  (f"{TRAIN} --workdir=finetuned", 1, "finetuned holds"),
  (f"{TRAIN} --workdir=task", 1, "config.json is not from electra-jax train: task"),
  (f"{TRAIN} --workdir=words", 1, "words holds vocab but no config.json: it is not a run"),
  (f"{TRAIN} --config.health.reference=odd.json", 1, "odd.json is not a band of electra-jax"),
  (f"{TRAIN} --coordinator=here --num_processes=2 --process_id=0", 1, "here must be HOST:PORT"),
  (f"{TRAIN} --coordinator=x:1 --num_processes=2 --process_id=2", 1, "between 0 and 1, got 2"),
  (f"{TRAIN} --workdir=/proc/new", 1, "No such file or directory: /proc/new"),
  (f"{TRAIN} --workdir=own/train.tsv/run", 1, "own/train.tsv/run"),
  (f"{TRAIN} --config.model.attention=splash", 1, "splash needs a TPU"),
  (f"{TRAIN} --config.model.num_heads=128", 1, "RoPE needs an even head size, got 1"),
  (f"{TRAIN} --config.model.window=32", 1, "window=32 covers all of config.data.seq_length 16"),
  (f"{TRAIN} --config.init_optimizer=true", 1, "init_optimizer needs config.init_from to be a run"),
  (f"{TRAIN} --config.init_step=4", 1, "init_step needs config.init_from to be a run"),
  (f"{TRAIN} --config.init_step=0", 1, "init_step needs config.init_from to be a run"),
  (f"{TRAIN} --config.init_from=finetuned --config.init_optimizer=true", 1, "needs a run: "),
  (f"{WAS} --workdir=new --config.init_from=run --config.init_step=5", 1, "checkpoint of step 5"),
  (f"{TRAIN} --config.init_from=nowhere", 1, "nowhere does not exist"),
  (f"{TRAIN} --config.init_from=notes", 1, "is not a run, an orbax export"),
  # Resuming.
  (f"{TRAIN} --workdir=run", 1, "run: model.block was 'post_norm', is 'pre_norm'"),
  (f"{AGAIN} --config.train.steps=2", 1, "run is at step 4: raise config.train.steps=2"),
  (f"{AGAIN} --config.train.steps=6", 1, "train.steps was 8, is 6; use another --workdir, or resu"),
  (f"{AGAIN} --config.model.hidden_size=64 {ALLOW}=model", 1, "size was 32, is 64; use another"),
  (f"{AGAIN} --config.data.dir=other_words {ALLOW}=data", 1, "data.vocab_hash was 'bc7494e773ae"),
  (f"{AGAIN} --config.train.steps=2 {ALLOW}=train", 1, "is at step 4: raise"),
  (f"{TORN} --config.optimizer.b1=0.5 {ALLOW}=optimizer", 1, "torn/checkpoints/4 is damaged"),
  (f"{AGAIN} {ALLOW}=trian", 1, "unknown field trian"),
  (f"{WAS} --workdir=bare", 1, "is missing, but metrics.jsonl has lines: restore "),
  # Builds.
  ("data.build --config=configs/base.py", 1, "set config.data.dir to the folder"),
  (f"{BUILD} --config.data.sources=text:nothing*", 1, "nothing*"),
  (f"{BUILD} --config.data.sources=pages:x", 1, "pages"),
  (f"{BUILD} --config.data.sources=jsonl:lines.jsonl", 1, "name the field, e.g. jsonl:GLOB#text"),
  (f"{BUILD} --config.data.sources=jsonl:lines.jsonl#body", 1, "string field 'body' (found: text)"),
  (f"{BUILD} --config.data.sources=parquet:own/*.tsv#text", 1, "own/"),
  (f"{BUILD} --config.data.vocab=words", 1, "is neither a file nor one of wordp"),
  (f"{TEXT} --config.data.vocab=twice.txt", 1, "has 1 duplicate entries, first 'a'"),
  (f"{TEXT} --config.data.vocab=carriage.txt", 1, "has 1 duplicate entries, first 'a'"),
  (f"{TEXT} --config.data.vocab=blank.txt", 1, "has 1 duplicate entries, first ''"),
  (f"{BUILD} --config.data.seq_length=600", 1, "seq_length 600 is above config.model.max_position"),
  (f"{TEXT} --config.data.dir=words/vocab", 1, "words/vocab holds vocab.txt but no manifest.json"),
  (f"{BUILD} --config.data.vocab=bpe --config.data.strip_accents=true", 1, "=wordpiece, not bpe"),
  (f"{BUILD} --config.data.dir=data", 1, "data holds another build"),
  (f"{BUILD} --part=0/2 --overwrite", 2, "--part cannot be combined with --overwrite, --runner or"),
  (f"{BUILD} --part=0/2 --runner=beam", 2, "--part cannot be combined with --overwrite, --runner"),
  (f"{BUILD} --part=0/2 -- --direct", 2, "--part cannot be combined with --overwrite, --runner or"),
  (f"{BUILD} --config.data.vocab=words --part=0/1", 1, "is neither a file nor one of wordp"),
  (f"{TEXT} --config.data.vocab=twice.txt --part=0/1", 1, "has 1 duplicate entries, first 'a'"),
  (f"{TEXT} --part=0/9", 1, "9 parts need at least 9 files, but there are 1"),
  # Fine-tuning.
  ("finetune --config=configs/finetune/own.py", 2, "--workdir"),
  ("finetune --config=configs/finetune/own.py --workdir=", 2, "--workdir=DIR is needed"),
  (f"{TUNE} --config.init=nowhere --config.data.dir=own", 1, "nowhere does not exist"),
  (f"{TUNE} --config.data.dir=nowhere", 1, "nowhere"),
  (f"{OWN} --config.task=results.jsonl", 1, "'results.jsonl' is a file in the workdir: choose"),
  (f"{OWN} --workdir=own", 1, "own/results.jsonl:1: not a row of results of electra-jax finetune"),
  (f"{OWN} --workdir=picture", 1, "picture has results.png but no results.jsonl: use another"),
  (f"{OWN} --workdir=emptied", 1, "own has no readable results: use another --workdir (emptied"),
  ("finetune --compare emptied task", 1, "task/own is damaged: No data left in file"),
  (f"{OWN} --config.optimizer.schedule=wds", 1, "one of product, joined, wsd, got 'wds'"),
  (f"{OWN} --config.optimizer.schedule=wsd", 1, "decay_frac, e.g. to 0.2, if and only if"),
  (f"{OWN} --config.own.text=sentence", 1, "has no column 'sentence' (columns: text, label)"),
  (f"{OWN} --config.data.split=test", 1, "unknown field config.data.split"),
  (f"{TAGS} --config.data.train=own/same.tags", 1, "own/same.tags: all words have the tag X"),
  ("finetune --compare words notes", 1, "words holds no results of electra-jax finetune"),
  ("finetune --predict own/dev.tsv --split test", 2, "unknown option --split; "),
  ("finetune --predict own/dev.tsv", 1, "--predict needs --model"),
  ("finetune --predict own/dev.tsv --model=run", 1, "run"),
  ("finetune --predict nothing.tsv --model=finetuned", 1, "nothing.tsv"),
  ("finetune --predict own/dev.tsv --model=finetuned --out=lines.jsonl", 1, "lines.jsonl exists"),
  ("finetune --predict own/dev.tsv --model=finetuned --out=o.csv", 1, "o.csv: the name of a file"),
  ("finetune --predict own/dev.tsv --model=finetuned --out=o.tsv.gz", 1, "in .tsv or .jsonl"),
  ("finetune --predict own/dev.tsv --model=finetuned --out=o.JSONL", 1, "in .tsv or .jsonl"),
  (f"{INDEX} --columns=index", 1, "'index' is a column of the predictions: rename it in"),
  # Export, scores, sizes.
  ("export run out", 2, "the following arguments are required: --to"),
  ("export run --to=hf", 2, "--model=SOURCE and --out=DIR are needed"),
  ("export nowhere out --to hf", 1, "nowhere does not exist"),
  ("export google/electra out --to hf", 1, "on Hugging Face's Hub as hf://ORG/NAME or hf:"),
  ("export hf://electra out --to hf", 1, "write a network on the Hub as hf://ORG/NAME or hf://ORG/"),
  ("export run out --to=orbax --push=me/x", 2, "--push needs --to hf or onnx"),
  ("export run out --to=hf --all-checkpoints --push=me/x", 2, "without --all-checkpoints"),
  ("export run out --to=hf --overwrite", 2, "--overwrite needs --push"),
  ("export notes out --to hf", 1, "is not a run, an orbax export"),
  ("export torch out --to hf", 1, "torch/config.json is missing beside pytorch_model.bin"),
  ("export run/checkpoints out --to hf", 1, "is part of a run: use the run's folder, "),
  ("export run own --to hf", 1, "own exists: choose another name"),
  ("export run /proc/out --to orbax", 1, "/proc"),
  ("export finetuned out --to hf --heads=2", 1, "is not a TF1 checkpoint"),
  ("export nowhere out --to orbax --dtype=bfloat16", 2, "--dtype: only for --to hf, not orbax"),
  ("export nowhere out --to orbax --max-shard-mb=5", 2, "--max-shard-mb: only for --to hf"),
  ("export nowhere out --to hf --dtype=float8", 2, "invalid choice: 'float8'"),
  ("export nowhere out --to hf --max-shard-mb=0", 2, "must be a number above 0, got '0'"),
  ("export nowhere out --to hf --max-shard-mb=nan", 2, "must be a number above 0, got 'nan'"),
  ("score --checkpoint=", 2, "--model=SOURCE is needed"),
  ("score --model=nowhere", 1, "nowhere does not exist"),
  ("score --checkpoint=finetuned", 1, "finetuned"),
  ("score --checkpoint=run --batch_size=-1", 2, "--batch-size: must be a number above 0 and b"),
  ("score --checkpoint=run --nbest --weight=nan", 2, "--weight: must be finite, got 'nan'"),
  ("score --checkpoint=run --nbest --weight=-inf", 2, "--weight: must be finite, got '-inf'"),
  (f"{TRAIN} --config.eval.pairs=nothing.jsonl", 1, "nothing.jsonl"),
  ("evaluate", 2, "required: pairs|cloze|detect|probe"),
  ("evaluate pairs --model=run --data=nothing.jsonl", 1, "nothing.jsonl"),
  ("evaluate pairs --model=run --data=own/dev.tsv", 1, "own/dev.tsv:1 has no column"),
  ("evaluate pairs --model=run --data=own/empty.jsonl", 1, "own/empty.jsonl: the file is empty"),
  ("evaluate pairs --model=run --data=own/half.jsonl", 1, "half.jsonl:1 has no column 'sentence_"),
  ("evaluate pairs --model=run --data=own/odd.jsonl", 1, "own/odd.jsonl:1: not UTF-8"),
  ("evaluate pairs --model=run --data=own/deep.jsonl", 1, "own/deep.jsonl:1: not a JSON object"),
  ("evaluate pairs --model=finetuned --data=own/pairs.jsonl", 1, "scoring sentences needs"),
  ("evaluate pairs --model=run --data=own/pairs.jsonl --scorer=best", 2, "invalid choice: 'best'"),
  ("evaluate pairs --model=run --data=own/pairs.jsonl --out=data", 1, "data exists: choose"),
  ("evaluate detect --model=run --data=run", 1, "manifest.json is missing"),
  ("evaluate detect --model=run --data=data --batch_size=-1", 2, "must be a number above 0"),
  ("evaluate detect --model=run --data=data --examples=0", 2, "above 0 and below 2**31, got '0'"),
  ("evaluate probe --model=run --train=x --test=x --max_words=-5", 2, "and below 2**31, got '-5'"),
  ("evaluate probe --model=run --train=own/a.tags --test=own/b.tags", 1, "b.tags: tags missing "),
  ("evaluate probe --model=run --train=own/dev.tsv --test=x", 1, "3 columns, line 1 has 2"),
  ("flops --config=configs/smal.py", 1, "did you mean configs/small.py?"),
  (f"{HERE} --config.objective.name=elektra", 1, "config.objective.name must be one of"),
  (f"{HERE} --config.data.seq_length=1024", 1, "config.data.seq_length 1024 is above"),
  (f"{HERE} --config.train.accumulation=0", 1, "config.train.accumulation must be above 0, got 0"),
  (f"{HERE} --config.model.attention=cudnn", 1, "config.model.attention=cudnn needs a GPU"),
  (f"{HERE} --config.eval.batch_size=9", 1, "config.eval.batch_size: batch size 9 is not divisib"),
  ("preflight --config=configs/base.py --topology=v99:2x2", 1, "must be a TPU chip"),
  ("preflight --config=configs/base.py --topology=v5e:3", 1, "v5e:3"),
  ("preflight --config=configs/base.py --topology=h200x12", 1, "(one host) or a multiple of 8"),
  ("preflight --config=configs/base.py --topology=v99:2 --json=no/x", 1, "or directory: no/x"),
  ("preflight --config=configs/base.py --topology=v99:2 --json=own", 1, "own exists"),
  ("preflight --config=configs/base.py --topology=here,h200x8", 2, "cannot be combined"),
  ("report run --out=out.html --price=nan", 2, "must be at least 0 and finite, got 'nan'"),
  ("report run --out=out.html --price=-5", 2, "must be at least 0 and finite, got '-5'"),
  ("report typed --out=out.html", 1, "config.json of the run is damaged: "),
  ("report --make-band run --out=out.json --price=5", 2, "cannot be combined with --price, --pair"),
]  # fmt: skip

LOAD = "from electra_jax.config.files import load\n\n"
BASE = LOAD + "def get_config():\n  c = load('base.py')\n{}  return c\n"
WORDS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n"
TABLE = "text\tlabel\na b\tx\nc d\ty\n"
FILES = {
  "broken.py": "def get_config(:\n",
  "empty.py": "x = 1\n",
  "wrong.py": "x\n",
  "argument.py": "def get_config(size):\n  pass\n",
  "divides.py": "def get_config():\n  return 1 / 0\n",
  "itself.py": LOAD + "get_config = lambda: load('itself.py')\n",
  "sized.py": "def get_config(size):\n  raise ValueError('sizes are 17m and 32m')\n",
  "other.py": BASE.format("  c.optimizer.learning_rat = 1\n"),
  "odd.json": (
    '{"runs": 3, "every_steps": 50, "fields": {}, "levels": {"train": {"50": {"x": [1, 0]}}}}'
  ),
  "twice.txt": WORDS + "a\n",
  "carriage.txt": WORDS + "a\r\n",
  "blank.txt": WORDS + "\n\n",
  "lines.jsonl": '{"text": "one"}\n',
  "own/train.tsv": TABLE,
  "own/dev.tsv": TABLE,
  "own/index.tsv": "index\ttext\n7\ta b\n",
  "own/empty.jsonl": "",
  "own/half.jsonl": '{"sentence_good": "a"}',
  "own/pairs.jsonl": '{"sentence_good": "a", "sentence_bad": "b"}',
  "own/odd.jsonl": '{"sentence_good": "a", "sentence_bad": "b", "UID": "\\ud800"}',
  "own/deep.jsonl": "[" * 100_000,
  "own/a.tags": "one A\ntwo B\n",
  "own/same.tags": "one X\ntwo X\n",
  "own/b.tags": "one C\n",
  "own/results.jsonl": '{"mine": 1}\n',
  "task/own/results.jsonl": "",
  "task/own/units.npz": "",
  "emptied/own/results.jsonl": "",
  "words/vocab/vocab.txt": "mine\n",
  "picture/results.png": "mine",
  "notes/manifest.json": "{}",
  "torch/pytorch_model.bin": "",
}


@pytest.fixture(scope="module")
def server():
  """A process that has imported the libraries and forks into the programs."""
  context = multiprocessing.get_context("forkserver")
  context.set_forkserver_preload(["electra_jax.interop.sources", "electra_jax.data.chunks"])
  return context


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
  """The folder where the commands run."""
  place = tmp_path_factory.mktemp("place")
  shutil.copytree(GOLDEN, place, dirs_exist_ok=True)
  saved = json.loads((place / "run" / "config.json").read_text())
  manifest = json.loads((place / "data" / "manifest.json").read_text())
  fields = compare.upgrade(compare.flatten(saved))
  known = compare.flatten(load("base.py"))
  fields = {k: v for k, v in fields.items() if k in known} | {"data.dir": "data"}
  was = "".join(f"  c.{k} = {v!r}\n" for k, v in fields.items())
  head = {"kind": "text", "arguments": {"outputs": 2}}
  facts = {"kind": "text", "name": "own", "head": head, "max_length": 16, "labels": []}
  task = json.dumps({"config": {}, "facts": facts, "examples": {"dev": "same"}})
  tasks = ("task/config.json", "task/own/config.json", "emptied/own/config.json")
  for name, text in (FILES | {"was.py": BASE.format(was)} | dict.fromkeys(tasks, task)).items():
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)
  np.savez(place / "emptied" / "own" / "units.npz", dev=np.zeros((1, 2, 2)))

  for name in ("short", "reworded", "flipped", "many", "other_words"):
    shutil.copytree(place / "data", place / name)
  vocab = place / "other_words" / "vocab.txt"
  vocab.write_text("\n".join([*vocab.read_text().splitlines()[:-1], "other"]) + "\n")
  words = manifest["vocab"] | {"hash": hashlib.sha256(vocab.read_bytes()).hexdigest()}
  (vocab.parent / "manifest.json").write_text(json.dumps(manifest | {"vocab": words}))
  manifest["splits"]["train"]["examples"] = "many"
  (place / "many" / "manifest.json").write_text(json.dumps(manifest))
  shard = next((place / "short").glob("train-*.bin"))
  os.truncate(shard, shard.stat().st_size - 1)
  with (place / "reworded" / "vocab.txt").open("a") as file:
    file.write("more\n")
  shard = next((place / "flipped").glob("train-*.bin"))
  content = bytearray(shard.read_bytes())
  content[7] ^= 1
  shard.write_bytes(content)

  for name in ("torn", "typed", "bare"):
    shutil.copytree(place / "run", place / name)
  largest = max((place / "torn" / "checkpoints").rglob("*"), key=lambda p: p.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  saved["train"]["steps"] = "8"
  (place / "typed" / "config.json").write_text(json.dumps(saved))
  shutil.rmtree(place / "bare" / "checkpoints")
  return place


def become(command: str, place: Path) -> None:
  """Runs a program in the folder; what it prints goes to the file `output`."""
  gc.freeze()  # a collection would write to, and so copy, the pages of all that was imported
  with (place / "output").open("w") as file:
    for stream in (sys.stdout, sys.stderr):
      os.dup2(file.fileno(), stream.fileno())
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.chdir(place)
  module, *sys.argv[1:] = shlex.split(command)
  runpy.run_module(f"electra_jax.{module}", run_name="__main__", alter_sys=True)


def snapshot(place: Path) -> set[tuple[str, int]]:
  """Returns the path and the CRC of every file but the locks and what a command printed."""
  files = (p for p in place.rglob("*") if p.is_file() and p.name not in (".lock", "output"))
  return {(str(p.relative_to(place)), zlib.crc32(p.read_bytes())) for p in files}


# These have a network made first.
LONG = [row for row in ROWS if re.search(r"init_from=(nowhere|notes|run)", row[0])]


@pytest.mark.parametrize(
  ("command", "code", "part"),
  [pytest.param(*row, id=row[0], marks=pytest.mark.long if row in LONG else ()) for row in ROWS],
)
def test_wrong_input_is_one_line_and_leaves_everything_as_it_was(
  server, place, command, code, part
):
  before = snapshot(place)
  process = server.Process(target=become, args=(command, place), daemon=True)
  process.start()
  process.join(120)
  process.kill()  # one that is not refused would train beside the other tests
  output = (place / "output").read_text()
  assert process.exitcode == code, output
  errors = [line for line in output.splitlines() if "error: " in line]
  assert len(errors) == 1 and part in errors[0] and "Traceback" not in output, output
  assert len(errors[0]) < 500
  may = ("new/", "__pycache__")
  assert not {name for name, _ in snapshot(place) ^ before if not name.startswith(may)}
