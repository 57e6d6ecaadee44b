"""What init_from decides: shapes, sharing, vocabulary; what differs is refused by field."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import long_except, make_tiny_config, parse_fields
from test_report import GOLDEN
from test_train import lines

import electra_jax
from electra_jax.commands import cli
from electra_jax.config import compare, files, validate
from electra_jax.core import networks
from electra_jax.data import tokenizer
from electra_jax.interop import initial, sources
from electra_jax.interop.weights import ExchangeError
from electra_jax.pretrain import train

SHAPES = "generator.width_multiplier=1.5 generator.depth_multiplier=0.5 model.layer_norm_eps=1e-6"
# {sharing: the fields of a run}
RUNS = {
  "all tables": SHAPES,
  "none": f"{SHAPES} generator.tie=none",
  "none, of the discriminator's width": f"{SHAPES} generator.tie=none generator.embedding_size=8",
  "words": f"{SHAPES} generator.tie=tokens",
  "none of a modern network": (
    "model.block=pre_norm model.norm=rms_norm model.feed_forward=geglu model.positions=rope"
    " model.biases=False model.token_types=False model.qk_norm=True model.head_norm=True"
    " generator.tie=none generator.width_multiplier=1.0"
  ),
}
WARM_UP = {"optimizer.warmup_steps": 1}
STILL = {**WARM_UP, "train.steps": 1}  # the first rate is 0: weights stay, and programs are shared


def unset(shards: str, origin: Path, **fields):
  """Returns a configuration that starts from origin and says nothing of its networks."""
  config, base = make_tiny_config(shards), files.load("base.py")
  config.model, config.generator = base.model, base.generator
  config.update_from_flattened_dict({"init_from": str(origin), **STILL, **fields})
  return config


def run_of(shards: str, workdir: Path, fields: str) -> Path:
  config = make_tiny_config(shards)
  config.update_from_flattened_dict({**parse_fields(fields), **WARM_UP, "train.steps": 2})
  train.train(config, workdir)
  return workdir


def export(run: Path, out: Path, to: str = "hf") -> Path:
  cli.call("export", [f"--model={run}", f"--to={to}", f"--out={out}"])
  return out


def weights(run: Path) -> dict:
  """Returns a run's networks {name: {"embeddings", "encoder"}}."""
  folder = sources.data_folder(run)
  found = sources.read_run(run, tokenizer.load_from(folder, sources.vocab_of(folder)))
  names = ("discriminator", "generator")
  of = {name: networks.weights_of(found.spec, found.params, name) for name in names}
  return {name: {k: of[name][k] for k in ("embeddings", "encoder")} for name in names}


def same(a, b) -> bool:
  return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
    jax.tree.map(np.array_equal, a, b)
  )


@pytest.mark.parametrize("name", long_except(of=list(RUNS), nightly=(0, 2)))
def test_nothing_of_the_networks_has_to_be_said_again(name, tiny_shards, tmp_path, capsys):
  origin = run_of(tiny_shards, tmp_path / "origin", RUNS[name])
  begins = [origin] if "modern" in name else [origin, export(origin, tmp_path / "hf")]
  for i, source in enumerate(begins):
    capsys.readouterr()
    train.train(unset(tiny_shards, source), tmp_path / str(i))
    printed = capsys.readouterr().out
    taken = printed.partition("as in init_from:")[2].partition("\n")[0]
    assert "model.embedding_size = 8" in taken and "warning" not in printed
    assert same(weights(tmp_path / str(i)), weights(origin))
    saved = json.loads((tmp_path / str(i) / "config.json").read_text())
    theirs = json.loads((origin / "config.json").read_text())
    for field in parse_fields(RUNS[name]):
      group, _, key = field.partition(".")
      assert saved[group][key] == theirs[group][key]
  # The source may be gone when the run resumes.
  shutil.move(origin, tmp_path / "elsewhere")
  train.train(unset(tiny_shards, origin, **{"train.steps": 1}), tmp_path / "0")
  assert "already at step 1" in capsys.readouterr().out


@pytest.mark.long
def test_a_detector_alone_and_a_masked_language_model_alone(tiny_shards, tmp_path, capsys):
  hf = export(run_of(tiny_shards, tmp_path / "origin", SHAPES), tmp_path / "hf")
  train.train(unset(tiny_shards, hf / "discriminator"), tmp_path / "detector")
  assert "newly initialised: generator/encoder, generator/mlm_head" in capsys.readouterr().out
  before, after = (weights(tmp_path / x)["discriminator"] for x in ("origin", "detector"))
  assert same(before, after)
  # A masked language model gives its shape to the main network, and its words to both.
  wide = {"generator.depth_multiplier": 1.0, "generator.width_multiplier": 1.0}
  train.train(unset(tiny_shards, hf / "generator", **wide), tmp_path / "words")
  encoder = weights(tmp_path / "origin")["generator"]["encoder"]
  assert all(same(found["encoder"], encoder) for found in weights(tmp_path / "words").values())
  # But not where it is what the run's generator is.
  config = make_tiny_config(tiny_shards)
  config.update_from_flattened_dict({**parse_fields(SHAPES), "init_from": str(hf / "generator")})
  assert initial.resolve(config)[1] == {}


