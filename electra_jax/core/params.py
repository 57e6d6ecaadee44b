"""Parameter trees: names, counts, sharding, initialisation from another run; random keys."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AXIS = "data"  # the mapped axis of a step, over devices
PRNG = "threefry2x32"  # whatever JAX's default, so that a seed gives the same numbers everywhere
JOINED = 2**17  # elements; ELECTRA-Large's stacked biases, [24, 4096], have fewer


def make_key(seed: int | jax.Array) -> jax.Array:
  """Returns the typed key of a seed, which does not depend on JAX's default implementation."""
  return jax.random.key(seed, impl=PRNG)


def named(tree) -> dict[str, Any]:
  """Returns {name: leaf}.

  >>> named({"params": {"word": 1, "layers": (2, 3)}})
  {'params/layers/0': 2, 'params/layers/1': 3, 'params/word': 1}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {_name(path): leaf for path, leaf in leaves}


def map_named(function: Callable[[list[str], Any], Any], tree):
  """Returns the tree of function(keys, leaf), where keys lead to the leaf.

  >>> map_named(lambda keys, leaf: f"{keys[-1]} {leaf}", {"params": {"word": 1, "layers": (2, 3)}})
  {'params': {'layers': ('0 2', '1 3'), 'word': 'word 1'}}
  """
  return jax.tree_util.tree_map_with_path(lambda path, x: function(_name(path).split("/"), x), tree)


def _name(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def count(tree) -> int:
  """Returns the number of scalars in a tree of arrays or shapes."""
  return sum(x.size for x in jax.tree.leaves(tree))


def sum_of_squares(tree) -> jax.Array:
  """Returns the sum of squares over a tree, []; small arrays are concatenated first.

  On a GPU each sum launches one or two kernels of at least a microsecond.
  """
  leaves = jax.tree.leaves(tree)
  arrays = [x for x in leaves if x.size >= JOINED]
  if small := [x.ravel() for x in leaves if x.size < JOINED]:
    arrays.append(jnp.concatenate(small))
  return sum((jnp.sum(x**2) for x in arrays), jnp.float32(0))


def tree_norm(tree) -> jax.Array:
  """Returns the norm of all arrays of a tree, []."""
  return jnp.sqrt(sum_of_squares(tree))


def split_axis(shape: tuple[int, ...], devices: int) -> int | None:
  """Returns the first axis whose length `devices` divides, or None (replicated).

  >>> split_axis((24, 1024, 4096), 8), split_axis((12, 1024, 4096), 8), split_axis((3, 5), 8)
  (0, 1, None)
  """
  return next((axis for axis, n in enumerate(shape) if n and n % devices == 0), None)


def match_roles(params: dict, other: dict) -> dict:
  """Copies `other`'s single network to every role of `params` whose encoder has the same shapes.

  A masked or causal language model can thus become this run's discriminator, its generator, or
  both. `other` is returned unchanged if it has two networks, no language model, or one that does
  not fit.

  Raises:
    ValueError: only one of the two has an embedding table, e.g. of token types.
  """
  tables, own_tables = _main_tables(other), _main_tables(params)
  if tables.keys() != own_tables.keys():
    raise ValueError(
      f"init_from: the source has the embeddings {', '.join(sorted(tables))}, the model has"
      f" {', '.join(sorted(own_tables))}: set model.token_types and positions as in the source"
    )
  roles = [role for role in ("generator", "discriminator") if role in other]
  network = dict(other[roles[0]]) if len(roles) == 1 else {}
  word_heads = network.keys() & {"mlm_head", "clm_head"}
  if len(word_heads) != 1:
    return other
  # These heads have the same layers, so that one starts from the other.
  own_head = "clm_head" if "clm_head" in params["discriminator"] else "mlm_head"
  network[own_head] = network.pop(*word_heads)

  def is_fit(role: str) -> bool:
    own = params.get(role, {})
    if "mlm_head" in own and all(name.endswith("_head") for name in own):
      # The generator has the discriminator's encoder (generator.tie=all).
      return _shapes(own["mlm_head"]) == _shapes(network["mlm_head"]) and is_fit("discriminator")
    return "encoder" in own and _shapes(own["encoder"]) == _shapes(network["encoder"])

  fits = [role for role in ("generator", "discriminator") if is_fit(role)]
  if not fits:
    return other
  found = {}
  for role in fits:
    own = params[role].get("embeddings", {})
    found[role] = {**network, **({"embeddings": {k: tables[k] for k in own}} if own else {})}
  # If tables are not shared, params["embeddings"] fits only the discriminator.
  if "discriminator" in fits or params["generator"].get("embeddings", {}).keys() != tables.keys():
    found["embeddings"] = {k: tables[k] for k in params["embeddings"]}
  return found


def inherit(params: dict, other: dict) -> tuple[dict, list[str], list[str], list[str]]:
  """Returns `params` with the modules that `other` also has copied from it.

  Also returns the names of the copied modules, of the fresh modules, and of the unused modules of
  `other`, such as "discriminator/encoder".

  Raises:
    ValueError: shapes differ, no module is in both, or the runs tie embeddings differently.
  """
  target, source = _parts(params), _parts(other)
  both = [name for name in target if name in source]
  own, theirs = (_shapes({k: tree[k] for k in both}) for tree in (target, source))
  mismatches = [
    f"{name} is {theirs.get(name)} in the source, {own.get(name)} in the model"
    for name in own | theirs
    if theirs.get(name) != own.get(name)
  ]
  if mismatches:
    more = f", and {len(mismatches) - 3} more arrays differ" if len(mismatches) > 3 else ""
    raise ValueError(f"init_from: {', '.join(mismatches[:3])}{more}")
  lost = [name for name in source if "embedding" in name and name not in target]
  if missing := [name for name in lost if params.get(name.partition("/")[0])]:  # {}: no network
    raise ValueError(
      f"init_from: the model has no {', '.join(missing)}: set generator.tie as in the source"
    )
  if not both:
    raise ValueError(f"init_from: no module in both source {list(source)} and model {list(target)}")
  merged = {group: dict(modules) for group, modules in params.items()}
  for name in both:
    group, module = name.split("/")
    merged[group][module] = source[name]
  fresh, unused = ([x for x in a if x not in b] for a, b in ((target, source), (source, target)))
  return merged, both, fresh, unused


def _main_tables(params: dict) -> dict:
  return {**params["embeddings"], **params.get("discriminator", {}).get("embeddings", {})}


def _shapes(tree) -> dict[str, tuple[int, ...]]:
  return {name: jnp.shape(x) for name, x in named(tree).items()}


def _parts(params: dict) -> dict:
  return {f"{group}/{m}": tree for group, modules in params.items() for m, tree in modules.items()}
