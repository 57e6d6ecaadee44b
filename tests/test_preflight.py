"""What a step needs somewhere: read off the compiled program, bounded by data sheets."""

import dataclasses
import json
import math
import types

import jax
import pytest
from conftest import make_tiny_config
from rich.console import Console

from electra_jax.core import flops
from electra_jax.cost import chips, gpus, preflight, targets


@pytest.fixture
def config():
  """A configuration without data."""
  config = make_tiny_config("nowhere")
  config.data.vocab_size = 100
  return config


@pytest.fixture(scope="module")
def target():
  """This machine's devices."""
  return targets.find(preflight.HERE)


def weights(config, target):
  """Returns the shapes of a configuration's state."""
  return preflight.compile_step(config, target.devices)[1]


def test_bytes_and_flops_are_those_of_the_state_and_of_the_products(config, target):
  cost = preflight.estimate_step(config, preflight.HERE, target)
  state = weights(config, target)
  count = sum(x.size for x in jax.tree.leaves(state.params))
  assert cost.parameters == 4 * count and cost.optimizer == pytest.approx(8 * count, rel=1e-3)
  # What is added up over the devices: a float32 for each parameter, and a few hundred numbers of
  # the metrics.
  assert 0 <= cost.all_reduce_bytes - 4 * count < 8000
  assert cost.reduce_scatter_bytes == cost.all_gather_bytes == 0
  assert cost.sent_bytes == 2 * cost.all_reduce_bytes * 7 / 8
  assert cost.used > cost.parameters + cost.optimizer
  products = preflight.flops.step_flops(preflight.spec_without_data(config), 8, 16)
  assert cost.devices == 8 and cost.flops * 8 == products
  assert cost.secs == pytest.approx(products / 8 / target.peak) and cost.mfu == 1


def test_unknown_properties_of_a_cpu_are_shown_as_unknown(config, target):
  for word in ("memory size", "memory bandwidth", "link bandwidth", "peak: measured"):
    assert word in target.note
  cost = preflight.estimate_step(config, preflight.HERE, target)
  assert cost.fits is cost.memory is cost.memory_secs is cost.link_secs is None
  assert json.loads(json.dumps(dataclasses.asdict(cost)))["memory"] is None
  cells = shown(config, [cost])
  assert cells["device memory, GiB"] == cells["communication, ms per step"] == ["?"]
  assert cells["memory traffic, ms per step"] == ["?"] and cells["fits"] == ["unknown"]
  assert "the device memory is unknown" in preflight.verdict([cost])


def shown(config, costs):
  """Returns the rows of a table: {title: cells}."""
  columns = [list(column.cells) for column in preflight.table(config, costs).columns]
  return {title.strip(): list(cells) for title, *cells in zip(*columns, strict=True)}


