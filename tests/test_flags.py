"""JAX's flags that change numbers: without effect, an error, or kept by a run that resumes."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import electra_jax
from electra_jax.config import compare, fields
from electra_jax.core.params import make_key
from electra_jax.core.step import row_keys
from electra_jax.interop import sources
from electra_jax.runtime import jax_flags

OTHERWISE = {
  "jax_default_prng_impl": "rbg",
  "jax_threefry_partitionable": False,
  "jax_random_seed_offset": 7,
  "jax_high_dynamic_range_gumbel": True,
}


@pytest.fixture(name="update")
def updated_flags():
  """jax.config.update, until the end of the test."""
  before = {}

  def update(flag, value):
    before.setdefault(flag, getattr(jax.config, flag))
    jax.config.update(flag, value)

  yield update
  for flag, value in before.items():
    jax.config.update(flag, value)


def draws() -> list[np.ndarray]:
  keys = row_keys(3, 5, np.arange(2))
  own = jax.random.key(0)  # as an objective that is registered may make one
  return [
    *map(np.asarray, (jax.random.bits(keys[1, 0], (5,)), jax.random.gumbel(own, (4,)))),
    np.asarray(jax.random.normal(make_key(1), (3,))),
  ]


@pytest.mark.parametrize("flag", OTHERWISE)
def test_flags_of_random_numbers_have_no_effect(update, flag):
  # The first number of JAX's default, so that earlier runs keep their bits.
  assert jax.random.key_data(make_key(2**31 + 5)).tolist() == [0, 2**31 + 5]
  expected = draws()
  update(flag, OTHERWISE[flag])
  assert any((a != b).any() for a, b in zip(draws(), expected, strict=True))
  with pytest.warns(UserWarning, match=f"^{flag.upper()}=.* has no effect"), jax_flags.pinned():
    for drawn, wanted in zip(draws(), expected, strict=True):
      np.testing.assert_array_equal(drawn, wanted)
  assert getattr(jax.config, flag) == OTHERWISE[flag]


def test_a_seed_becomes_a_key_in_one_place():
  package = Path(electra_jax.__file__).parent
  made = [p for p in package.rglob("*.py") if re.search(r"random\.(key|PRNGKey)\(", p.read_text())]
  assert [path.name for path in made] == ["params.py"]


@pytest.mark.parametrize(
  ("flag", "value"),
  [
    ("jax_enable_x64", True),
    ("jax_disable_jit", True),
    ("jax_numpy_dtype_promotion", "strict"),
    ("jax_numpy_rank_promotion", "raise"),
    ("jax_transfer_guard", "disallow"),
    ("jax_no_execution", True),
  ],
)
def test_a_flag_with_which_nothing_can_be_computed_is_one_line_before_anything_else(
  update, tmp_path, flag, value
):
  from electra_jax.cost import preflight
  from electra_jax.finetune import train as finetune
  from electra_jax.pretrain import train

  config = fields.load_config("quickstart", {})
  update(flag, value)
  shown = getattr(jax.config, flag)
  for start in (
    lambda: electra_jax.load(tmp_path / "nowhere"),
    lambda: sources.open_source(tmp_path / "nowhere"),
    lambda: electra_jax.evaluate_detection(tmp_path / "nowhere", tmp_path),
    lambda: train.train(config, tmp_path / "run"),
    lambda: train.run(config, tmp_path / "run"),
    lambda: finetune.fine_tune(config, tmp_path / "run"),
    lambda: preflight.run(config, ["h200x1"], None, None),
  ):
    with pytest.raises(jax_flags.FlagError) as error:
      start()
    message = str(error.value)
    assert message.startswith(f"cannot compute with {flag.upper()}={shown}: unset the variable")
    assert "\n" not in message
  assert not list(tmp_path.iterdir())


def test_what_changes_rounding_is_recorded_and_compared_where_both_have_it(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x  --xla_b=1 --xla_a=2")
  monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
  saved = compare.flags({"jax": jax_flags.record()})
  assert saved["jax.XLA_FLAGS"] == "--xla_a=2 --xla_b=1"
  assert saved["jax.default_prng_impl"] == "threefry2x32"
  assert compare.differences(saved, saved) == {}
  monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
  with jax.default_matmul_precision("bfloat16"):
    now = compare.flags({"jax": jax_flags.record()})
  assert compare.differences(saved, now) == {
    "jax.default_matmul_precision": (None, "bfloat16"),
    "jax.NVIDIA_TF32_OVERRIDE": ("0", ""),
  }
  assert compare.differences({}, now) == {}  # a run of an earlier version
  assert not compare.recipe(now)
