"""Parameter trees: counting them, by network."""

import jax


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
    "generator": count(params["generator"]),
    "total": count(params),
  }
