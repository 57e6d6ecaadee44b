"""FLOPs: the paper's accounting to four digits, and the real products against the compiler's."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from conftest import long_except
from test_objectives import keys_of, make_batch

from electra_jax.config import files
from electra_jax.core import flops, masking, networks, objectives
from electra_jax.core.networks import generator_size
from electra_jax.core.transformer_config import Compute, TransformerConfig
from electra_jax.cost import paper
from electra_jax.cost import tables as program

# What the original's script prints.
SCRIPT = {
  "GPT": "3.969e+19", "BERT-Small": "1.419e+18", "BERT-Base": "6.428e+19",
  "BERT-Large": "1.917e+20", "BERT (ours)": "7.117e+20", "ELECTRA-Small": "1.294e+18",
  "ELECTRA-Base": "6.425e+19", "ELECTRA-400K": "7.118e+20", "ELECTRA-1.75M": "3.114e+21",
  "RoBERTa-500K": "3.187e+21", "ALBERT-xxl": "3.114e+22",
}  # fmt: skip


@pytest.mark.parametrize("name", paper.PAPER)
def test_the_original_script_prints_what_is_counted_and_the_paper_but_for_electra_small(name):
  nets, batch_size, steps, published = paper.PAPER[name]
  total = paper.train_flops(nets, batch_size, steps)
  assert f"{total:.3e}" == SCRIPT.get(name, f"{total:.3e}")
  agrees = f"{total:.1e}" == f"{published:.1e}"
  assert agrees != name.startswith("ELECTRA-Small")


@pytest.mark.parametrize("name, model", [("small", "Small"), ("base", "Base"), ("large", "400K")])
def test_a_config_of_the_paper_costs_what_its_model_does(name, model):
  config = files.load(f"{name}.py")
  counted, _ = program.step_costs(config)
  nets, batch_size, steps, _ = paper.PAPER[f"ELECTRA-{model}"]
  expected = paper.train_flops(nets, batch_size, steps)
  assert sum(counted.values()) * config.train.steps == pytest.approx(expected, rel=1e-12)


def test_a_vocabulary_file_counts_with_its_own_size(tmp_path):
  config, file = files.load("quickstart.py"), tmp_path / "vocab.txt"
  file.write_text("".join(f"{x}\n" for x in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc")))
  config.data.vocab_size = 8
  expected = program.step_costs(config)
  config.data.vocab, config.data.vocab_size = str(file), 30522
  assert program.step_costs(config) == expected
  config.data.vocab = str(tmp_path / "elsewhere.txt")  # the size is all that is known
  assert program.step_costs(config) != expected


def test_gates_and_windows_count_in_the_papers_accounting():
  plain = TransformerConfig(100, 64, 64, 3, 2, 96, 256)
  modern = dataclasses.replace(plain, feed_forward="geglu", global_every=3, window=32)

  def counted(cfg):
    return paper.sequence_flops(networks.PretrainSpec(cfg, cfg, None, objective="bert"), 256)

  gate = 3 * 256 * (2 * 64 * 96 + 96)  # three layers: a product of 64 x 96, and a factor
  # Two layers of three compare 48 keys, not 256: the scores, the sum, and softmax of two heads.
  window = 2 * 256 * (256 - 48) * (2 * 64 + 2 * 64 + 10 * 2)
  change = counted(modern)["discriminator"] - counted(plain)["discriminator"]
  assert change == pytest.approx(2 * (gate - window), rel=1e-12)


def test_bert_small_takes_the_steps_that_match_electra_small():
  config = files.load("bert_small.py")
  found = program.matching_steps(config, files.load("small.py"))
  assert found["by the paper's accounting"] == config.train.steps


CASES = [
  ("electra", "transformer", {}),
  ("electra", "frozen", {"tying": "none"}),
  ("electra", "uniform", {}),
  ("electra", "transformer", {"sampling_dropout": False}),
  ("replace_mlm", "transformer", {}),
  ("electra_mlm", "transformer", {}),
  ("metro", "transformer", {}),
  ("coco_lm", "transformer", {}),
  ("bert", "transformer", {}),
  ("electric", "two_tower", {}),
  ("adversarial", "transformer", {}),
  ("all_tokens_mlm", "transformer", {}),
  ("clm", "transformer", {}),
]


@pytest.mark.parametrize(("name", "kind", "changes"), long_except(0, 3, 7, 8, 11, of=CASES))
def test_matrix_products_are_those_the_compiler_counts(name, kind, changes):
  # Wide, so that products are nearly all there is to count; unrolled, because the compiler counts
  # the body of a loop once.
  V, D = 8192, 1024
  d = TransformerConfig(V, D, D, 2, 2, 4 * D, 16, compute=Compute(unroll=2))
  rates = masking.Masking(0.25, 0.85, 1.0, 4, (0, 2, 3, 4))
  spec = networks.PretrainSpec(
    generator_size(d, 1.0, 1.0), d, rates, objective=name, generator_kind=kind,
    frequencies=(1.0,) * V, **changes,
  )  # fmt: skip
  batch = make_batch(B=8)
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))

  def loss(params, batch, keys):
    terms = objectives.make(spec)(params, batch, keys, jnp.int32(0))
    return sum(t.weight * t.total for t in terms.values() if t.in_loss)

  lowered = jax.jit(jax.grad(loss)).lower(shapes, batch, keys_of(batch))
  counted = lowered.cost_analysis()["flops"]
  ours = flops.step_flops(spec, 8, 16)
  # All tokens are predicted in a loop over slices, whose body the compiler counts once: a slice's
  # products, and in the backward pass the same again and twice as many.
  if kind == "two_tower" or objectives.OBJECTIVES[name].predicts_all:
    slices = 16 // spec.masking.num_masked(16, True)
    wide = dataclasses.replace(d, hidden_size=2 * D if kind == "two_tower" else D)
    # The gradient of clm's loss, a plain sum, does not need the first forward pass.
    products = 3 if name == "clm" else 4
    ours -= 3 * 8 * flops.mlm_head_flops(wide, 16) * (1 - products / 3 / slices)
  # The compiler also counts what is done element by element, 0.2 to 0.4 % here.
  assert 1 < counted / ours < 1.005, (counted, ours)


def test_the_parts_of_a_generator_are_those_counted_by_hand():
  cfg = TransformerConfig(100, 8, 16, 2, 2, 32, 16)  # V 100, E 8, D 16, N 2, 2 heads, F 32
  rates = masking.Masking(0.25, 0.85, 1.0, 4, (0, 2, 3, 4))
  spec = networks.PretrainSpec(
    cfg, cfg, rates, objective="electric", generator_kind="two_tower", sampling_dropout=False
  )
  layer = 2 * 16 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 16 * 16 * 16
  tower = 2 * 16 * 8 * 16 + 2 * layer

  def words(positions):  # from both towers' states
    return 2 * positions * (2 * 16 * 8 + 8 * 100)

  assert flops.generator_flops(spec, 16) == {
    "generator": 3 * (2 * tower + words(16)),
    "generator's samples": words(4),
    "second pass to sample": 2 * tower + words(4),
  }


@pytest.mark.parametrize(
  ("kind", "peak"),
  [
    ("NVIDIA L4", 121e12),
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA GH200 480GB", 989e12),
    ("NVIDIA H200", 989e12),
    ("TPU v5 lite", 197e12),
  ],
)
def test_a_device_has_the_peak_of_its_data_sheet(kind, peak):
  device = SimpleNamespace(device_kind=kind, platform="any", process_index=0)
  assert flops.peak_flops(device) == (peak, "data sheet, bfloat16")


def test_a_measured_peak_is_shared_by_the_devices_of_a_cpu_alone(monkeypatch):
  monkeypatch.setattr(flops, "measure_matmul_peak", lambda size=0, dtype="float32": 8e9)
  device = SimpleNamespace(device_kind="new", platform="gpu", process_index=0)
  assert flops.peak_flops(device) == (8e9, "measured, bfloat16")
  assert flops.peak_flops(jax.devices()[0]) == (8e9 / len(jax.devices()), "measured, float32")
