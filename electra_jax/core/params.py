"""Parameter trees: leaves by name, counting, splitting, and taking parts of one into another."""

from typing import Any

import jax
import jax.numpy as jnp


def named(tree) -> dict[str, Any]:
  """Returns {name: leaf} of a tree.

  >>> named({"params": {"word": 1, "layers": (2, 3)}})
  {'params/layers/0': 2, 'params/layers/1': 3, 'params/word': 1}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def count(tree) -> int:
  """Returns the number of scalars in a tree of arrays (or of shapes)."""
  return sum(x.size for x in jax.tree.leaves(tree))


def count_networks(params: dict) -> dict[str, int]:
  """Returns the sizes a paper would quote.

  discriminator: embeddings, its encoder and head; generator: what it adds to that; total: what is
  trained jointly. The paper's 14M, 110M and 335M are the discriminator's.
  """
  return {
    "discriminator": count((params["embeddings"], params["discriminator"])),
    "generator": count(params.get("generator", {})),
    "total": count(params),
  }


def split_axis(shape: tuple[int, ...], devices: int) -> int | None:
  """Returns the axis along which an array is split evenly over devices, None if it stays whole.

  It is the first whose length the number of devices divides, so the last one only if no other is.

  >>> split_axis((24, 1024, 4096), 8), split_axis((12, 1024, 4096), 8), split_axis((3, 5), 8)
  (0, 1, None)
  """
  return next((axis for axis, n in enumerate(shape) if n and n % devices == 0), None)


def inherit(params: dict, other: dict) -> tuple[dict, list[str], list[str]]:
  """Returns params with the parts that another run has too taken from there, and both lists.

  A part is a module: "discriminator/encoder", "embeddings/word". Heads that only one of the two has
  are left alone.

  Raises:
    ValueError: a part both have is of another shape, they have none in common, or the other's
      embeddings are tied in another way, so that its networks would look up foreign tables.
  """
  mine, theirs = _parts(params), _parts(other)
  both = [name for name in mine if name in theirs]
  here, there = ({k: _shapes(tree[k]) for k in both} for tree in (mine, theirs))
  wrong = [
    f"{name}/{leaf} is {there[name].get(leaf)}, the model's is {here[name].get(leaf)}"
    for name in both
    for leaf in here[name] | there[name]
    if there[name].get(leaf) != here[name].get(leaf)
  ]
  if wrong:
    raise ValueError(f"init_from: {', '.join(wrong)}")
  tables = ("embeddings", "embedding_delta")
  if lost := [name for name in theirs if name not in mine and name.endswith(tables)]:
    raise ValueError(
      f"init_from: {', '.join(lost)} of there has no place here: its networks look up other"
      " embeddings, set generator.tie alike"
    )
  if not both:
    raise ValueError(f"init_from: nothing in common: there {list(theirs)}, here {list(mine)}")
  taken = {group: dict(modules) for group, modules in params.items()}
  for name in both:
    group, module = name.split("/")
    taken[group][module] = theirs[name]
  return taken, both, [name for name in mine if name not in theirs]


def _shapes(tree) -> dict[str, tuple[int, ...]]:
  return {name: jnp.shape(x) for name, x in named(tree).items()}


def _parts(params: dict) -> dict:
  return {f"{group}/{m}": tree for group, modules in params.items() for m, tree in modules.items()}