def test_fields_that_are_set_and_differ_are_refused_by_name(
  tiny_shards, straight, tmp_path, monkeypatch
):
  hf = export(straight, tmp_path / "hf")
  for source in (straight, hf):
    config = make_tiny_config(tiny_shards)  # which also sets what is equal
    config.model.num_heads, config.generator.width_multiplier = 4, 1.5
    config.init_from = str(source)
    with pytest.raises(ExchangeError) as refused:
      train.train(config, tmp_path / "new")
    assert str(refused.value) == (
      f"config.init_from={source} has model.num_heads=2 (here 4), generator.width_multiplier=0.5"
      " (here 1.5): leave these fields unset, as in configs/base.py, to take them from init_from"
    )
    assert not (tmp_path / "new" / "config.json").exists()
    # On the command line, a field is set though its value is base.py's.
    with pytest.raises(ExchangeError, match=r"has model.num_heads=2 \(here 12\): leave"):
      initial.resolve(unset(tiny_shards, source), ["model.num_heads", "train.steps"])
  long = unset(tiny_shards, hf)
  long.data.seq_length = 32  # raising max_positions was named first, then refused
  with pytest.raises(ValueError, match="max_positions 16, which init_from fixes: build shards"):
    validate.check_fields(initial.resolve(long)[0])
  # What only changes outputs is taken as it is set.
  config, taken = initial.resolve(unset(tiny_shards, hf, **{"model.layer_norm_eps": 1e-5}))
  assert config.model.layer_norm_eps == 1e-5 and "model.layer_norm_eps" not in taken
  # One table of width 32 becomes two, though the generator is 8 wide.
  monkeypatch.chdir(shutil.copytree(GOLDEN, tmp_path / "golden"))
  tied = unset(tiny_shards, export(Path("run"), tmp_path / "narrow"), **{"generator.tie": "none"})
  assert initial.resolve(tied)[1]["generator.embedding_size"] == 32


@pytest.mark.long
def test_tables_that_differ_cannot_be_shared_but_can_be_a_change(tiny_shards, tmp_path):
  """An export of gdes has two tables; the discriminator's is again the generator's and a change."""
  gdes = "generator.tie=gdes generator.width_multiplier=1.5"
  origin = run_of(tiny_shards, tmp_path / "origin", gdes)
  hf = export(origin, tmp_path / "hf")
  for tie in ("embeddings", "tokens"):
    with pytest.raises(ExchangeError, match=rf"has generator.tie='none' \(here '{tie}'\)"):
      initial.resolve(unset(tiny_shards, hf, **{"generator.tie": tie}), ["generator.tie"])
  train.train(unset(tiny_shards, hf, **{"generator.tie": "gdes"}), tmp_path / "again")
  before, after = weights(origin), weights(tmp_path / "again")
  assert same(before["generator"], after["generator"])
  # E + (D - E) is D but for the rounding of the two operations.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7),
    before["discriminator"],
    after["discriminator"],
  )
  train.train(unset(tiny_shards, hf), tmp_path / "none")
  assert same(before, weights(tmp_path / "none"))


@pytest.mark.long
def test_a_build_for_init_from_has_its_vocabulary(tiny_shards, tmp_path):
  origin = run_of(tiny_shards, tmp_path / "origin", SHAPES)
  text = Path(tiny_shards).parent / "text.txt"
  built = {"data.sources": f"text:{text}", "data.dir": str(tmp_path / "shards")}
  built |= {"data.workers": 1, "data.seq_length": 16, "data.holdout_frac": 0.1}
  for i, source in enumerate((origin, export(origin, tmp_path / "hf"))):
    fields = {**built, "data.dir": str(tmp_path / f"shards{i}")}
    config = unset(tiny_shards, source, **fields)
    manifest = electra_jax.build(config)
    assert manifest["vocab"]["hash"] == sources.vocab_of(tiny_shards).hash
    train.train(config, tmp_path / f"new{i}")
    assert lines(tmp_path / f"new{i}")[-1]["step"] == 1
  for vocab, message in (
    ("bpe", "trains a new vocabulary"),
    (str(tmp_path / "v.txt"), "differs from the vocab"),
  ):
    (tmp_path / "v.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    config.data.vocab = vocab
    with pytest.raises(ExchangeError, match=f"config.data.vocab={vocab} {message}"):
      initial.with_vocabulary(config)
  shutil.copytree(tmp_path / "hf" / "discriminator", tmp_path / "bare")
  for path in (tmp_path / "bare").glob("*token*"):
    path.unlink()
  (tmp_path / "bare" / "vocab.txt").unlink()
  config = unset(tiny_shards, tmp_path / "bare", **built)
  with pytest.raises(ExchangeError, match="bare has no tokenizer: add its vocab.txt, tokenizer"):
    initial.with_vocabulary(config)
  config.data.vocab = str(tmp_path / "hf" / "discriminator" / "vocab.txt")
  assert initial.with_vocabulary(config).data.vocab == config.data.vocab


def test_the_caller_keeps_its_configuration(tiny_shards, straight):
  config = unset(tiny_shards, straight)
  before = compare.flatten(config)
  resolved, taken = initial.resolve(config)
  assert compare.flatten(config) == before and compare.flatten(resolved) == {**before, **taken}
