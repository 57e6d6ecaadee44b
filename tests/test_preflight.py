"""What a step needs somewhere: read off the compiled program, bounded by data sheets."""

import dataclasses
import json
import math

import jax
import pytest
from conftest import make_tiny_config

from electra_jax import preflight
from electra_jax.core.flops import chips


@pytest.fixture(scope="module")
def tiny():
  """A configuration without data, and this machine's devices."""
  config = make_tiny_config("nowhere")
  config.data.vocab_size = 100
  return config, preflight.local_target()


def weights(config, target):
  """Returns the shapes of a configuration's state."""
  programs = preflight.compile_step(config, target.devices)
  return programs[1]


def test_bytes_and_flops_are_those_of_the_state_and_of_the_products(tiny):
  config, target = tiny
  cost = preflight.estimate_step(config, preflight.HERE, target)
  state = weights(config, target)
  count = sum(x.size for x in jax.tree.leaves(state.params))
  assert cost.parameters == 4 * count and cost.optimizer == pytest.approx(8 * count, rel=1e-3)
  # What is added up over the devices: a float32 for each parameter, and a few hundred numbers of
  # the metrics.
  assert 0 <= cost.all_reduce_bytes - 4 * count < 8000
  assert (
    cost.reduce_scatter_bytes == cost.all_gather_bytes == 0
    and cost.sent_bytes == 2 * cost.all_reduce_bytes * 7 / 8
  )
  assert cost.used > cost.parameters + cost.optimizer
  products = preflight.flops.step_flops(preflight.specs.spec_without_data(config), 8, 16)
  assert cost.devices == 8 and cost.flops * 8 == products
  assert cost.secs == pytest.approx(products / 8 / target.peak) and cost.mfu == 1


def test_what_a_cpu_does_not_tell_is_said_to_be_unknown(tiny):
  config, target = tiny
  for word in ("memory size", "memory bandwidth", "link bandwidth", "peak: measured"):
    assert word in target.unknown
  cost = preflight.estimate_step(config, preflight.HERE, target)
  assert cost.fits is cost.memory is cost.memory_secs is cost.link_secs is None
  assert json.loads(json.dumps(dataclasses.asdict(cost)))["memory"] is None
  said = shown(config, [cost])
  assert said["device memory, GiB"] == said["communication, ms per step"] == ["?"]
  assert said["memory traffic, ms per step"] == ["?"] and said["fits"] == ["unknown"]
  assert "unknown whether it fits" in preflight.verdict([cost])


def shown(config, costs):
  """Returns the rows of a table: {title: cells}."""
  columns = [list(column.cells) for column in preflight.table(config, costs).columns]
  return {title.strip(): list(cells) for title, *cells in zip(*columns, strict=True)}


@pytest.mark.long
def test_an_optimizer_in_parts_is_an_eighth_where_eight_divides_an_axis(tiny):
  config, target = tiny
  whole = preflight.estimate_step(config, preflight.HERE, target)
  leaves = jax.tree.leaves(weights(config, target).opt_state)
  split = [any(n % 8 == 0 for n in x.shape) for x in leaves]
  assert any(split) and not all(split)
  parts = sum(4 * x.size / (8 if s else 1) for x, s in zip(leaves, split, strict=True))
  assert whole.optimizer_sharded == parts < whole.optimizer
  config = config.copy_and_resolve_references()
  config.optimizer.sharded = True
  sharded = preflight.estimate_step(config, preflight.HERE, target)
  assert sharded.optimizer == parts and sharded.used < whole.used
  # Gradients are added up and their parts put together: together as much as adding up everywhere.
  assert sharded.all_gather_bytes == sharded.reduce_scatter_bytes > 0.9 * whole.parameters
  assert sharded.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.02)


def test_every_collective_counts_with_the_whole_array_and_once():
  text = """
  %start = (f32[256,1024]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) fusion(%a), calls=%all-gather.7
  %p = f32[1024,1024]{1,0} all-reduce(%f), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%r
  %m = (f32[2,3]{1,0}, bf16[4]{0}, pred[8]{0}) all-reduce-start(%a, %b, %c), channel_id=2
  %s = f32[256,1024]{1,0:T(8,128)S(3)} reduce-scatter(%f), channel_id=1, dimensions={0}
  %t = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%f), channel_id=4, dimensions={0}
  %g = f32[1024,1024]{1,0:T(8,128)} all-gather(%q), frontend_attributes={chain_id="0"}
  %h = f32[1024,1024]{1,0:T(8,128)} all-gather(%q), frontend_attributes={chain_id="0"}
  %i = (bf16[2]{0}, bf16[8]{0}) all-gather-start(%q), channel_id=1, dimensions={0}
  %j = bf16[8]{0} all-gather-done(%i)
  """
  found = preflight.collective_bytes(text, 4)
  full = 4 * 1024 * 1024
  assert found["all-reduce"] == full + (24 + 8 + 8)
  assert found["reduce-scatter"] == full + 32
  assert found["all-gather"] == full + 16
  sent_bytes = preflight.ring_bytes(found, 4)
  assert sent_bytes == 3 / 4 * (2 * (full + 40) + full + 32 + full + 16)


