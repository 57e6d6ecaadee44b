"""Hand-written gradients, and a switch to automatic differentiation."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import jax

_plain = contextvars.ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_gradients() -> Iterator[None]:
  """A context in which networks are traced without hand-written gradients.

  Hand-written gradients are faster in training, but do not work with `jax.jvp`, `jax.linearize` and
  `jax.hessian`. A function that was compiled outside the context keeps them.
  """
  token = _plain.set(True)
  try:
    yield
  finally:
    _plain.reset(token)


def by_hand(function: Callable, nondiff_argnums: tuple[int, ...] = ()) -> Callable:
  """Acts as `jax.custom_vjp`, or as the function itself inside `plain_gradients`."""
  custom = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

  @functools.wraps(function)
  def either(*args, **kwargs):
    return (function if _plain.get() else custom)(*args, **kwargs)

  either.defvjp = custom.defvjp
  return either
