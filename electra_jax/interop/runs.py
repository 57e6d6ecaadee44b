"""Another run, as something to start from: its networks and their weights."""

import jax

from electra_jax.config import specs
from electra_jax.core import networks, objectives
from electra_jax.runtime import parallel
from electra_jax.runtime.checkpoint import restore_params


def read_params(workdir: str, vocab) -> tuple[networks.PretrainSpec, dict]:
  """Returns the spec and the parameters of a run's newest checkpoint.

  Raises:
    ValueError: it is no run, of another vocabulary, or its checkpoint is damaged.
  """
  spec = specs.read_spec(workdir, vocab)
  shapes = jax.eval_shape(lambda: objectives.init_params(spec, jax.random.key(0)))
  sharding = parallel.StateSharding(shapes, sharded=False)
  return spec, parallel.replicate(sharding.to_local(restore_params(workdir, sharding.shapes())))
