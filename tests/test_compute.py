"""How a network is computed: what `auto` and 0 stand for on each platform."""

import jax
import pytest

from electra_jax.config import files, specs


@pytest.mark.parametrize(
  ("platform", "asked", "dropout", "head", "expected"),
  [
    ("cpu", ("auto", "auto"), 0.0, 64, ("float32", "xla")),
    ("tpu", ("auto", "auto"), 0.0, 64, ("bfloat16", "xla")),
    ("gpu", ("auto", "auto"), 0.0, 64, ("bfloat16", "cudnn")),
    ("gpu", ("auto", "auto"), 0.1, 64, ("bfloat16", "xla")),  # cuDNN has no dropout here
    ("gpu", ("auto", "auto"), 0.0, 20, ("bfloat16", "xla")),  # nor heads of any width
    ("gpu", ("float32", "auto"), 0.0, 64, ("float32", "xla")),  # nor float32
    ("gpu", ("auto", "xla"), 0.0, 64, ("bfloat16", "xla")),
    ("cpu", ("bfloat16", "auto"), 0.0, 64, ("bfloat16", "xla")),
  ],
)
def test_auto_is_bfloat16_on_accelerators_and_cudnn_where_it_can(
  monkeypatch, platform, asked, dropout, head, expected
):
  group = files.load("base.py").model
  group.dtype, group.attention = asked
  group.attention_dropout = dropout
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  compute = specs.make_compute(group, head)
  assert (compute.dtype, compute.attention) == expected


@pytest.mark.parametrize(
  ("platform", "asked", "loops"), [("gpu", 0, 1), ("gpu", 1, 5), ("cpu", 0, 5), ("cpu", 3, 2)]
)
def test_layers_are_compiled_in_a_row_on_a_gpu_unless_told_otherwise(
  monkeypatch, platform, asked, loops
):
  group = files.load("base.py").model
  group.unroll, group.attention, group.num_layers = asked, "xla", 5
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  unroll = specs.make_compute(group, 64).unroll
  assert -(-group.num_layers // min(unroll, group.num_layers)) == loops
