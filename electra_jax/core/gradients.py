"""Gradients written by hand, and a switch to JAX's own."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import jax

_plain = contextvars.ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_gradients() -> Iterator[None]:
  """A context in which networks are traced without gradients written by hand.

  These are faster in training, but `jax.jvp`, `jax.linearize` and `jax.hessian` refuse them. A
  function that was jitted outside of the context keeps what it was traced with.
  """
  token = _plain.set(True)
  try:
    yield
  finally:
    _plain.reset(token)


def by_hand(function: Callable, nondiff_argnums: tuple[int, ...] = ()) -> Callable:
  """Acts as `jax.custom_vjp`; within `plain_gradients` it is the function itself."""
  custom = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

  @functools.wraps(function)
  def either(*args, **kwargs):
    return (function if _plain.get() else custom)(*args, **kwargs)

  either.defvjp = custom.defvjp
  return either
