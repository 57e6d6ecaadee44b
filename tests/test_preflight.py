"""What a step needs somewhere: read off the compiled program, bounded by data sheets."""

import dataclasses
import math

import jax
import pytest
from conftest import make_tiny_config

from electra_jax import preflight
from electra_jax.flops import chips


@pytest.fixture(scope="module")
def tiny():
  """A configuration without data, and this machine's devices."""
  config = make_tiny_config("nowhere")
  config.data.vocab_size = 100
  return config, preflight.here()


def test_bytes_and_flops_are_those_of_the_state_and_of_the_products(tiny):
  config, place = tiny
  flight = preflight.fly(config, preflight.HERE, place)
  _, shapes = preflight.compile_step(config, place.devices)
  count = sum(x.size for x in jax.tree.leaves(shapes.params))
  assert flight.parameters == 4 * count and flight.optimizer == pytest.approx(8 * count, rel=1e-3)
  # What is added up over the devices: a float32 for each parameter, and a few hundred numbers of
  # the metrics.
  assert 0 <= flight.reduced - 4 * count < 8000
  assert flight.used > flight.parameters + flight.optimizer
  assert flight.devices == 8 and flight.fits and flight.memory == math.inf
  products = preflight.flops.step_flops(preflight.spec_of(config), 8, 16)
  assert flight.flops * 8 == products
  assert flight.secs == pytest.approx(products / 8 / place.peak) and flight.mfu == 1


@pytest.mark.long
def test_what_does_not_fit_is_tried_in_more_microbatches_until_none_is_left(tiny):
  config, place = tiny
  config = config.copy_and_resolve_references()
  config.train.batch_size = 64
  flights = preflight.fit(config, "x", dataclasses.replace(place, memory=1.0))
  assert [f.accumulation for f in flights] == [1, 2, 4, 8]
  assert not any(f.fits for f in flights) and flights[3].temporaries < flights[0].temporaries
  enough = (flights[0].used + flights[1].used) / 2
  found = preflight.fit(config, "x", dataclasses.replace(place, memory=enough))
  assert [f.fits for f in found] == [False, True]


def test_a_slice_that_is_none_is_refused():
  for topology in ("v5e", "v5e:", "v5e:4x", "h100:8", "v5e:0x2"):
    with pytest.raises(ValueError, match=f"topology {topology!r}: the chip "):
      chips.parse(topology)


def test_adding_up_takes_twice_the_bytes_over_all_links():
  v5e, v5p = chips.CHIPS["v5e"], chips.CHIPS["v5p"]
  # 16 x 16 are rings: 2 axes of 90 GB/s; 4 x 4 are lines: half of that.
  assert chips.all_reduce_secs(v5e, (16, 16), 1.8e11) == pytest.approx(2)
  assert chips.all_reduce_secs(v5e, (4, 4), 1.8e11) == pytest.approx(4)
  assert chips.all_reduce_secs(v5p, (4, 4, 4), 5.4e11) == pytest.approx(2)
  assert chips.all_reduce_secs(v5p, (1, 1, 1), 1e12) == 0