def test_microbatches_grow_by_the_divisors_of_a_devices_sequences(tiny):
  config = tiny[0].copy_and_resolve_references()
  config.train.batch_size = 48
  tried = []
  while more := preflight.more_microbatches(config, devices=8):
    tried.append(more)
    config.train.accumulation = more
  assert tried == [2, 3, 6]


def test_a_step_that_does_not_fit_says_with_how_many_microbatches_it_does(tiny, monkeypatch):
  config = tiny[0].copy_and_resolve_references()
  config.train.batch_size = 48

  def cost(config, name, target):  # as if all of it were activations
    n = config.train.accumulation
    return preflight.StepCost(name, 8, 8, n, 12 / n <= target.memory, target.memory, 12 / n)

  monkeypatch.setattr(preflight, "estimate_step", cost)

  def verdict(memory):
    return preflight.verdict(
      preflight.fit(config, "x", dataclasses.replace(tiny[1], memory=memory))
    )

  assert verdict(12.0) == "x: fits, microbatches: 1"
  assert verdict(5.0) == "x: fits, microbatches: 3; does not fit with 1, 2"
  assert verdict(1.0).startswith("x: does not fit with 1, 2, 3, 6 microbatches; try")


@pytest.mark.long
def test_what_does_not_fit_is_tried_in_more_microbatches_until_none_is_left(tiny):
  config, target = tiny
  config = config.copy_and_resolve_references()
  config.train.batch_size = 48
  costs = preflight.fit(config, "x", dataclasses.replace(target, memory=1.0))
  assert [f.accumulation for f in costs] == [1, 2, 3, 6]
  assert not any(f.fits for f in costs) and costs[3].temporaries < costs[0].temporaries
  said = shown(config, costs)
  assert said["fits"] == 4 * ["does not fit"] and said["whole run, hours"] == 4 * [""]
  assert preflight.verdict(costs).startswith("x: does not fit with 1, 2, 3, 6 microbatches")
  enough = (costs[1].used + costs[2].used) / 2
  found = preflight.fit(config, "x", dataclasses.replace(target, memory=enough))
  assert [(f.accumulation, f.fits) for f in found] == [(1, False), (2, False), (3, True)]
  assert preflight.verdict(found) == "x: fits, microbatches: 3; does not fit with 1, 2"
  assert shown(config, found)["fits"] == ["does not fit", "does not fit", "fits"]


def test_a_slice_that_is_none_is_refused():
  for topology in ("v5e", "v5e:", "v5e:4x", "h100:8", "v5e:0x2"):
    with pytest.raises(ValueError, match=f"topology {topology!r}: expected a chip "):
      chips.parse(topology)


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("objective.name", "elektra", "config.objective.name must be one of"),
    ("data.seq_length", 1024, "config.data.seq_length 1024 is above"),
    ("train.accumulation", 0, "config.train.accumulation must be above 0, got 0"),
    ("model.attention", "cudnn", "config.model.attention=cudnn needs a GPU"),
    ("eval.batch_size", 9, "config.eval.batch_size: batch size 9 is not divisible by 8 devices"),
  ],
)
def test_what_training_refuses_preflight_refuses(tiny, field, value, said):
  config, target = tiny
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=said):
    preflight.estimate_step(config, "here", target)


@pytest.mark.long
def test_a_generator_of_frequencies_flies_without_data(tiny):
  config, target = tiny
  config = config.copy_and_resolve_references()
  config.generator.kind = "unigram"
  assert preflight.estimate_step(config, "here", target).flops > 0


def test_an_axis_that_is_no_ring_has_half_the_links():
  v5e, v5p = chips.CHIPS["v5e"], chips.CHIPS["v5p"]
  assert chips.link_rate(v5e, (16, 16)) == 2 * 9e10
  assert chips.link_rate(v5e, (4, 4)) == chips.link_rate(v5e, (16, 1)) == 9e10
  assert chips.link_rate(v5p, (4, 4, 4)) == 3 * 1.8e11
  assert chips.link_rate(v5p, (2, 2, 4)) == 1.5 * 1.8e11  # a mesh: not every axis is of four
  assert chips.link_rate(v5p, (1, 1, 1)) == math.inf


def test_links_wait_for_the_products_or_the_memory_whichever_is_slower(tiny):
  config, target = tiny
  fast = dataclasses.replace(target, peak=1e12, memory=1e9, memory_rate=1e9, link_rate=1e6)
  cost = preflight.estimate_step(config, "x", fast)
  assert cost.product_secs == cost.flops / 1e12 < cost.memory_secs < cost.link_secs
  assert cost.link_secs == cost.sent_bytes / 1e6
  assert cost.secs == cost.memory_secs + cost.link_secs
  assert cost.mfu == pytest.approx(cost.product_secs / cost.secs)
  hours = cost.secs * config.train.steps / 3600
  said = shown(config, [cost])
  assert said["fits"] == ["fits"] and said["whole run, hours"] == [f"{hours:.3g}"]
  assert said["chip-hours"] == [f"{8 * hours:.4g}"]