@pytest.mark.long
def test_an_optimizer_in_parts_is_an_eighth_where_eight_divides_an_axis(config, target):
  whole = preflight.estimate_step(config, preflight.HERE, target)
  leaves = jax.tree.leaves(weights(config, target).opt_state)
  split = [any(n % 8 == 0 for n in x.shape) for x in leaves]
  assert any(split) and not all(split)
  parts = sum(4 * x.size / (8 if s else 1) for x, s in zip(leaves, split, strict=True))
  assert whole.optimizer_sharded == parts < whole.optimizer
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
  %k = ((f32[5]{0}, f32[2,3]{1,0}), (f32[5]{0}, f32[2,3]{1,0})) all-reduce-start(%a, %b)
  %l = f32[7]{0} all-reduce-start(%a), channel_id=6
  %n = ((f32[2]{0}), f32[8]{0}) all-gather-start(%q), channel_id=7
  """
  found = preflight.collective_bytes(text, 4)
  full = 4 * 1024 * 1024
  added = full + (24 + 8 + 8) + (20 + 24) + 28
  assert found["all-reduce"] == added
  assert found["reduce-scatter"] == full + 32
  assert found["all-gather"] == full + 16 + 32
  sent_bytes = preflight.ring_bytes(found, 4)
  assert sent_bytes == 3 / 4 * (2 * added + full + 32 + full + 48)


@pytest.mark.parametrize(("name", "batch_size"), [("electra", 48), ("coco_lm", 4 * 48)])
def test_microbatches_grow_by_the_divisors_of_a_devices_sequences_or_groups(
  config, name, batch_size
):
  config.objective.name, config.objective.contrast_group = name, 4
  config.train.batch_size = batch_size
  tried = []
  while more := preflight.more_microbatches(config, devices=8):
    tried.append(more)
    config.train.accumulation = more
  assert tried == [2, 3, 6]
  config.train.accumulation = 1
  assert [preflight.more_microbatches(config, 8, n) for n in (2.5, 3, 3.1, 7)] == [3, 3, 6, 6]


def test_every_topology_is_checked_before_the_first_is_compiled(config, target, monkeypatch):
  first, second = (dataclasses.replace(target, devices=target.devices[:n]) for n in (1, 3))
  monkeypatch.setattr(preflight.targets, "find", {"h200x1": first, "h200x3": second}.get)
  monkeypatch.setattr(preflight, "fit", None)  # nothing is compiled
  wrong = "config.train.batch_size: batch size 8 is not divisible by 3 devices"
  with pytest.raises(ValueError, match=wrong):
    preflight.run(config, ["h200x1", "h200x3"], None, Console(quiet=True))


def test_a_step_that_does_not_fit_names_the_microbatches_that_do(config, target, monkeypatch):
  config.train.batch_size = 48

  def cost(config, name, target):  # as if all of it were activations
    n = config.train.accumulation
    return preflight.StepCost(name, 8, 8, n, 12 / n <= target.memory, target.memory, 12 / n)

  monkeypatch.setattr(preflight, "estimate_step", cost)
  monkeypatch.setattr(preflight, "with_evaluation", lambda cost, *_: cost)

  def verdict(memory):
    return preflight.verdict(preflight.fit(config, "x", dataclasses.replace(target, memory=memory)))

  assert verdict(12.0) == "x: fits, microbatches: 1"
  assert verdict(5.0) == "x: fits, microbatches: 3; does not fit with 1"  # 12 / 2 is known
  assert verdict(1.0).startswith("x: does not fit with 1, 6 microbatches; try")


def test_an_evaluation_that_does_not_fit_is_told_beside_a_step_that_does(config, target):
  config.eval.max_examples = config.eval.batch_size = 4096
  target = dataclasses.replace(target, memory=4e6)
  (cost,) = preflight.fit(config, "x", target)
  assert cost.fits and cost.used < target.memory < cost.evaluation_used
  # Of each of 512 sequences of a device, the float32 hidden states of 16 tokens at least.
  least = cost.parameters + cost.optimizer + 4 * 512 * 16 * config.model.hidden_size
  assert cost.evaluation_fits is False and cost.evaluation_used > least
  (memory,) = shown(config, [cost])["memory used in evaluations, GiB"]
  line = f"x: fits, microbatches: 1; evaluations do not fit ({memory} GiB): lower eval.batch_size"
  assert preflight.verdict([cost]) == line
  config.eval.max_examples = 8
  small = preflight.with_evaluation(cost, config, target)
  assert small.evaluation_fits and small.evaluation_used < target.memory
  config.data.holdout_frac = 0.0
  none = preflight.with_evaluation(dataclasses.replace(cost, evaluation_used=None), config, target)
  assert none.evaluation_used is None


@pytest.mark.long
def test_what_does_not_fit_is_tried_in_more_microbatches_until_none_is_left(config, target):
  config.train.batch_size = 48
  costs = preflight.fit(config, "x", dataclasses.replace(target, memory=1.0))
  assert [f.accumulation for f in costs] == [1, 6]
  assert not any(f.fits for f in costs) and costs[1].temporaries < costs[0].temporaries
  cells = shown(config, costs)
  assert cells["fits"] == 2 * ["does not fit"] and cells["whole run, hours"] == 2 * [""]
  assert preflight.verdict(costs).startswith("x: does not fit with 1, 6 microbatches")
  used = [costs[0].used]
  for config.train.accumulation in (2, 3):
    used.append(preflight.estimate_step(config, "x", target).used)
  config.train.accumulation = 1
  enough = (used[1] + used[2]) / 2
  assert used[0] / 2 < used[1] and used[0] / 3 < used[2] < enough < used[1]
  found = preflight.fit(config, "x", dataclasses.replace(target, memory=enough))
  assert [(f.accumulation, f.fits) for f in found] == [(1, False), (2, False), (3, True)]
  assert preflight.verdict(found) == "x: fits, microbatches: 3; does not fit with 1, 2"
  assert shown(config, found)["fits"] == ["does not fit", "does not fit", "fits"]


def test_a_slice_that_is_none_is_refused():
  for topology in ("v5e", "v5e:", "v5e:4x", "h100:8", "v5e:0x2", "h300x8"):
    with pytest.raises(ValueError, match=f"topology {topology!r} must be a TPU chip "):
      chips.parse(topology)
  for topology in ("h200", "h200x", "h200x0", "h200xtwo", "h200x2x8"):
    with pytest.raises(ValueError, match=f"topology {topology!r} must end in the number of GPUs"):
      chips.parse(topology)
  with pytest.raises(ValueError, match="'a100x12': the number of GPUs must be at most 8"):
    chips.parse("a100x12")


@pytest.mark.long
def test_the_step_of_a_unigram_generator_is_estimated_without_data(config, target):
  config.generator.kind = "unigram"
  assert preflight.estimate_step(config, "here", target).flops > 0


def test_an_axis_that_is_no_ring_has_half_the_links():
  v5e, v5p = chips.CHIPS["v5e"], chips.CHIPS["v5p"]
  assert chips.link_rate(v5e, (16, 16)) == 2 * 9e10
  assert chips.link_rate(v5e, (4, 4)) == chips.link_rate(v5e, (16, 1)) == 9e10
  assert chips.link_rate(v5p, (4, 4, 4)) == 3 * 1.8e11
  assert chips.link_rate(v5p, (2, 2, 4)) == 1.5 * 1.8e11  # a mesh: not every axis is of four
  assert chips.link_rate(v5p, (1, 1, 1)) == math.inf


def test_links_wait_for_the_products_or_the_memory_whichever_is_slower(config, target):
  fast = dataclasses.replace(target, peak=1e12, memory=1e9, memory_rate=1e9, links=((8, 1e6),))
  cost = preflight.estimate_step(config, "x", fast)
  assert cost.product_secs == cost.flops / 1e12 < cost.memory_secs < cost.link_secs
  assert cost.link_secs == cost.sent_bytes / 1e6
  assert cost.secs == cost.memory_secs + cost.link_secs
  assert cost.mfu == pytest.approx(cost.product_secs / cost.secs)
  hours = cost.secs * config.train.steps / 3600
  cells = shown(config, [cost])
  assert cells["fits"] == ["fits"] and cells["whole run, hours"] == [f"{hours:.3g}"]
  assert cells["chip-hours"] == [f"{8 * hours:.4g}"]
  limited = config.copy_and_resolve_references()
  limited.train.minutes = 60 * hours / 2
  assert shown(limited, [cost])["whole run, hours"] == [f"{hours / 2:.3g}"]


def test_gpus_fill_their_hosts_and_the_slower_level_of_links_counts():
  h200, l4 = gpus.GPUS["h200"], gpus.GPUS["l4"]
  assert chips.parse("h200x4") == (h200, (1, 4)) and chips.parse("l4x32") == (l4, (4, 8))
  gradient = {"all-reduce": 8e9, "reduce-scatter": 0, "all-gather": 0}

  def secs(gpu, axes):
    return preflight.least_link_secs(gradient, gpu.links(axes))

  # 8 GB go round a ring of eight twice: 2 * 7/8 * 8 GB at 450 GB/s, or 32 GB/s over PCIe.
  assert secs(h200, (1, 8)) == pytest.approx(14e9 / 450e9)
  assert secs(l4, (1, 8)) == pytest.approx(14e9 / 32e9)
  # Two hosts of H200 have eight adapters each: 2 * 1/2 * 8 GB at 8 * 400 Gb/s, faster than NVLink.
  assert secs(h200, (2, 8)) == pytest.approx(14e9 / 450e9)
  # Of L4 hosts four share 100 Gb/s each: 2 * 3/4 * 8 GB at 12.5 GB/s.
  assert secs(l4, (4, 8)) == pytest.approx(12e9 / 12.5e9)
  assert secs(h200, (1, 1)) == 0


def test_the_compilers_description_of_a_gpu_is_that_of_the_data_sheet():
  for gpu in gpus.GPUS.values():
    assert gpu.kind in flops.PEAK_FLOPS
  lines = gpus.describe(gpus.GPUS["l4"]).splitlines()
  fields = dict(line.strip().split(": ", 1) for line in lines if ": " in line)
  # 24 GB, 300 GB/s, 58 multiprocessors of 128 units.
  assert int(fields["device_memory_size"]) == 23034 * 2**20 and fields["core_count"] == "58"
  assert fields["memory_bandwidth"] == "300000000000" and fields["fpus_per_core"] == "128"
  assert "major: 8 minor: 9" in gpus.describe(gpus.GPUS["l4"])


def described(platform, target_config, topology):
  """In place of the compiler: as many devices as are asked for."""
  assert platform == "cuda" and "core_count" in target_config
  return types.SimpleNamespace(devices=range(math.prod(map(int, topology.split("x")))))


def test_a_gpu_gives_programs_the_share_that_jax_takes(monkeypatch):
  monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", described)
  for name in targets.SHARE_VARIABLES:
    monkeypatch.delenv(name, raising=False)
  target = targets.find("h200x16")
  assert len(target.devices) == target.chips == 16 and target.peak == 989e12
  assert target.memory == 0.75 * 151_397_597_184 and "0.75 of 141.0 GiB" in target.note
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
  assert targets.find("h200x1").memory == 0.9 * 151_397_597_184
  for wrong in ("much", "0", "1.5", "nan"):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", wrong)
    with pytest.raises(ValueError, match="XLA_CLIENT_MEM_FRACTION must be a number above 0"):
      targets.find("h200x1")


def test_a_missing_compiler_is_named_with_the_extra_that_has_it(monkeypatch):
  monkeypatch.setitem(targets._EXTRAS, "nowhere", "pip install electra_jax[nowhere]")
  message = r"^topology h200x8: topology not .*: pip install electra_jax\[nowhere\]$"
  with pytest.raises(ValueError, match=message):  # whatever this machine has installed
    targets._described("h200x8", "nowhere", {})


def test_a_size_that_the_compiler_does_not_tell_is_unknown(config, target, tmp_path, monkeypatch):
  def refuse(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory.")

  monkeypatch.setattr(preflight, "compile_step", refuse)
  preflight.run(config, ["here"], str(tmp_path / "costs.jsonl"), Console(quiet=True))
  (line,) = (tmp_path / "costs.jsonl").read_text().splitlines()
  cost = json.loads(line, parse_constant=pytest.fail)  # Infinity is no JSON
  assert cost["fits"] is False and cost["used"] is None
  (used,) = shown(config, [preflight.estimate_step(config, "here", target)])["memory used, GiB"]
  assert used == "?"


def test_a_compiler_without_its_assembler_is_an_error_of_one_line(config, target, monkeypatch):
  def without(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: libdevice not found at ./libdevice.10.bc")

  monkeypatch.setattr(preflight, "compile_step", without)
  with pytest.raises(ValueError, match="^h200x8: XLA found no ptxas or libdevice: pip"):
    preflight.estimate_step(config, "h200x8", target)
